"""Promises 3, 4, 7, 8, 11 and 12 in Fabric: clipping, unscaling, autocast, closures, half-precision losses.

As in `test_fabric.py`, each loop equals fp32 bit for bit, and fails with Fabric's own plugin.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import FEATURES, assert_same
from support.fabric import (
    CASES,
    DEVICE,
    OPTIMIZERS,
    FabricPlugins,
    Loop,
    batches,
    optimizer_tensors,
    promise,
    spoilt,
    without,
)
from support.promises import DIFFERS, fused_adamw, fused_sgd, plain_adamw, plain_sgd
from torch import Tensor, nn

from lightning_amp import FabricAmpPrecision

BAD: Any = {0: "gradient", 2: "loss", 5: "gradient"}
ours = pytest.mark.parametrize("plugins", [FabricPlugins()])
both_ways = pytest.mark.usefixtures("where_flags_live")


# -- rows 3, 4 and 8: clipping -----------------------------------------------------------------------------------------

CLIPS: dict[str, dict[str, float]] = {"norm": {"max_norm": 0.5}, "value": {"clip_val": 0.02}}
REFUSED = "not implemented for optimizers handling the unscaling"


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("optimizer", [fused_adamw, fused_sgd])
@promise(3, stock=REFUSED, raises=NotImplementedError)
def test_clipping_with_a_fused_optimizer(plugins: FabricPlugins, optimizer: Any, clip: str) -> None:
    """litgpt and lightly-train clip in this way. The norms that `clip_gradients` returns are the true ones, too."""

    def clipped(plugin: Any) -> Any:
        norms: list[Any] = []
        loop = Loop(plugin, optimizer=optimizer).run(edit=lambda loop: norms.append(loop.clip(**CLIPS[clip])))
        return loop.weights(), [norm for norm in norms if norm is not None]

    ours, reference = clipped(plugins.fp16(2.0**16, growth_interval=3)), clipped(None)
    assert_same(ours, reference)
    assert len(ours[1]) == (8 if clip == "norm" else 0)


def overflow_at_a_clip(plugin: Any, optimizer: Any, clip: str) -> list[Any]:
    """Return the norms, after a comparison with a run that never drew the bad batches."""
    bad: Any = {1: "gradient", 2: "loss", 6: "gradient"}
    norms: list[Any] = []
    loop = Loop(plugin, optimizer=optimizer, trouble=bad)
    loop.run(edit=lambda loop: norms.append(loop.clip(**CLIPS[clip])))
    reference = Loop(optimizer=optimizer).run(without(bad), edit=lambda loop: loop.clip(**CLIPS[clip]))
    assert_same(loop.weights(), reference.weights())
    assert_same(optimizer_tensors(loop.optimizer), optimizer_tensors(reference.optimizer))
    return norms


@pytest.mark.parametrize("optimizer", CASES)
@promise(3, stock=f"non-finite|{REFUSED}", raises=(RuntimeError, NotImplementedError))
def test_an_overflow_at_a_clip_by_norm_skips_the_step(plugins: FabricPlugins, optimizer: str) -> None:
    """Fabric raises by default at a norm that is not finite."""
    plugin = plugins.fp16()
    norms = overflow_at_a_clip(plugin, OPTIMIZERS[optimizer], "norm")
    assert [index for index, norm in enumerate(norms) if norm == 0] == [1, 2, 6]
    assert plugin.num_skipped == 3


@pytest.mark.parametrize("optimizer", [fused_adamw, fused_sgd])
@promise(3, stock=REFUSED, raises=NotImplementedError)
def test_an_overflow_at_a_clip_by_value_skips_the_step(plugins: FabricPlugins, optimizer: Any) -> None:
    overflow_at_a_clip(plugins.fp16(), optimizer, "value")


@both_ways
@pytest.mark.parametrize("optimizer", [plain_adamw, plain_sgd])
def test_an_overflow_at_a_clip_by_value_without_a_fused_optimizer(optimizer: Any) -> None:
    """Fabric's own plugin keeps this one in fp16, not in bf16."""
    overflow_at_a_clip(FabricPlugins().fp16(), optimizer, "value")


@pytest.mark.parametrize("clip", [None, "norm"])
@pytest.mark.parametrize("optimizer", CASES)
@pytest.mark.parametrize("precision", ["bf16"])
@promise(8, stock="are not close|non-finite|are not equal", raises=(RuntimeError, AssertionError))
def test_one_bad_batch_without_a_scaler(plugins: FabricPlugins, precision: str, optimizer: str, clip: Any) -> None:
    bad: Any = {3: "gradient", 4: "loss"}
    plugin, make = getattr(plugins, precision)(), OPTIMIZERS[optimizer]
    edit: Any = None if clip is None else lambda loop: loop.clip(**CLIPS[clip])
    loop = Loop(plugin, optimizer=make, trouble=bad).run(edit=edit)
    assert_same(loop.weights(), Loop(optimizer=make).run(without(bad), edit=edit).weights())


@both_ways
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_skip_nonfinite_can_be_off(precision: str) -> None:
    plugin = FabricAmpPrecision(precision, skip_nonfinite=False)
    loop = Loop(plugin, trouble={3: "gradient"}).run()
    assert not all(value.isfinite().all() for value in loop.weights().values())


def twice(loop: Loop) -> None:
    loop.clip(clip_val=0.05)
    loop.clip(max_norm=0.1)


def by_hand(loop: Loop) -> None:
    """Read and clip without Fabric."""
    loop.unscale()
    loop.unscale()
    norm = torch.nn.utils.clip_grad_norm_(loop.model.parameters(), 0.3)
    for parameter in loop.model.parameters():
        parameter.grad.add_(parameter.detach() * norm * 0.01)


def unscaled_then_clipped(loop: Loop) -> None:
    loop.unscale()
    loop.clip(max_norm=0.1)


@pytest.mark.parametrize("edit", [twice, by_hand, unscaled_then_clipped])
@pytest.mark.parametrize("optimizer", CASES)
@promise(4, stock=f"already been called|{REFUSED}", raises=(RuntimeError, NotImplementedError))
def test_unscaled_once(plugins: FabricPlugins, optimizer: str, edit: Any) -> None:
    make = OPTIMIZERS[optimizer]
    loop = Loop(plugins.fp16(), optimizer=make).run(edit=edit)
    assert_same(loop.weights(), Loop(optimizer=make).run(edit=edit).weights())


@pytest.mark.parametrize("optimizer", CASES)
@promise(4, stock=f"already been called|{REFUSED}|are not", raises=(RuntimeError, NotImplementedError, AssertionError))
def test_clip_then_accumulate(plugins: FabricPlugins, optimizer: str) -> None:
    """Clip after each backward of a window, so that unscaled gradients meet scaled ones."""

    def train(plugin: Any) -> dict[str, Tensor]:
        loop = Loop(plugin, optimizer=OPTIMIZERS[optimizer])
        for index, batch in enumerate(batches(9)):
            loop.backward(batch)
            loop.clip(max_norm=0.5)
            if index % 3 == 2:
                loop.optimizer.step()
                loop.optimizer.zero_grad()
        return loop.weights()

    assert_same(train(plugins.fp16(growth_interval=1)), train(None))


@pytest.mark.parametrize("optimizer", ["fused adamw", "fused sgd"])
@promise(3, stock=DIFFERS)
def test_hooks_of_the_optimizer_see_true_gradients(plugins: FabricPlugins, optimizer: str) -> None:
    def train(plugin: Any) -> Any:
        seen: list[Tensor] = []
        loop = Loop(plugin, optimizer=OPTIMIZERS[optimizer])
        params = list(loop.model.parameters())
        loop.raw.register_step_pre_hook(lambda *_: seen.extend(p.grad.clone() for p in params))
        return loop.run().weights(), seen

    assert_same(train(plugins.fp16()), train(None))


@both_ways
def test_a_value_mended_after_unscale_is_still_skipped() -> None:
    def mend(loop: Loop) -> None:
        loop.unscale()
        for parameter in loop.model.parameters():
            parameter.grad.nan_to_num_(1.0, 1.0, -1.0)

    plugin = FabricPlugins().fp16()
    loop = Loop(plugin, trouble={2: "gradient"}).run(edit=mend)
    assert_same(loop.weights(), Loop().run(without([2])).weights())
    assert plugin.num_skipped == 1


# -- row 7: autocast is off in the backward and in the step ------------------------------------------------------------


class Island(nn.Module):
    """A region that its author keeps in fp32; its backward runs where the caller calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(FEATURES, FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return torch.tanh(x.float() @ self.weight)


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@promise(7, stock="are not")
def test_autocast_around_the_whole_step(plugins: FabricPlugins, precision: str) -> None:
    modes: list[bool] = []

    class Spy(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            modes.append(torch.is_autocast_enabled(DEVICE))
            return super().step(closure)

    def train(around: bool) -> dict[str, Tensor]:
        loop = Loop(
            getattr(plugins, precision)(), lambda: nn.Sequential(Island(), nn.Linear(FEATURES, 1)),
            lambda params: Spy(params, lr=0.05),
        )  # fmt: skip
        for batch in batches():
            loop.optimizer.zero_grad()
            with loop.fabric.autocast():
                loss = loop.loss(batch)
                with contextlib.nullcontext() if around else torch.autocast(DEVICE, enabled=False):
                    loop.fabric.backward(loss)
                    loop.optimizer.step()
        return loop.weights()

    assert_same(train(around=True), train(around=False))
    assert_same(torch.tensor(modes), torch.zeros(16, dtype=torch.bool))


# -- row 11: closures --------------------------------------------------------------------------------------------------


class Sam(torch.optim.Optimizer):
    """Sharpness-aware minimisation: the closure runs twice, the second time at perturbed weights."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05})

    def step(self, closure: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        loss = torch.enable_grad()(closure)()
        with torch.no_grad():
            params = [p for group in self.param_groups for p in group["params"]]
            moves = [p.grad * 0.05 for p in params]
            torch._foreach_add_(params, moves)
            torch.enable_grad()(closure)()
            torch._foreach_sub_(params, moves)
            for parameter in params:
                parameter.sub_(parameter.grad, alpha=0.05)
        return loss


class Extrapolating(torch.optim.SGD):
    """It moves the weights before it calls its closure, as schedule-free optimizers do, and then moves them back."""

    def step(self, closure: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        params = [p for group in self.param_groups for p in group["params"]]
        moves = [self.state[p].get("last", torch.full_like(p, 0.01)) for p in params]
        with torch.no_grad():
            torch._foreach_add_(params, moves)
        loss = closure()
        with torch.no_grad():
            torch._foreach_sub_(params, moves)
            for parameter in params:
                self.state[parameter]["last"] = parameter.grad * 0.05
        super().step()
        return loss


class SamAfterBackward(torch.optim.SGD):
    """Sharpness-aware minimisation with the first backward before the step, as in `pytorch_optimizer`."""

    def step(self, closure: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        with torch.no_grad():
            params = [p for group in self.param_groups for p in group["params"]]
            moves = [p.grad * 0.05 for p in params]
            torch._foreach_add_(params, moves)
        self.zero_grad()
        loss = closure()
        with torch.no_grad():
            torch._foreach_sub_(params, moves)
        super().step()
        return loss


def lbfgs(params: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(params, lr=0.1, max_iter=3, tolerance_grad=0, tolerance_change=0)


def with_closures(plugin: Any, optimizer: Any, trouble: Any = None, data: Any = None, clip: bool = False) -> Any:
    loop = Loop(plugin, optimizer=optimizer, trouble=trouble)
    losses: list[Tensor] = []
    for batch in batches() if data is None else data:

        def closure(batch: Tensor = batch) -> Tensor:
            loop.optimizer.zero_grad()
            loss = loop.loss(batch)
            loop.fabric.backward(loss)
            if clip:
                loop.clip(max_norm=0.5)
            return loss

        losses.append(loop.optimizer.step(closure).detach())
        loop.index += 1
    return loop.weights(), [loss for index, loss in enumerate(losses) if index not in (trouble or {})]


def extrapolating(params: Any) -> torch.optim.Optimizer:
    return Extrapolating(params, lr=0.05)


CLOSURES = {
    "lbfgs": lbfgs, "sam": Sam, "extrapolating": extrapolating, "adamw": plain_adamw, "fused adamw": fused_adamw
}  # fmt: skip
NO_CLOSURES = "not compatible|Closure use is not"


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("optimizer", CLOSURES)
@promise(11, stock=NO_CLOSURES, raises=(TypeError, RuntimeError))
def test_closures(plugins: FabricPlugins, optimizer: str, clip: bool) -> None:
    """The step returns the true loss."""
    make = CLOSURES[optimizer]
    assert_same(with_closures(plugins.fp16(), make, clip=clip), with_closures(None, make, clip=clip))


@pytest.mark.parametrize("optimizer", CLOSURES)
@promise(11, stock=NO_CLOSURES, raises=(TypeError, RuntimeError))
def test_closures_that_overflow(plugins: FabricPlugins, optimizer: str) -> None:
    make, bad = CLOSURES[optimizer], {1: "gradient", 3: "loss"}
    plugin = plugins.fp16()
    assert_same(with_closures(plugin, make, bad), with_closures(None, make, data=without(bad)))
    assert plugin.num_skipped == 2


@pytest.mark.parametrize("bad", [None, 0, 3])
@pytest.mark.parametrize("where", ["before the step", "in the closure"])
@promise(11, stock=NO_CLOSURES, raises=(TypeError, RuntimeError))
def test_a_backward_before_a_step_with_a_closure(plugins: FabricPlugins, where: str, bad: int | None) -> None:
    """The optimizer reads the gradients of the first backward before it calls its closure."""

    def train(plugin: Any, data: Any, bad: int | None) -> dict[str, Tensor]:
        loop = Loop(plugin, optimizer=lambda params: SamAfterBackward(params, lr=0.05))
        for batch in data:

            def backward(place: str, batch: Tensor = batch) -> Tensor:
                loss = loop.loss(batch)
                loop.fabric.backward(spoilt(loss, "gradient") if loop.index == bad and place == where else loss)
                return loss

            loop.optimizer.zero_grad()
            backward("before the step")
            loop.optimizer.step(lambda: backward("in the closure"))
            loop.index += 1
        return loop.weights()

    plugin = plugins.fp16()
    reference = train(None, batches() if bad is None else without([bad]), None)
    assert_same(train(plugin, batches(), bad), reference)
    assert plugin.num_skipped == (bad is not None)


# -- row 12: half-precision losses -------------------------------------------------------------------------------------


def in_autocast(loop: Loop, batch: Tensor) -> Tensor:
    """The loss is computed outside the model, in half precision."""
    with loop.fabric.autocast():
        return nn.functional.linear(loop.model(batch), torch.ones(1, 1, device=batch.device)).mean()


def in_the_model(loop: Loop, batch: Tensor) -> Tensor:
    """The model returns its loss in half precision, and Fabric casts it to float32."""
    return loop.model(batch)


class OwnLoss(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).mean()


@pytest.mark.filterwarnings("always:The loss is float16")
@pytest.mark.parametrize("loss", [in_autocast, in_the_model])
@promise(12, stock="Booleans mismatch|are not equal")
def test_a_half_precision_loss(plugins: FabricPlugins, loss: Callable[[Loop, Tensor], Tensor]) -> None:
    if plugins.kind == "our scaler" and loss is in_autocast:
        raise AssertionError("Booleans mismatch: not reached, since our scaler knows the loss here")
    plugin = plugins.fp16(2.0**16, growth_interval=2)
    make = (lambda: OwnLoss(FEATURES, 1)) if loss is in_the_model else (lambda: nn.Linear(FEATURES, 1))
    loop = Loop(plugin, make)
    for batch in batches():
        loop.optimizer.zero_grad()
        loop.fabric.backward(loss(loop, loop.fabric.to_device(batch)))
        loop.optimizer.step()
    # Fabric's plugin counts nothing; a scale below the one after eight clean steps shows the skips
    torch.testing.assert_close(plugin.num_skipped == 0 if plugins.ours else plugin.scaler.get_scale() == 2.0**20, True)
