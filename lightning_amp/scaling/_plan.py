"""Requirements of the caller for a step, and the calls that errors name."""

from __future__ import annotations

from typing import NamedTuple


class StepPlan(NamedTuple):
    """The requirements of hooks, of clipping and of the protection from skipped steps for one step.

    Attributes:
        fold: Whether unscaling, clipping and the update of a fused optimizer may be one pass, since no hook reads the
            true gradients.
        max_norm: With `fold`, the total 2-norm to clip to; `None` for no clipping.
        host_must_know: Whether the caller acts on a skip right after the step.
        in_closure: Whether the closure runs the backward.

    """

    fold: bool = False
    max_norm: float | None = None
    host_must_know: bool = False
    in_closure: bool = True


class Calls(NamedTuple):
    """The calls that errors name, for the loop in use.

    Attributes:
        owner: The object that a step went past.
        backward: The call of a scaled backward.
        step: The call of a step.
        unknown: Advice for an optimizer that has not stepped before.
        takes_plain: Whether to step on gradients of a plain `loss.backward()` as they are; otherwise it is an error.

    """

    owner: str
    backward: str
    step: str
    unknown: str
    takes_plain: bool = False


OWN_LOOP = Calls("`ScaledSteps`", "steps.backward(loss)", "`steps.step(optimizer)`", "Call `steps.step(optimizer)`")


class SkipStep(BaseException):  # user code around the closure may catch every Exception
    """Leaves `optimizer.step` from inside its closure."""
