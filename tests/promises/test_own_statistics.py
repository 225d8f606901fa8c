"""Rows 2 and 66: each step has its own statistics. A skipped step takes back its own batch, and no other one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from support import FEATURES, Toy, assert_same, batches, fit, scaled_fp32, with_batch_norm
from support.promises import OPTIMIZERS, Plugins, fused_adamw, plain_adamw
from torch import Tensor, nn

from lightning_amp import AmpPrecision, FabricAmpPrecision

both_ways = pytest.mark.usefixtures("where_flags_live")
NAN = float("nan")

# -- statistics that are frozen during a run ---------------------------------------------------------------------------


class Freezes(Toy):
    """From batch 3 on the statistics are fixed. The loss of batch 5 is NaN."""

    def __init__(self, optimizer: Any = plain_adamw, manual: bool = False) -> None:
        super().__init__(optimizer, with_batch_norm())
        self.automatic_optimization = not manual
        self.seen: list[dict[str, Tensor]] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        norm = self.net[1]
        norm.train(batch_idx < 3)
        self.seen.append({name: buffer.clone() for name, buffer in norm.named_buffers()})
        loss = self.net(batch).float().pow(2).mean() * (NAN if batch_idx == 5 else 1)
        if self.automatic_optimization:
            return loss
        self.optimizers().zero_grad()
        self.manual_backward(loss)
        self.optimizers().step()
        return None


@both_ways
@pytest.mark.parametrize(("manual", "accumulate"), [(False, 1), (False, 2), (True, 1)])
@pytest.mark.parametrize("optimizer", ["adamw", "fused adamw"])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_fixed_statistics_stay_when_a_step_is_skipped(
    precision: str, optimizer: str, manual: bool, accumulate: int
) -> None:
    plugin = scaled_fp32() if precision == "fp16" else AmpPrecision(precision)
    settings: dict[str, Any] = {} if manual else {"accumulate_grad_batches": accumulate}
    trainer = fit(lambda: Freezes(OPTIMIZERS[optimizer], manual), plugin, batches(8), **settings)
    module: Any = trainer.lightning_module
    assert plugin.num_skipped == 1
    assert module.seen[3]["num_batches_tracked"] == 3
    for later in module.seen[4:]:
        assert_same(later, module.seen[3])


@both_ways
@pytest.mark.parametrize("optimizer", [plain_adamw, fused_adamw])
def test_a_model_of_fabric_in_evaluation_mode(optimizer: Any) -> None:
    plugin = FabricAmpPrecision("fp32")
    fabric = L.Fabric(accelerator="cpu", devices=1, plugins=plugin)
    net = with_batch_norm()
    model, wrapped = fabric.setup(net, optimizer(net.parameters()))
    seen = []
    for index, batch in enumerate(batches(8)):
        model.train(index < 3)
        seen.append({name: buffer.clone() for name, buffer in net.named_buffers()})
        wrapped.zero_grad()
        fabric.backward(model(batch).float().pow(2).mean() * (NAN if index == 5 else 1))
        wrapped.step()
    assert plugin.num_skipped == 1
    for later in seen[4:]:
        assert_same(later, seen[3])


# -- two optimizers ----------------------------------------------------------------------------------------------------


class Nets(nn.Module):
    """Two networks, each with a BatchNorm. The second one writes a queue, too."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Sequential(nn.Linear(FEATURES, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        self.b = nn.Sequential(nn.Linear(FEATURES, 4), nn.Sequential(nn.BatchNorm1d(4, affine=False)), nn.Linear(4, 1))
        self.b.register_buffer("queue", torch.zeros(4))


def state(net: nn.Module, *, queue: bool) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in net.named_buffers() if queue or "queue" not in name}


def loss_of(net: nn.Module, batch: Tensor, trouble: str | None) -> Tensor:
    loss = net(batch * torch.inf if trouble == "input" else batch).float().pow(2).mean()
    for buffer in (buffer for name, buffer in net.named_buffers() if "queue" in name):
        buffer.add_(loss.detach())
    return loss * NAN if trouble == "loss" else loss


def train(nets: Any, optimizers: Any, backward: Callable[[Tensor], Any], batch: Tensor, plan: Any, queue: bool) -> None:
    """Train on a batch, and check the buffers of both networks. `plan`: the order of the steps, and what is wrong."""
    order, interleaved, trouble = plan
    queue = queue and not interleaved  # nobody knows whether a forward between two steps has written through `.data`
    for optimizer in optimizers.values():
        optimizer.zero_grad()
    before = {name: state(nets[name], queue=queue) for name in "ab"}
    losses = {name: loss_of(nets[name], batch, trouble.get(name)) for name in "ab"}
    after = {name: state(nets[name], queue=queue) for name in "ab"}
    for name in () if interleaved else "ab":
        backward(losses[name])
    for name in order:
        if interleaved:
            backward(losses[name])
        optimizers[name].step()
    for name in "ab":
        assert_same(state(nets[name], queue=queue), (before if name in trouble else after)[name])
    if nets["b"].queue.isnan().any():
        nets["b"].queue.zero_()


PLANS = [
    (order, interleaved, dict.fromkeys(bad, trouble))
    for order in ("ab", "ba")
    for interleaved in (False, True)
    for bad in ("a", "b", "ab", "")
    for trouble in ("loss", "input")
]


class Together(L.LightningModule):
    def __init__(self, optimizer: Any, queue: bool) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.nets, self.make_optimizer, self.queue = Nets(), optimizer, queue

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizers = dict(zip("ab", self.optimizers(), strict=True))
        nets = {"a": self.nets.a, "b": self.nets.b}
        train(nets, optimizers, self.manual_backward, batch, PLANS[batch_idx], self.queue)

    def configure_optimizers(self) -> Any:
        return [self.make_optimizer(net.parameters()) for net in (self.nets.a, self.nets.b)]


@both_ways
@pytest.mark.parametrize("optimizer", [plain_adamw, fused_adamw])
@pytest.mark.parametrize("queue", [False, True])
@pytest.mark.few(4)
def test_two_optimizers_in_a_batch(queue: bool, optimizer: Any) -> None:
    plugin = AmpPrecision("bf16", restore_buffers=["*.queue"]) if queue else scaled_fp32()
    fit(lambda: Together(optimizer, queue), plugin, batches(len(PLANS)))
    assert plugin.num_skipped == sum(len(trouble) for *_, trouble in PLANS)


@both_ways
@pytest.mark.parametrize("optimizer", [plain_adamw, fused_adamw])
def test_two_optimizers_in_a_batch_of_fabric(optimizer: Any) -> None:
    fabric = L.Fabric(accelerator="cpu", devices=1, plugins=FabricAmpPrecision("fp32", restore_buffers=["queue"]))
    plain = Nets()
    pairs = {n: fabric.setup(net, optimizer(net.parameters())) for n, net in (("a", plain.a), ("b", plain.b))}
    nets, optimizers = ({name: pair[i] for name, pair in pairs.items()} for i in (0, 1))
    for plan, batch in zip(PLANS, batches(len(PLANS)), strict=True):
        train(nets, optimizers, fabric.backward, batch, plan, True)


class Gan(L.LightningModule):
    """The step of the generator runs the discriminator again, whose BatchNorm then has two batches."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.make_optimizer = optimizer
        self.g, self.d = nn.Linear(FEATURES, FEATURES), Nets().a

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        g, d = self.optimizers()
        counts = []
        for optimizer, fake, bad in ((d, self.g(batch).detach(), batch_idx == 2), (g, self.g(batch), batch_idx == 3)):
            optimizer.zero_grad()
            self.manual_backward(self.d(fake).float().pow(2).mean() * (NAN if bad else 1))
            optimizer.step()
            counts.append(int(self.d[1].num_batches_tracked))
        first = 2 * batch_idx - (batch_idx > 2) - (batch_idx > 3)
        assert counts == [first + (batch_idx != 2), first + 1 + (batch_idx < 2 or batch_idx > 3)]

    def configure_optimizers(self) -> Any:
        return [self.make_optimizer(net.parameters()) for net in (self.g, self.d)]


@both_ways
@pytest.mark.parametrize("optimizer", [plain_adamw, fused_adamw])
def test_the_generators_step_takes_back_its_own_forward_through_the_discriminator(optimizer: Any) -> None:
    plugin = Plugins(True).scaled()
    fit(lambda: Gan(optimizer), plugin, batches(6))
    assert plugin.num_skipped == 2
