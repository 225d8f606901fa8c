"""The arithmetic of an optimizer step: which gradients are scaled by what, whether they are finite, skip or step.

Torch only. `precision/_amp.py` holds the order of events and calls in here.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_amp import _compat
from lightning_amp.scaling._gradients import Gradients, constant, parameters
from lightning_amp.scaling._records import RecordLog
from lightning_amp.scaling._scaler import DynamicLossScaler, merge_losses, nonfinite, nonfinite_flag


class Window:
    """What is known about the gradients of one optimizer since its last step.

    Attributes:
        scale: The factor that its gradients are multiplied with, shape []; `None` if they are true gradients.
        loss: Finite, shape [], as long as every loss since the last step was.
        found_inf: 1.0, shape [], if the gradients that are there now are not finite; `None` if that is not known.
        used_scale: The scale that was divided out last.

    """

    def __init__(self, optimizer: Optimizer, index: int) -> None:
        self.optimizer = optimizer
        self.index = index
        self.scale: Tensor | None = None
        self.folded: tuple[Tensor, Tensor] | None = None  # flag and scale of a folded step, see `to_true`
        self.loss: Tensor | None = None
        self.found_inf: Tensor | None = None
        self.used_scale: Tensor | None = None
        self.has_gradients = False
        self.closure_calls = 0  # of its last step
        self.stepped = False
        self.may_move_first = not _always_calls_closure(optimizer) or isinstance(optimizer, torch.optim.LBFGS)

    def to_true(self) -> Tensor | None:
        """What makes the leftovers of a folded step true gradients: the kernel unscales them only when it steps."""
        if self.folded is None:
            return None
        found_inf, scale = self.folded
        return torch.where(found_inf > 0, _inverse(scale), 1.0)


class Outcome:
    """What became of one attempted step. `skipped` is a bool where the host knows, else a flag [] on the device."""

    def __init__(self, window: Window, skipped: Tensor | bool) -> None:
        self.window = window
        self.skipped = skipped
        self.loss = window.loss
        self.counts_for_scale = window.has_gradients

    def flag(self, like: Tensor) -> Tensor:
        """1.0 for a skip, shape [], on the device of `like`."""
        if isinstance(self.skipped, Tensor):
            return self.skipped.to(like.device)
        return torch.full((), float(self.skipped), device=like.device)


class _Skip(BaseException):  # not an Exception: user code between us and the optimizer may catch those
    def __init__(self, window: Window) -> None:
        super().__init__()
        self.window = window


class OptimizerSteps:
    """Every optimizer step of a run.

    The one invariant: after a backward, all gradients of all optimizers carry the *current* scale. Gradients that were
    unscaled and are still there when another backward comes are carried back first. So it does not matter in which
    order backward, unscale, clip and step are called, for how many optimizers, or whether an exception came between.

    Args:
        scaler: `None` without loss scaling.
        skip_nonfinite: Whether a step with non-finite gradients is skipped where no scaler asks for it.
        log: Gets a record of every attempted step.

    """

    def __init__(self, scaler: torch.amp.GradScaler | None, skip_nonfinite: bool, log: RecordLog) -> None:
        self.scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self.guarded = self.scaler is not None or skip_nonfinite
        self.log = log
        self.windows: dict[int, Window] = {}
        self.host_must_know: Callable[[Optimizer], bool] = lambda optimizer: False
        self.first_scale = 1.0 if self.scaler is None else self.scaler.get_scale()
        self.before_step: Callable[[Optimizer], None] = lambda optimizer: None
        self.all_reduce_max: Callable[[Tensor], Any] | None = None  # in place over all ranks; `None` for one process
        self.observers: list[Callable[[Outcome], None]] = []
        self._attempts: list[Outcome] = []

    def attach(self, optimizers: Iterable[Optimizer]) -> None:
        """Take over these optimizers, in the order of `configure_optimizers`."""
        self.windows = {id(optimizer): Window(optimizer, i) for i, optimizer in enumerate(optimizers)}
        self._attempts.clear()

    def window(self, optimizer: Optimizer) -> Window:
        """The window of an optimizer; one that was made inside the training step gets the next index."""
        window = self.windows.get(id(optimizer))
        if window is None:
            window = self.windows[id(optimizer)] = Window(optimizer, len(self.windows))
        return window

    # -- backward ------------------------------------------------------------------------------------------------------

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Carry what gradients there are to the current scale; returns the loss, scaled."""
        for window in self.windows.values():
            window.loss = merge_losses(window.loss, loss)
            window.found_inf = None
        if self.scaler is None:
            return loss
        scaled = self.scaler.scale(loss)  # first: it makes the scale, and a float16 loss may lower it
        self._carry(_compat.scale_tensor(self.scaler))
        return scaled

    def _carry(self, scale: Tensor) -> None:
        done: set[int] = set()
        several = len(self.windows) > 1
        for window in sorted(self.windows.values(), key=lambda w: w.scale is not None):
            if window.scale is not scale:
                gradients = Gradients(window.optimizer, done)
                if gradients:
                    factor = scale
                    if window.scale is not None:
                        factor = factor * _inverse(window.scale)
                    to_true = window.to_true()
                    if to_true is not None:
                        factor = factor * to_true
                    gradients.multiply_(factor)
                if several and window.scale is None:
                    done.update(id(p) for p in parameters(window.optimizer))
            window.scale, window.folded = scale, None

    # -- unscale and check ---------------------------------------------------------------------------------------------

    def unscale_(self, optimizer: Optimizer) -> None:
        """Make the gradients of `optimizer` true ones. Does nothing if they are."""
        self._unscale(self.window(optimizer))

    def _unscale(self, window: Window) -> None:
        to_true = window.to_true()
        if to_true is not None:
            Gradients(window.optimizer).multiply_(to_true)
            window.folded = None
        scale = window.scale
        if scale is None:
            return
        gradients = Gradients(window.optimizer, self._true_elsewhere(window))
        window.has_gradients = bool(gradients)
        found_inf = torch.zeros((), device=scale.device)
        if gradients:
            _include_loss(gradients, window.loss, gradients.device or scale.device)
            found_inf = gradients.unscale_(_inverse(scale), found_inf)
            if self._scale_may_be_below_one():  # then a finite value can leave the range when it is divided
                found_inf = gradients.check(found_inf)
        window.used_scale, window.scale, window.found_inf = scale, None, found_inf

    def _check(self, window: Window) -> None:
        """True gradients: are they finite?"""
        gradients = Gradients(window.optimizer)
        window.has_gradients = bool(gradients)
        device = gradients.device or (window.loss.device if window.loss is not None else torch.device("cpu"))
        found_inf = torch.zeros((), device=device)
        if gradients:
            _include_loss(gradients, window.loss, device)
            found_inf = gradients.check(found_inf)
        window.found_inf = found_inf

    def _true_elsewhere(self, window: Window) -> set[int]:
        """Parameters that `window` shares with an optimizer whose gradients were unscaled since the last backward."""
        if len(self.windows) == 1:
            return set()
        return {
            id(p) for w in self.windows.values() if w is not window and w.scale is None for p in parameters(w.optimizer)
        }

    def _scale_may_be_below_one(self) -> bool:
        if not isinstance(self.scaler, DynamicLossScaler):
            return True
        # as far as the host knows: exact where it reads the flag of each step, else at most one read-back old
        scale = self.first_scale  # a record from before a resume may be of another precision
        if self.log.last is not None:
            scale = min(scale, self.log.last.next_scale)
        return scale * self.scaler.get_backoff_factor() ** self.log.num_known_skips < 1

    # -- step ----------------------------------------------------------------------------------------------------------

    def step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        look: Callable[[], None],
        *,
        fold: bool = False,
        max_norm: float | None = None,
        closure_runs_backward: bool = True,
        **kwargs: Any,
    ) -> Any:
        """Step or skip.

        Args:
            optimizer: The user's optimizer.
            closure: Computes loss and gradients, or nothing if they are there.
            look: Everything that may look at, or change, the true gradients before the step.
            fold: Nobody looks, and `look` would only clip: unscaling, clipping and the update of a fused optimizer may
                be one pass.
            max_norm: What `look` would clip the total 2-norm to; `None` if it does nothing at all.
            closure_runs_backward: Whether the optimizer is sure to call `closure` if gradients are still to come.
            kwargs: Go to `optimizer.step`.

        Returns:
            What `optimizer.step` returns; on a skip, what the closure returned.

        """
        window = self.window(optimizer)
        if not closure_runs_backward and not _always_calls_closure(optimizer):
            self._unscale(window)
        undo = self._snapshot(window)
        window.closure_calls = 0
        on_host = False
        result: Any = None
        found_inf: Tensor | None = None

        def amp_closure() -> Any:
            nonlocal result, found_inf, on_host
            result = closure()
            window.closure_calls += 1
            self.before_step(optimizer)
            if not self.guarded:
                if not fold or max_norm is not None:
                    look()
                return result
            on_host = not _compat.decides_on_device(optimizer) or self._host_must_know(optimizer)
            if fold and not on_host and window.found_inf is None and self._fold(window, max_norm):
                found_inf = window.found_inf
                return result
            if window.scale is not None:
                self._unscale(window)
            elif window.found_inf is None:
                self._check(window)
            found_inf = window.found_inf = self._agreed(window)
            if not fold or max_norm is not None:
                look()
            if not window.has_gradients and self.all_reduce_max is None:
                found_inf = None  # nothing to do; with other ranks the flag still counts: theirs may have gradients
            elif not on_host:
                _compat.set_amp_attributes(optimizer, found_inf, None)
            elif found_inf.item():
                raise _Skip(window)
            return result

        skipped: Tensor | bool = False
        try:
            output = optimizer.step(closure=amp_closure, **kwargs)
            if found_inf is not None and not on_host:
                skipped = found_inf
        except _Skip as skip:
            if skip.window is not window:
                raise
            output, skipped = result, True
            if undo is not None and window.closure_calls > 1:
                undo()
        finally:
            _compat.clear_amp_attributes(optimizer)
            window.stepped = True
        self._finish(window, skipped)
        return output

    def _fold(self, window: Window, max_norm: float | None) -> bool:
        """Leave unscaling and clipping to the fused optimizer; one read of the gradients decides. False: cannot."""
        leave_out = self._true_elsewhere(window) if window.scale is not None else ()
        gradients = Gradients(window.optimizer)
        device = gradients.device
        if leave_out or not gradients.plain or device is None or window.folded is not None:
            return False
        window.has_gradients = True
        scale = window.scale
        grad_scale = None if scale is None else scale.to(device)
        if max_norm is None:
            if scale is not None and self._scale_may_be_below_one():
                return False
            _include_loss(gradients, window.loss, device)
            found_inf = gradients.check(torch.zeros((), device=device))
        else:
            norm = gradients.norm()
            if grad_scale is not None:
                norm = norm / grad_scale
            found_inf = nonfinite_flag(norm if window.loss is None else norm + window.loss.to(norm) * 0)
            divisor = ((norm + 1e-6) / max_norm).clamp(min=1.0)  # 1 / clip_coef of `clip_grad_norm_`
            grad_scale = divisor if grad_scale is None else grad_scale * divisor
        window.found_inf = found_inf
        window.found_inf = found_inf = self._agreed(window)
        _compat.set_amp_attributes(window.optimizer, found_inf, grad_scale)
        if scale is not None:
            window.folded = found_inf, scale
            window.used_scale, window.scale = scale, None
        return True

    def _agreed(self, window: Window) -> Tensor:
        """The flag that all ranks act on: 1.0, shape [], if it is anywhere.

        Reduced gradients agree by themselves, but a shard's overflow or a non-finite loss may be on one rank only, and
        who steps, and what it does to the scale, must be the same everywhere.
        """
        found_inf = window.found_inf
        assert found_inf is not None
        if self.all_reduce_max is None:
            return found_inf
        loss = torch.zeros_like(found_inf) if window.loss is None else nonfinite_flag(window.loss).to(found_inf.device)
        both = torch.stack([found_inf, loss])
        self.all_reduce_max(both)
        window.loss = torch.where(both[1] > 0, torch.nan, 0.0)
        return both[0]

    def _host_must_know(self, optimizer: Optimizer) -> bool:
        return (
            _compat.has_step_hooks(optimizer)
            or _compat.momentum_is_uninitialised(optimizer)
            or self.host_must_know(optimizer)
        )

    def _finish(self, window: Window, skipped: Tensor | bool) -> None:
        outcome = Outcome(window, skipped)
        self._attempts.append(outcome)
        scale = None if self.scaler is None else window.used_scale
        self.log.append(window.index, scale, skipped, window.loss)
        for observer in self.observers:
            observer(outcome)
        window.loss = window.found_inf = window.used_scale = None

    def _snapshot(self, window: Window) -> Callable[[], None] | None:
        """For optimizers that call their closure after they moved: undoes everything since now."""
        if not window.may_move_first or not self.guarded or (window.stepped and window.closure_calls <= 1):
            return None
        return snapshot(window.optimizer)

    # -- end of batch --------------------------------------------------------------------------------------------------

    def finish_batch(self) -> None:
        """Move the scale, once, for all steps since the last call; close their records.

        Raises:
            FloatingPointError: If too many steps in a row were skipped.

        """
        attempts, self._attempts = self._attempts, []
        scale: Tensor | None = None
        if self.scaler is not None and attempts:
            self._move_scale(self.scaler, [a for a in attempts if a.counts_for_scale])
            scale = _compat.scale_tensor(self.scaler)
        self.log.close_batch(scale)

    def _move_scale(self, scaler: torch.amp.GradScaler, attempts: list[Outcome]) -> None:
        if not attempts:
            return
        scale = _compat.scale_tensor(scaler)
        ours = isinstance(scaler, DynamicLossScaler)
        found_inf: Tensor | None = None
        held: Tensor | None = None
        uncertain = [a for a in attempts if a.skipped is not False]
        if len(uncertain) == 1 and ours:  # the usual case, in as few launches as possible
            found_inf = uncertain[0].flag(scale)
            loss = uncertain[0].loss
            scaler.advance(found_inf, None if loss is None else nonfinite(loss).to(scale.device))
            return
        for attempt in uncertain:
            flag = attempt.flag(scale)
            if attempt.loss is not None and ours:
                loss_flag = nonfinite_flag(attempt.loss).to(scale.device)
                held = loss_flag if held is None else torch.maximum(held, loss_flag)
                flag = flag * (1 - loss_flag)  # an overflow of another optimizer still counts
            found_inf = flag if found_inf is None else torch.maximum(found_inf, flag)
        if found_inf is None:
            found_inf = constant(0.0, scale.device)
        if ours:
            scaler.advance(found_inf, None if held is None else held * (1 - found_inf))
        else:
            _compat.set_scale_tensor(scaler, scale.clone())  # its update works in place; records keep the old tensor
            _compat.give_found_inf(scaler, found_inf)
            scaler.update()


def _include_loss(gradients: Gradients, loss: Tensor | None, device: torch.device) -> None:
    """A step whose loss was not finite is not taken, whatever its gradients are."""
    if loss is not None:
        same = loss.dtype == torch.float32 and loss.device == device
        gradients.include(loss.clone() if same else (loss * 0).to(device, torch.float32))


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


def _inverse(scale: Tensor) -> Tensor:
    """1 / scale, computed in float64 as `GradScaler.unscale_` does (MPS has none)."""
    return scale.reciprocal() if scale.device.type == "mps" else scale.double().reciprocal().float()


def _always_calls_closure(optimizer: Optimizer) -> bool:
    return type(optimizer).__module__.startswith("torch.optim")
