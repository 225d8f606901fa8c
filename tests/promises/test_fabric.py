"""Promises 1, 2, 5, 6, 9 and 16 in Fabric: skipped steps, buffers, several optimizers, the scale.

Each loop equals fp32 bit for bit, and fails with Fabric's own plugin. The models compute in fp32 under any autocast, so
that only the optimizer step can make a difference. Promises 10 and 17 are about hooks of the Trainer.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import FEATURES, assert_same, with_batch_norm
from support.fabric import (
    CASES,
    Exact,
    FabricPlugins,
    Loop,
    batches,
    make_fabric,
    optimizer_tensors,
    promise,
    without,
)
from support.promises import DIFFERS, OPTIMIZERS, fused_adamw, plain_adamw, plain_sgd
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR
from torch.optim.swa_utils import AveragedModel

from lightning_amp import FabricAmpPrecision
from lightning_amp.reports import ScaleHistory

BAD: Any = {0: "gradient", 2: "loss", 5: "gradient"}
both_ways = pytest.mark.usefixtures("where_flags_live")


# -- row 1: skipped steps ----------------------------------------------------------------------------------------------


class Average:
    """A moving average with an `update` method, as several packages have."""

    def __init__(self, model: Any) -> None:
        self.values = [p.detach().clone() for p in model.parameters()]
        self.model, self.updates = model, 0

    def update(self) -> None:
        self.updates += 1
        for value, parameter in zip(self.values, self.model.parameters(), strict=True):
            value.lerp_(parameter.detach(), 0.25)


class Followers:
    """A schedule and averaged weights that follow the steps of a loop."""

    def __init__(self, loop: Loop, way: str) -> None:
        self.loop, self.way = loop, way
        self.schedule: Any = ExponentialLR(loop.raw, 0.8)
        self.averaged: Any = AveragedModel(loop.model.module)
        self.ema: Any = Average(loop.model)
        if way == "guard" and isinstance(loop.plugin, FabricAmpPrecision):
            self.schedule = loop.plugin.guard(self.schedule)
            self.averaged = loop.plugin.guard(self.averaged)
            self.ema = loop.plugin.guard(self.ema, "update")

    def __call__(self, loop: Loop) -> None:
        plugin = loop.plugin
        if not isinstance(plugin, FabricAmpPrecision) or self.way == "guard":
            self.advance()
        elif self.way == "on_applied":
            plugin.on_applied(self.schedule.step)
            plugin.on_applied(self.averaged.update_parameters, loop.model.module)
            plugin.on_applied(self.ema.update)
        elif plugin.last_step.applied:
            self.advance()

    def advance(self) -> None:
        self.schedule.step()
        self.averaged.update_parameters(self.loop.model.module)
        self.ema.update()

    def state(self) -> Any:
        return {
            "weights": self.loop.weights(),
            "optimizer": optimizer_tensors(self.loop.optimizer),
            "rate": float(self.loop.raw.param_groups[0]["lr"]),
            "schedule": float(self.schedule.last_epoch),
            "averaged": dict(self.averaged.state_dict()),
            "ema": [*self.ema.values, torch.tensor(self.ema.updates)],
        }


def followed(plugin: Any, way: str, optimizer: Any, trouble: Any = None, data: Any = None) -> Any:
    loop = Loop(plugin, optimizer=optimizer, trouble=trouble)
    followers = Followers(loop, way)
    loop.run(data, after=followers)
    return followers.state()


@pytest.mark.filterwarnings("error:Detected call of")  # the first step is skipped
@pytest.mark.parametrize("optimizer", CASES)
@pytest.mark.parametrize("way", ["guard", "on_applied", "last_step"])
@promise(1, stock=f"{DIFFERS}|Detected call", raises=(AssertionError, UserWarning))
def test_schedules_and_averages_see_applied_steps(plugins: FabricPlugins, way: str, optimizer: str) -> None:
    make = OPTIMIZERS[optimizer]
    reference = followed(None, "", make, data=without(BAD))
    plugin = plugins.fp16()
    assert_same(followed(plugin, way, make, BAD), reference)
    assert (plugin.num_steps, plugin.num_skipped) == (5, 3)


@both_ways
@pytest.mark.parametrize("way", ["guard", "on_applied"])
def test_a_call_per_several_steps_happens_if_one_was_applied(way: str) -> None:
    plugin = FabricPlugins().fp16()
    loop = Loop(plugin, optimizer=fused_adamw, trouble={1: "gradient", 2: "gradient", 3: "gradient", 4: "gradient"})
    average = plugin.guard(Average(loop.model), "update") if way == "guard" else Average(loop.model)

    def after(loop: Loop) -> None:
        if loop.index % 2:
            average.update() if way == "guard" else plugin.on_applied(average.update)

    loop.run(after=after)
    # batches 0+1, 2+3, 4+5, 6+7: the second pair was skipped; `on_applied` goes by the last step of each pair
    assert average.updates == (3 if way == "guard" else 2)


@both_ways
@pytest.mark.parametrize("optimizer", CASES)
def test_records(optimizer: str) -> None:
    plugin = FabricPlugins().fp16()
    seen: list[Any] = []
    applied: list[bool] = []
    plugin.records.subscribe(seen.extend)
    history = ScaleHistory.following(plugin.records)
    Loop(plugin, optimizer=OPTIMIZERS[optimizer], trouble={0: "gradient", 3: "loss"}).run(
        after=lambda loop: applied.append(plugin.last_step.applied)
    )
    assert [record.reason for record in seen] == ["gradient", "none", "none", "loss", *["none"] * 4]
    assert [record.skipped for record in seen] == [not value for value in applied]
    assert [record.scale for record in seen] == [1024.0] + [512.0] * 7
    assert [record.next_scale for record in seen] == [512.0] * 8
    assert [record.index for record in seen] == list(range(8))
    assert {record.precision for record in seen} == {"fp16"}
    assert (plugin.num_steps, plugin.num_skipped, plugin.last_step) == (6, 2, seen[-1])
    assert (history.num_steps, history.num_skipped) == (6, 2)
    assert [record for record in history if record.skipped] == [record for record in seen if record.skipped]


# -- row 2: buffers ----------------------------------------------------------------------------------------------------


def normed() -> nn.Module:
    return Exact(with_batch_norm())


@pytest.mark.parametrize("optimizer", CASES)
@pytest.mark.parametrize("trouble", ["gradient", "loss", "input"])
@promise(2, stock=DIFFERS)
def test_batch_norm_after_a_skipped_step(plugins: FabricPlugins, trouble: Any, optimizer: str) -> None:
    make, bad = OPTIMIZERS[optimizer], {3: trouble, 7: trouble}
    loop = Loop(plugins.fp16(), normed, make, bad).run()
    assert_same(loop.weights(), Loop(None, normed, make).run(without(bad)).weights())


class Queue(nn.Module):
    """A queue of keys that each forward edits or replaces."""

    def __init__(self, replaces: bool) -> None:
        super().__init__()
        self.replaces, self.net = replaces, nn.Linear(FEATURES, 1)
        self.register_buffer("queue", torch.zeros(4, FEATURES))
        self.register_buffer("pointer", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        if self.replaces:
            self.queue = self.queue.roll(1, 0)
            self.pointer = self.pointer + 1
        else:
            self.pointer += 1
        self.queue[0] = x.mean(0)
        return self.net(x) + self.queue.mean()


@pytest.mark.parametrize("optimizer", [plain_adamw, fused_adamw])
@pytest.mark.parametrize("replaces", [False, True])
@promise(38, stock=DIFFERS)
def test_restore_buffers(plugins: FabricPlugins, replaces: bool, optimizer: Any) -> None:
    bad: Any = {1: "input", 4: "gradient", 7: "input"}
    plugin = plugins.fp16(settings={"restore_buffers": ["*queue", "*pointer"]})
    loop = Loop(plugin, lambda: Exact(Queue(replaces)), optimizer, bad).run()
    reference = Loop(None, lambda: Exact(Queue(replaces)), optimizer).run(without(bad))
    assert_same(loop.weights(), reference.weights())


# -- row 5: two optimizers ---------------------------------------------------------------------------------------------


class Two:
    """Two nets with an optimizer each; an order is a list of calls."""

    def __init__(self, plugin: Any, optimizer: Any) -> None:
        torch.manual_seed(1)
        self.fabric = make_fabric(plugin)
        a, b = Exact(nn.Linear(FEATURES, 4)), Exact(nn.Linear(4, 1))
        self.raw = optimizer(a.parameters()), optimizer(b.parameters())
        (self.a, one), (self.b, two) = self.fabric.setup(a, self.raw[0]), self.fabric.setup(b, self.raw[1])
        self.optimizers = one, two

    def losses(self, batch: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.a(batch)
        return (hidden**2).mean() * 3, (self.b(hidden) - batch.sum(1, keepdim=True)).pow(2).mean()

    def run(self, order: str, batches: Any) -> None:
        for batch in batches:
            for call in ORDERS[order].split(", "):
                verb, which = call.split()
                getattr(self, verb)(which, self.fabric.to_device(batch))

    def of(self, which: str) -> Any:
        return self.optimizers[int(which) - 1]

    def zero(self, which: str, batch: Tensor) -> None:
        self.of(which).zero_grad()

    def backward(self, which: str, batch: Tensor) -> None:
        losses = self.losses(batch)
        if which == "both":
            self.fabric.backward(losses[0], retain_graph=True)
        self.fabric.backward(losses[which != "1"])

    def step(self, which: str, batch: Tensor) -> None:
        self.of(which).step()

    def closure(self, which: str, batch: Tensor) -> None:
        def closure() -> Tensor:
            self.zero(which, batch)
            loss = self.losses(batch)[int(which) - 1]
            self.fabric.backward(loss)
            return loss

        self.of(which).step(closure)


ORDERS = {
    "one after the other": "zero 1, backward 1, step 1, zero 2, backward 2, step 2",
    "backwards first": "zero 1, zero 2, backward both, step 1, step 2",
    "closures": "closure 1, closure 2",
}


@pytest.mark.parametrize("order", ["one after the other", "backwards first", "closures"])
@promise(5, stock=f"{DIFFERS}|Closure use", raises=(AssertionError, RuntimeError))
def test_the_scale_grows_once_per_round(plugins: FabricPlugins, order: str) -> None:
    plugin = plugins.fp16(growth_interval=4)
    Two(plugin, plain_adamw).run(order, batches())
    if plugins.ours:
        plugin.flush()
    torch.testing.assert_close(plugin.scaler.get_scale(), 2.0**12)


# -- row 6: the scale --------------------------------------------------------------------------------------------------


@promise(6, stock=DIFFERS, our_scaler=None)
def test_bad_losses_never_lower_the_scale(plugins: FabricPlugins) -> None:
    plugin = plugins.fp16()
    Loop(plugin, trouble={2: "loss", 5: "loss"}).run()
    torch.testing.assert_close(plugin.scaler.get_scale(), 2.0**10)


@pytest.mark.parametrize("optimizer", [fused_adamw])
@pytest.mark.parametrize(("precision", "clip"), [("fp16", False), ("bf16", True)])
@promise(6, stock="DID NOT RAISE|non-finite|not implemented", raises=(pytest.fail.Exception, RuntimeError))
def test_a_stuck_run_raises(plugins: FabricPlugins, precision: str, clip: bool, optimizer: Any) -> None:
    if plugins.kind == "our scaler" and precision == "fp16" and not clip:
        pytest.fail("DID NOT RAISE: not reached, since our scaler itself raises here", pytrace=False)
    trouble: Any = dict.fromkeys(range(80), "gradient")
    low: Any = {"min_scale": 2.0**10} if precision == "fp16" and plugins.kind != "torch's scaler" else {}
    loop = Loop(getattr(plugins, precision)(**low), lambda: Exact(nn.Linear(FEATURES, 1)), optimizer, trouble)
    edit: Any = (lambda loop: loop.clip(max_norm=1.0)) if clip else None
    with pytest.raises(FloatingPointError, match="64 optimizer steps in a row"):
        loop.run(batches(70), edit=edit)


# -- row 9: nothing to do ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", [plain_adamw, plain_sgd])
@promise(9, stock="No inf checks|_scale is None", raises=AssertionError)
def test_a_step_without_gradients(plugins: FabricPlugins, optimizer: Any) -> None:
    loop = Loop(plugins.fp16(growth_interval=1), optimizer=optimizer)
    before = loop.weights()
    loop.optimizer.zero_grad()
    loop.optimizer.step()
    assert_same(loop.weights(), before)
    torch.testing.assert_close(loop.plugin.scaler.get_scale(), 2.0**10)
    loop.run()
    assert_same(loop.weights(), Loop(optimizer=optimizer).run().weights())


# -- row 16: exceptions ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", CASES)
@promise(16, stock="already been called|not implemented", raises=(RuntimeError, NotImplementedError))
def test_an_exception_between_clip_and_step(plugins: FabricPlugins, optimizer: str) -> None:
    make = OPTIMIZERS[optimizer]
    loop = Loop(plugins.fp16(), optimizer=make)
    loop.backward(batches()[0])
    loop.clip(max_norm=0.1)  # then the user runs out of memory, and goes on with the next batch
    loop.run(edit=lambda loop: loop.clip(max_norm=0.5))
    reference = Loop(optimizer=make).run(edit=lambda loop: loop.clip(max_norm=0.5))
    assert_same(loop.weights(), reference.weights())
