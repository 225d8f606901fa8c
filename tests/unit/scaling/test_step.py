"""One attempt to step, for optimizers that call their closure, or do not accept one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import flags_on_a_device
from torch import Tensor, nn

from lightning_amp.scaling import DynamicLossScaler, OptimizerSteps, RecordLog, Skip, StepPlan, StepResult

INF, NAN = float("inf"), float("nan")
SCALE = 8.0


class Base(torch.optim.Optimizer):
    """Gradient descent that keeps the gradients of each step."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.5})
        self.seen: list[list[float]] = []

    @torch.no_grad()
    def descend(self) -> None:
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            self.seen.append(p.grad.tolist())
            p.sub_(0.5 * p.grad)
            self.state[p]["steps"] = self.state[p].get("steps", 0) + 1


class Once(Base):
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            output = closure()
        self.descend()
        return output


class TakesNone(Base):
    def step(self) -> str:
        self.descend()
        return "own output"


class CatchesEverything(Base):
    def step(self, closure: Any = None) -> Any:
        try:
            return closure()
        except Exception:
            return "caught"
        finally:
            self.descend()


class Loop:
    """A loop with one parameter, whose gradients the test sets."""

    def __init__(
        self,
        make: Callable[[Any], torch.optim.Optimizer],
        scaler: Any = SCALE,
        skip_nonfinite: bool = True,
        **kwargs: Any,
    ) -> None:
        self.param = nn.Parameter(torch.zeros(2))
        self.optimizer = make([self.param])
        self.scale = scaler or 1.0
        scaler = DynamicLossScaler.static(scaler) if scaler else None
        self.log = RecordLog()
        self.steps = OptimizerSteps(scaler, skip_nonfinite, self.log, [self.optimizer], **kwargs)
        self.looked = 0

    def backward(self, *gradient: float) -> Tensor:
        loss = self.param.sum()
        self.optimizer.zero_grad()
        scaled = self.steps.scale_loss(loss)
        with self.steps.scaled_backward():
            scaled.backward()
        self.param.grad.copy_(torch.tensor(gradient) * self.scale)
        return loss

    def look(self) -> None:
        self.looked += 1

    def step(self, *gradients: tuple[float, float] | BaseException) -> StepResult:
        """Step with a closure that computes these gradients, one after the other. Keep the `output`."""
        coming = iter(gradients)

        def closure() -> Any:
            gradient = next(coming, None)
            if isinstance(gradient, BaseException):
                raise gradient
            return "nothing" if gradient is None else self.backward(*gradient)

        self.output, result = self.steps.step(self.optimizer, closure, self.look, StepPlan())
        return result

    @property
    def weights(self) -> list[float]:
        return self.param.tolist()


def fused(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.5, fused=True)


# -- the closure -------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("where_flags_live")
@pytest.mark.parametrize("scaler", [SCALE, None])
@pytest.mark.parametrize("bad", [INF, NAN])
def test_a_skipped_step_returns_what_the_closure_did(scaler: float | None, bad: float) -> None:
    loop = Loop(Once, scaler)
    result = loop.step((1.0, bad))
    assert result.skip is Skip.YES
    assert (loop.output.item(), result.bad_loss.wait()) == (0.0, False)
    assert (loop.optimizer.seen, loop.weights, loop.looked) == ([], [0.0, 0.0], 1)


@pytest.mark.usefixtures("where_flags_live")
@pytest.mark.parametrize("make", [Once, TakesNone, fused])
def test_an_exception_in_the_closure_leaves_nothing_behind(make: Any) -> None:
    loop = Loop(make)
    with pytest.raises(MemoryError):
        loop.step(MemoryError())
    assert not {"found_inf", "grad_scale"} & set(vars(loop.optimizer))
    assert loop.log.so_far(lambda: None)[:2] == (0, 0)
    loop.step((1.0, 2.0))
    fresh = Loop(make)
    fresh.step((1.0, 2.0))
    assert loop.weights == fresh.weights


def test_user_code_cannot_catch_a_skip() -> None:
    loop = Loop(CatchesEverything)
    assert loop.step((INF, 1.0)).skip is Skip.YES
    loop.step(ValueError())
    assert loop.output == "caught"


def test_a_step_inside_of_a_closure_is_no_part_of_it() -> None:
    """The inner step is skipped and the outer one applied. Inside the closure, no step of the plugin runs."""
    loop, inner = Loop(Once), nn.Parameter(torch.zeros(2))
    other = torch.optim.SGD([inner], lr=1.0)
    steps = OptimizerSteps(None, True, RecordLog(), [loop.optimizer, other])

    def closure() -> None:
        inner.grad = torch.tensor([NAN, 1.0])
        assert steps.step(other, lambda: None, lambda: None, StepPlan())[1].skip is Skip.YES
        loop.param.grad = torch.ones(2)

    assert steps.step(loop.optimizer, closure, lambda: None, StepPlan())[1].skip is Skip.NO
    assert (inner.tolist(), loop.weights) == ([0.0, 0.0], [-0.5, -0.5])


# -- who decides, and where --------------------------------------------------------------------------------------------


def test_a_hook_on_steps_must_not_see_one_that_is_not_taken() -> None:
    seen: list[str] = []
    with flags_on_a_device():
        loop = Loop(fused)
        loop.optimizer.register_step_post_hook(lambda *_: seen.append("stepped"))
        assert loop.step((1.0, INF)).skip is Skip.YES
    assert seen == []


@pytest.mark.parametrize("bad", [False, True])
@pytest.mark.parametrize("make", [Once, fused])
def test_an_overflow_on_another_rank_skips_the_step_here(make: Any, bad: bool) -> None:
    def another_rank_too(flags: Tensor) -> None:
        flags[0].fill_(float(bad))

    loop = Loop(make, all_reduce_max=another_rank_too)
    assert loop.step((1.0, 2.0)).skip.wait() is bad
    assert (loop.weights == [0.0, 0.0]) is bad


# -- who looks ---------------------------------------------------------------------------------------------------------


def test_nothing_is_skipped_where_nobody_wants_it() -> None:
    loop = Loop(Once, None, skip_nonfinite=False)
    assert loop.step((1.0, NAN)).skip is Skip.NO
    assert (loop.looked, loop.optimizer.seen[0][0]) == (1, 1.0)
    assert loop.weights[1] != loop.weights[1]


@pytest.mark.usefixtures("where_flags_live")
def test_without_gradients_there_is_nothing_to_decide() -> None:
    loop = Loop(fused)
    result = loop.step()
    assert (result.skip, result.loss_probe, result.bad_loss) == (Skip.NO, None, Skip.NO)
