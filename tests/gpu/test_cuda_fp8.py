"""fp8 on a device that supports it: real kernels, eager and compiled.

`LIGHTNING_AMP_TEST_FP8=emulated python -m pytest tests/gpu/test_cuda_fp8.py` runs the same tests on any CPU. There they
use emulated recipes, small sizes and a compiler that generates no code. `emulated-large` takes the sizes of a GPU,
which needs minutes. Use it to change these tests without such a device. It says nothing about kernels.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from support import CountReads, ForbidSync, Toy, assert_same, batches, fit, quiet_trainer, weights
from support.fp8 import RECIPES, emulated, sqnr_db
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from lightning_amp import AmpPrecision

HOW = os.environ.get("LIGHTNING_AMP_TEST_FP8", "real")
EMULATED = HOW in {"emulated", "emulated-large"}
HERE = "cpu" if EMULATED else "cuda"
BACKEND = "aot_eager" if EMULATED else "inductor"
WIDTH, INNER = (
    (64, 128) if HOW == "emulated" else (2304, 4096)
)  # the second size is large enough for every recipe, and no larger
ROWS = 64
NO_FP8 = not EMULATED and not (torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9))

pytestmark = [
    *([] if EMULATED else [pytest.mark.needs("fp8")]),
    pytest.mark.skipif(NO_FP8, reason="needs a CUDA device with fp8 (sm_89 or later)"),
    pytest.mark.filterwarnings("ignore"),  # torch's compilers log much; the tests below ask for our messages only
]
each_recipe = pytest.mark.parametrize("recipe", RECIPES)
eager_and_compiled = pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    pytest.importorskip("torchao")  # imported here, so that pytest collects the tests where torchao is missing
    torch.compiler.reset()
    yield
    if not EMULATED:
        torch.cuda.set_sync_debug_mode("default")


class Block(nn.Module):
    """A pre-norm residual block, like the MLP half of a transformer."""

    def __init__(self, norm: type[nn.Module] = nn.RMSNorm, width: int = WIDTH, inner: int = INNER) -> None:
        super().__init__()
        self.norm = norm(width)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """A stack of `depth` blocks with RMSNorm and LayerNorm in turn, between two layers that fp8 leaves alone."""

    def __init__(self, depth: int = 2, *, compiled: bool | Any = False, checkpointing: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(8, WIDTH, bias=False)  # so that a row of zeros stays a row of zeros inside the blocks
        self.blocks = nn.ModuleList(Block(nn.LayerNorm if i % 2 else nn.RMSNorm) for i in range(depth))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 1)
        self.checkpointing = checkpointing
        if compiled:
            for block in self.blocks:
                block.compile(backend=BACKEND if compiled is True else compiled)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            again: Any = {"use_reentrant": self.checkpointing == "reentrant"}
            x = checkpoint(block, x, **again) if self.checkpointing else block(x)
        return self.head(self.norm(x))


CHOSEN = {
    "net.embed": "the first linear layer",
    **dict.fromkeys([f"net.blocks.{i}.{name}" for i in range(2) for name in ("up", "down")]),
    "net.head": "the last linear layer",
}


class Looks(Toy):
    """Record the true gradient of each step, the network's output in validation, and each loss."""

    def __init__(self, net: nn.Module, lr: float = 1e-3, schedule: Any = None) -> None:
        super().__init__(lambda params: torch.optim.AdamW(params, lr=lr, fused=True), net, schedule)
        self.gradients: list[Tensor] = []
        self.losses: list[Tensor] = []
        self.outputs: list[Tensor] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.losses.append(loss.detach())
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        gradients = [p.grad for n, p in self.named_parameters() if n.startswith("net.blocks")]
        self.gradients = [torch.cat([g.flatten() for g in gradients if g is not None]).cpu()]

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.outputs.append(self.net(batch).clone())


def fp8(recipe: str = RECIPES[0]) -> AmpPrecision:
    return AmpPrecision("fp8", fp8_recipe=emulated(recipe) if EMULATED else recipe)


def run(plugin: AmpPrecision, module: Toy, data: Any = None, **kwargs: Any) -> Any:
    """Train on `HERE` and return the module."""
    data = batches(4, ROWS) if data is None else data
    return fit(module, plugin, data, accelerator=HERE, **kwargs).lightning_module


# -- accuracy ----------------------------------------------------------------------------------------------------------


@each_recipe
@eager_and_compiled
def test_it_trains_as_well_as_bf16(recipe: str, compiled: bool) -> None:
    plugin, bf16 = fp8(recipe), AmpPrecision("bf16")
    first, last = {}, {}
    for name, one in (("fp8", plugin), ("bf16", bf16)):
        losses = torch.stack(run(one, Looks(Net(compiled=compiled)), batches(60, ROWS)).losses)
        first[name], last[name] = float(losses[:5].mean()), float(losses[-20:].mean())
    assert dict(plugin.fp8_layers) == CHOSEN
    assert (plugin.num_steps, plugin.num_skipped) == (60, 0)
    assert last["bf16"] < first["bf16"] / 5
    assert abs(last["fp8"] - last["bf16"]) < 0.05 * first["bf16"]


@each_recipe
@eager_and_compiled
def test_gradients_have_the_accuracy_of_fp8(recipe: str, compiled: bool) -> None:
    """Errors lie between 18 and 35 dB: a higher SQNR means that fp8 was not used, a lower one that a scale is wrong."""
    (exact,) = run(AmpPrecision("fp32"), Looks(Net()), batches(1, ROWS)).gradients
    (ours,) = run(fp8(recipe), Looks(Net(compiled=compiled)), batches(1, ROWS)).gradients
    (half,) = run(AmpPrecision("bf16"), Looks(Net(compiled=compiled)), batches(1, ROWS)).gradients
    assert 18 < sqnr_db(ours, exact) < 35
    assert sqnr_db(half, exact) > sqnr_db(ours, exact) + 6


class Restart(L.Callback):
    """Start from other weights every few batches in the same run, so that nothing is compiled again."""

    def __init__(self, every: int) -> None:
        self.every = every

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % self.every == 0:
            torch.manual_seed(batch_idx // self.every)
            for layer in module.modules():
                if isinstance(layer, (nn.Linear, nn.LayerNorm, nn.RMSNorm)):
                    layer.reset_parameters()


@each_recipe
def test_nothing_becomes_nan(recipe: str) -> None:
    """Train with 20 seeds, compiled, behind RMSNorm and LayerNorm, with rows of every size and rows of zeros.

    Compiled fp8 beside a normalisation layer has produced NaN: pytorch/pytorch#150859, pytorch/ao#4652.
    """
    seeds, steps = 20, 4
    rows = torch.randn(seeds * steps, ROWS, 8, generator=torch.Generator().manual_seed(0))
    rows[:, 0], rows[:, 1], rows[:, 2], rows[:, 3] = 0.0, 1e-30, 1e-6 * rows[:, 3], 1e4 * rows[:, 2]

    class Robust(Looks):
        def loss(self, batch: Tensor) -> Tensor:
            return nn.functional.smooth_l1_loss(self.net(batch).float(), batch.sum(1, keepdim=True))

    module = Robust(Net(compiled=True))
    module.make_optimizer = lambda params: torch.optim.SGD(params, lr=1e-3, fused=True)  # no gradients to clear yet
    plugin = fp8(recipe)
    run(plugin, module, torch.utils.data.DataLoader(rows, batch_size=None), callbacks=[Restart(steps)])
    assert len(module.losses) == seeds * steps
    assert torch.stack(module.losses).isfinite().all()
    assert (plugin.num_steps, plugin.num_skipped) == (seeds * steps, 0)  # a gradient that is not finite skips its step


@each_recipe
@eager_and_compiled
def test_the_last_batch_may_be_of_any_size(recipe: str, compiled: bool) -> None:
    plugin = fp8(recipe)
    rows = torch.randn(2 * ROWS + 37, 8)
    module = run(plugin, Looks(Net(compiled=compiled)), torch.utils.data.DataLoader(rows, batch_size=ROWS))
    assert torch.stack(module.losses).isfinite().all()
    assert (plugin.num_steps, plugin.num_skipped) == (3, 0)


# -- a run -------------------------------------------------------------------------------------------------------------


@eager_and_compiled
def test_ten_steps_and_ten_more_are_twenty(compiled: bool, tmp_path: Path) -> None:
    class Decayed(Looks):
        def __init__(self, net: nn.Module) -> None:
            super().__init__(net, schedule=lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.9))

    keep = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
    plugin, data = fp8(), batches(10, ROWS)
    one, two = (Decayed(Net(1, compiled=compiled)) for _ in range(2))
    whole = run(plugin, one, data, max_epochs=2, callbacks=[keep], enable_checkpointing=True)
    second = fp8()
    resumed = run(second, two, data, max_epochs=2, seed=1, ckpt_path=tmp_path / "epoch=0.ckpt")
    assert plugin.num_steps == second.num_steps == 20
    assert len(resumed.losses) == 10
    assert_same(whole, resumed)


@eager_and_compiled
def test_evaluation_is_that_of_bf16(compiled: bool) -> None:
    """Values agree bit for bit in the fit's validation and in a separate one."""
    val = batches(2, ROWS, seed=1)
    module = Looks(Net(compiled=compiled))
    trainer = quiet_trainer(plugins=[fp8()], accelerator=HERE, num_sanity_val_steps=0)
    trainer.fit(module, batches(3, ROWS), val)
    of_fit = list(module.outputs)
    assert len(of_fit) == 2
    for plugin in (AmpPrecision("bf16"), fp8()):
        again = Looks(Net(compiled=compiled))
        again.load_state_dict(module.state_dict())
        quiet_trainer(plugins=[plugin], accelerator=HERE).validate(again, val, verbose=False)
        assert_same(again.outputs, of_fit)


def test_modules_and_checkpoints_know_nothing_of_it() -> None:
    seen: list[tuple[list[type], list[str]]] = []

    class Look(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *args: Any) -> None:
            seen.append(([type(m) for m in module.modules()], list(module.state_dict())))

    module = Looks(Net())
    before = [type(m) for m in module.modules()], list(module.state_dict())
    run(fp8(), module, callbacks=[Look()])
    assert seen == [before] * 4
    assert ([type(m) for m in module.modules()], list(module.state_dict())) == before
    assert not [name for name, m in module.named_modules() if "forward" in vars(m)]
    assert all(type(value) is Tensor for value in module.state_dict().values())
    other = Looks(Net())
    other.load_state_dict(module.state_dict())
    run(AmpPrecision("bf16"), other)  # training continues without fp8


@pytest.fixture
def process_group() -> Iterator[None]:
    before = dict(os.environ)
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    for name in os.environ.keys() - before.keys():
        del os.environ[name]


@eager_and_compiled
@pytest.mark.usefixtures("process_group")
def test_fsdp2(compiled: bool) -> None:
    """A mesh of one device runs the same kernels, on `DTensor` parameters."""

    class Sharded(Looks):
        def configure_model(self) -> None:
            for module in (*self.net.blocks, self.net):
                fully_shard(module, mesh=self.device_mesh["data_parallel"])

    plain = run(fp8(), Looks(Net(compiled=compiled)), batches(10, ROWS))
    plugin, strategy = fp8(), ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=1)
    sharded = run(
        plugin, Sharded(Net(compiled=compiled)), batches(10, ROWS), strategy=strategy, use_distributed_sampler=False
    )
    assert dict(plugin.fp8_layers) == CHOSEN
    assert plugin.num_skipped == 0
    assert_same(sharded.losses, plain.losses, rtol=0.02, atol=0.02)


@each_recipe
@pytest.mark.parametrize("kind", ["reentrant", "non-reentrant"])
def test_activation_checkpointing(kind: str, recipe: str) -> None:
    """Activation checkpointing computes the same values again, in fp8."""
    one, two = (run(fp8(recipe), Looks(Net(checkpointing=k)), batches(1, ROWS)) for k in ("", kind))
    assert_same(one.losses, two.losses)
    assert_same(one.gradients, two.gradients)


def test_activation_checkpointing_compiled() -> None:
    one, two = (run(fp8(), Looks(Net(checkpointing=k, compiled=True)), batches(1, ROWS)) for k in ("", "non-reentrant"))
    assert sqnr_db(two.gradients[0], one.gradients[0]) > 40


# -- what a user is told, and what it costs ----------------------------------------------------------------------------


def test_a_module_that_is_not_compiled_is_warned_about() -> None:
    text = "fp8 is emulated" if EMULATED else "fp8 without `torch.compile` is slower than bf16"
    with pytest.warns(match=text):
        run(fp8(), Looks(Net()), batches(1, ROWS))


@pytest.mark.skipif(EMULATED, reason="emulation warns always")
def test_a_compiled_one_is_not() -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="lightning_amp.*")
        run(fp8(), Looks(Net(compiled=True)), batches(1, ROWS))


@pytest.mark.skipif(EMULATED, reason="emulation takes layers of any size")
@each_recipe
def test_layers_that_are_too_small_are_listed(recipe: str) -> None:
    small = "1024 x 1024: too small, casts would cost more than fp8 saves"
    net = nn.Sequential(
        nn.Linear(8, 1024), nn.Linear(1024, 1024), nn.Linear(1024, 8192), nn.Linear(8192, 8192), nn.Linear(8192, 1)
    )
    plugin = fp8(recipe)
    run(plugin, Looks(net), batches(1, ROWS))
    assert plugin.fp8_layers["1"] == small
    assert plugin.fp8_layers["3"] is None
    with pytest.raises(ValueError, match=r"none of the 3 linear layers qualifies(.|\n)*too small"):
        run(fp8(recipe), Looks(nn.Sequential(*list(net)[:2], nn.Linear(1024, 1))), batches(1, ROWS))


@each_recipe
@eager_and_compiled
def test_the_host_never_waits(recipe: str, compiled: bool) -> None:
    module = Toy(lambda params: torch.optim.AdamW(params, fused=True), Net(compiled=compiled))
    if not EMULATED:
        run(fp8(recipe), module, batches(6, ROWS), callbacks=[ForbidSync()])
        return
    reads: Callable[[AmpPrecision], int] = lambda plugin: _reads(plugin, compiled)  # noqa: E731
    assert reads(fp8(recipe)) == reads(AmpPrecision("bf16"))


def _reads(plugin: AmpPrecision, compiled: bool) -> int:
    module = Toy(lambda params: torch.optim.AdamW(params, fused=True), Net(compiled=compiled))
    with CountReads() as mode:
        run(plugin, module, batches(6, ROWS))
    return mode.count


def test_blocks_that_are_alike_are_compiled_once() -> None:
    """Without it each block costs a compilation, and from the ninth on (`recompile_limit`) blocks run uncompiled."""
    counts: dict[str, int] = {}
    for name, plugin in (("bf16", AmpPrecision("bf16")), ("fp8", fp8())):
        torch.compiler.reset()
        counter = CompileCounterWithBackend("aot_eager")  # nothing below depends on our code
        net = Net(0)
        net.blocks.extend(Block() for _ in range(10))
        for block in net.blocks:
            block.compile(backend=counter)
        run(plugin, Looks(net), batches(2, ROWS))
        counts[name] = counter.frame_count
    assert counts["fp8"] == counts["bf16"] == 1


def test_a_layer_may_be_frozen_in_the_middle() -> None:
    net = Net()

    class Freeze(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                module.net.blocks[0].up.requires_grad_(False)

    frozen = weights(net)
    module = run(fp8(), Looks(net), callbacks=[Freeze()])
    assert torch.stack(module.losses).isfinite().all()
    assert not torch.equal(frozen["blocks.0.up.weight"], weights(net)["blocks.0.up.weight"].cpu())
