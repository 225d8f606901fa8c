"""What is known between the backward and the step of one optimizer, and what became of the step."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_amp._compat import _torch
from lightning_amp.numerics import nonfinite
from lightning_amp.scaling._gradients import host_value, in_host_memory, parameters


class Window:
    """What is known about the gradients of one optimizer since its last step.

    Attributes:
        scale: The factor that its gradients are multiplied with, shape []; `None` if they are true gradients.
        loss: Finite, shape [], as long as every loss since the last step was.
        found_inf: 1.0, shape [], if the gradients that are there now are not finite; `None` if that is not known.
        overflowed: Whether they were not finite before the user changed them; `None` if nobody could.
        clamped: The flag from before they were clamped, which makes an infinite gradient finite but not right.
        used_scale: The scale that was divided out last.
        plain_backward: Tells whether its latest gradients came with a backward that was not scaled; `None`: unknown.

    """

    def __init__(self, optimizer: Optimizer, index: int) -> None:
        self.optimizer = optimizer
        self.index = index
        self.scale: Tensor | None = None
        self.folded: tuple[Tensor, Tensor] | None = None  # flag and scale of a folded step, see `to_true`
        self.loss: Tensor | None = None
        self.found_inf: Tensor | None = None
        self.overflowed: Tensor | bool | None = None
        self.clamped: Tensor | None = None
        self.used_scale: Tensor | None = None
        self.plain_backward: Callable[[], bool] | None = None
        self.clear_flag: Tensor | None = None  # 0.0 for sure, to be used again
        self.has_gradients = False  # on any rank
        self.had_gradients = False  # on this one, in any step
        self.closure_calls = 0  # of its last step
        self.stepped = False
        self.decides_on_device = _torch.decides_on_device(optimizer)
        self.may_move_first = not always_calls_closure(optimizer) or isinstance(optimizer, torch.optim.LBFGS)

    def require_scaled(self) -> None:
        """Refuse to divide by the scale what a backward of the user's own, past the plugin, has not multiplied."""
        if self.plain_backward is not None and self.plain_backward():
            name = type(self.optimizer).__name__
            raise RuntimeError(
                f"Gradients of `{name}` come from `loss.backward()`, which does not multiply them by the loss scale as"
                " those of the other losses are. Call `self.manual_backward(loss)` for each loss."
            )

    def to_true(self) -> Tensor | None:
        """What makes the leftovers of a folded step true gradients: the kernel unscales them only when it steps."""
        if self.folded is None:
            return None
        found_inf, scale = self.folded
        return torch.where(found_inf > 0, inverse(scale), 1.0)


class Outcome:
    """What became of one attempted step.

    Attributes:
        skipped: A bool where the host knows, else a flag [] on the device.
        overflowed: The same for what the scale has to know: a step whose overflow the user mended was taken, but with
            gradients that the scale was too large for.

    """

    def __init__(self, window: Window, skipped: Tensor | bool) -> None:
        self.window = window
        self.skipped = skipped
        self.loss = window.loss
        self.counts_for_scale = window.has_gradients
        before = window.overflowed
        self.overflowed = skipped if before is None or skipped is True or before is False else before
        if isinstance(skipped, Tensor) and isinstance(before, Tensor):
            self.overflowed = torch.maximum(skipped, before.to(skipped.device))

    @property
    def bad_loss(self) -> Tensor | bool:
        """Whether the loss was not finite: a bool where the host knows, else a flag [], bool, on the device."""
        if self.loss is None:
            return False
        return not math.isfinite(host_value(self.loss)) if in_host_memory(self.loss) else nonfinite(self.loss)

    def flag(self, like: Tensor) -> Tensor:
        """1.0 for an overflow, shape [], on the device of `like`."""
        if isinstance(self.overflowed, Tensor):
            return self.overflowed.to(like.device)
        return torch.full((), float(self.overflowed), device=like.device, dtype=torch.float32)


class Guards(Protocol):
    """What must not notice a skipped step."""

    def before_step(self, optimizer: Optimizer) -> None:
        """The optimizer is about to step; its gradients are there."""

    def host_must_know(self, optimizer: Optimizer) -> bool:
        """Whether the outcome of this optimizer's step is needed on the host at once."""
        ...

    def observe(self, outcome: Outcome) -> None:
        """A step was attempted."""


def snapshot(optimizer: Optimizer) -> Callable[[], None]:
    """Remember parameters and optimizer state (of an optimizer inside the optimizer too); the result puts them back."""
    optimizers = [optimizer, *(v for v in vars(optimizer).values() if isinstance(v, Optimizer))]
    params = list({id(p): p for o in optimizers for p in parameters(o)}.values())
    values = [p.detach().clone() for p in params]
    memo = {id(p): p for p in params}
    states = [copy.deepcopy(o.state, memo) for o in optimizers]

    def restore() -> None:
        with torch.no_grad():
            for param, value in zip(params, values, strict=True):
                param.copy_(value)
        for o, state in zip(optimizers, states, strict=True):
            o.state = state

    return restore


def inverse(scale: Tensor) -> Tensor:
    """1 / scale, computed in float64 as `GradScaler.unscale_` does (MPS has none)."""
    return scale.reciprocal() if scale.device.type == "mps" else scale.double().reciprocal().float()


def always_calls_closure(optimizer: Optimizer) -> bool:
    return type(optimizer).__module__.startswith("torch.optim")
