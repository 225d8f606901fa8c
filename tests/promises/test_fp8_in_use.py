"""fp8 works with the code that people write around layers, as bf16 does here and with Lightning's own plugin."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
import torch._dynamo.testing
from support import quiet_trainer
from support.fp8 import emulated, needs_torchao
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_amp import AmpPrecision

pytestmark = [
    needs_torchao,
    pytest.mark.filterwarnings(
        "ignore:lightning_amp. fp8 is emulated",
        "ignore:You defined a `validation_step` but have no",
        "ignore:.*in eval mode at the start of training",
        "ignore:.torch.jit.script. is deprecated",  # a warning of torch about itself
        "ignore:The .grad attribute of a Tensor that is not a leaf",  # Dynamo reads it
    ),
]
WIDTH = 32
ROWS = torch.randn(64, 16, WIDTH, generator=torch.Generator().manual_seed(0))


def plugin(precision: str, **kwargs: Any) -> AmpPrecision:
    return AmpPrecision(precision, fp8_recipe=emulated() if precision == "fp8" else None, **kwargs)


def loader() -> Any:
    return DataLoader(ROWS, batch_size=16)  # pyright: ignore[reportArgumentType]


class Net(L.LightningModule):
    """Two layers that qualify for fp8 between two that do not."""

    def __init__(self, use: Callable[[Net, Tensor], Tensor] | None = None, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.middle = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=bias), nn.Linear(WIDTH, WIDTH, bias=bias))
        self.last = nn.Linear(WIDTH, 1)
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(self.middle(x) if self.use is None else self.use(self, x))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self(batch).float(), batch.sum(-1, keepdim=True))

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.mse_loss(self(batch).float(), batch.sum(-1, keepdim=True)))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def in_place(net: Net, x: Tensor) -> Tensor:
    return nn.functional.relu(net.middle(x), inplace=True)


def transposed(net: Net, x: Tensor) -> Tensor:
    return net.middle(x.transpose(0, 1)).transpose(0, 1)


def in_inference_mode(net: Net, x: Tensor) -> Tensor:
    with torch.inference_mode():
        target = net.middle(x)
    return net.middle(x) + target.clone()


def forward_mode(net: Net, x: Tensor) -> Tensor:
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        return torch.autograd.forward_ad.unpack_dual(net.middle(dual)).primal.clone()


def batched_gradients(net: Net, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    y = net.middle(x)
    torch.autograd.grad(
        y, x, torch.ones(3, *y.shape, dtype=y.dtype, device=y.device), is_grads_batched=True, retain_graph=True
    )
    return y


def nested(net: Net, x: Tensor) -> Tensor:
    parts = torch.nested.nested_tensor_from_jagged(
        x.reshape(-1, WIDTH), torch.tensor([0, 7, x.numel() // WIDTH], device=x.device)
    )
    return net.middle(parts).values().reshape(x.shape)


USES = (
    in_place, transposed, in_inference_mode, pytest.param(forward_mode, marks=pytest.mark.needs("forward AD")),
    batched_gradients, nested,
)  # fmt: skip


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize("use", USES, ids=lambda use: getattr(use, "__name__", None))
def test_runs(use: Callable[[Net, Tensor], Tensor], precision: str) -> None:
    quiet_trainer(plugins=[plugin(precision)], limit_train_batches=2).fit(Net(use, bias=use is not in_place), loader())


class Each(L.Callback):
    """Call a function with the module in each named hook."""

    def __init__(self, do: Callable[[L.Trainer, Any], None], *hooks: str) -> None:
        for hook in hooks:
            setattr(self, hook, lambda trainer, module, *_: do(trainer, module))


def fresh(module: Net) -> Net:
    copied = Net()
    copied.load_state_dict(module.state_dict())
    return copied


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_callbacks_of_validation_see_what_validation_sees(precision: str) -> None:
    same: list[bool] = []

    def look(trainer: L.Trainer, module: Net) -> None:
        rows = ROWS[:2].to(module.device)
        with torch.no_grad(), trainer.precision_plugin.forward_context():
            same.append(torch.equal(module(rows), fresh(module).to(rows.device).eval()(rows)))

    hooks = ("on_validation_epoch_start", "on_validation_batch_end", "on_validation_epoch_end", "on_validation_end")
    trainer = quiet_trainer(plugins=[plugin(precision)], callbacks=[Each(look, *hooks)], limit_val_batches=1)
    trainer.fit(Net(), loader(), loader())
    assert all(same)


def validated(module: Net, **kwargs: Any) -> Any:
    trainer = quiet_trainer(plugins=[plugin("bf16")], limit_val_batches=1, **kwargs)
    return trainer.validate(module, loader(), verbose=False)


@pytest.mark.parametrize("inference_mode", [True, False])
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_another_trainer_evaluates_in_the_middle_as_ever(precision: str, inference_mode: bool) -> None:
    same: list[bool] = []

    def evaluate(trainer: L.Trainer, module: Net) -> None:
        expected = validated(fresh(module), inference_mode=inference_mode)
        same.append(validated(module, inference_mode=inference_mode) == expected)
        module.trainer = trainer

    callback = Each(evaluate, "on_train_epoch_end")
    quiet_trainer(plugins=[plugin(precision)], callbacks=[callback], limit_train_batches=1).fit(Net(), loader())
    assert same == [True]


def copied_in_the_middle(precision: str) -> Net:
    copies: list[Net] = []
    callback = Each(lambda trainer, module: copies.append(copy.deepcopy(module)), "on_train_batch_end")
    quiet_trainer(plugins=[plugin(precision)], callbacks=[callback], limit_train_batches=1).fit(Net(), loader())
    return copies[0]


@pytest.mark.parametrize("inference_mode", [True, False])
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_a_copy_made_in_the_middle_is_a_plain_module_afterwards(precision: str, inference_mode: bool) -> None:
    copied = copied_in_the_middle(precision)
    expected = validated(fresh(copied), inference_mode=inference_mode)
    assert validated(copied, inference_mode=inference_mode) == expected
    assert not any("forward" in vars(m) for m in copied.modules())


def test_a_copy_made_in_the_middle_trains_in_fp8() -> None:
    copied, own = copied_in_the_middle("fp8"), plugin("fp8")
    quiet_trainer(plugins=[own], limit_train_batches=1).fit(copied, loader())
    assert list(own.fp8_layers.values()).count(None) == 2


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_a_replica_computes_with_its_own_weights(precision: str) -> None:
    sums: list[float] = []

    def replicate(trainer: L.Trainer, module: Net) -> None:
        replica = module.middle[0]._replicate_for_data_parallel()  # `nn.DataParallel` copies modules like this
        vars(replica)["_parameters"] = {"weight": torch.zeros(WIDTH, WIDTH), "bias": torch.zeros(WIDTH)}
        sums.append(float(replica(ROWS[0]).abs().sum()))

    callback = Each(replicate, "on_train_batch_end")
    quiet_trainer(plugins=[plugin(precision)], callbacks=[callback], limit_train_batches=1).fit(Net(), loader())
    assert sums == [0]


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_exports_to_torchscript(precision: str) -> None:
    def export(trainer: L.Trainer, module: Net) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.jit.script(module.middle)

    callback = Each(export, "on_validation_epoch_end", "on_train_end")
    trainer = quiet_trainer(plugins=[plugin(precision)], callbacks=[callback], limit_train_batches=1)
    trainer.fit(Net(), loader(), loader())


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x))


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_equal_blocks_share_one_graph(precision: str) -> None:
    counter = torch._dynamo.testing.CompileCounter()
    torch._dynamo.reset()
    net = Net()
    net.middle = nn.Sequential(*[Block() for _ in range(4)])
    for block in net.middle:
        block.compile(backend=counter)  # the warning about an uncompiled module advises this
    quiet_trainer(plugins=[plugin(precision)], limit_train_batches=1).fit(net, loader())
    assert counter.frame_count == 1  # torch gives up after eight and runs the other blocks eagerly


@pytest.mark.filterwarnings("ignore:Lazy modules are")
@pytest.mark.needs("parameters that stay")
def test_a_lazy_layer_that_does_not_qualify_is_not_taken() -> None:
    """The wrapper does not warn that it is empty, although a layer made like it would."""
    own, net = plugin("fp8"), Net()
    net.first = nn.Linear(WIDTH, 17)
    net.middle = nn.Sequential(nn.LazyLinear(WIDTH), nn.Linear(WIDTH, WIDTH))
    quiet_trainer(plugins=[own], limit_train_batches=1).fit(net, loader())
    assert own.fp8_layers["middle.0"] is not None
