"""The arithmetic of an optimizer step: which gradients are scaled by what, whether they are finite, skip or step.

Torch only. `precision/_amp.py` holds the order of events and calls in here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_amp._compat import _torch
from lightning_amp.numerics import nonfinite_flag
from lightning_amp.scaling._gradient_state import Guards, Outcome, Window, always_calls_closure, inverse, snapshot
from lightning_amp.scaling._gradients import Gradients, constant, has_gradients, host_value, in_host_memory, parameters
from lightning_amp.scaling._records import RecordLog
from lightning_amp.scaling._scale_update import Round, lower_scale, move_scale
from lightning_amp.scaling._scaler import DynamicLossScaler, merge_losses


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
        self.guards: Guards | None = None
        self.first_scale = 1.0 if self.scaler is None else self.scaler.get_scale()
        self.all_reduce_max: Callable[[Tensor], Any] | None = None  # in place over all ranks; `None` for one process
        self.device: torch.device | None = None  # that `all_reduce_max` works on; `None`: where the gradients are
        self.stepping = False  # inside of the plugin's own step, outside of its closure
        self.backward_scale: Tensor | None = None  # during a scaled backward
        self.scale_of_unknown: Callable[[Optimizer], Tensor | None] | None = None  # of gradients met for the first time
        self._attempts: list[Outcome] = []
        self._round = Round()

    def attach(self, optimizers: Iterable[Optimizer]) -> None:
        """Take over these optimizers, in the order of `configure_optimizers`."""
        self.windows = {id(optimizer): Window(optimizer, i) for i, optimizer in enumerate(optimizers)}
        self._attempts.clear()
        self._round.clear()

    def window(self, optimizer: Optimizer) -> Window:
        """The window of an optimizer; one that was made inside the training step gets the next index."""
        window = self.windows.get(id(optimizer))
        if window is None:
            window = Window(optimizer, len(self.windows))
            if self.scale_of_unknown is not None:
                window.scale = self.scale_of_unknown(optimizer)
            self.windows[id(optimizer)] = window
        return window

    # -- backward ------------------------------------------------------------------------------------------------------

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Carry what gradients there are to the current scale; returns the loss, scaled."""
        for window in self.windows.values():
            if window.loss is not None and self._gradients_were_dropped(window):
                window.loss = None  # earlier losses say nothing about the step to come
            window.loss = merge_losses(window.loss, loss)
            window.found_inf = window.overflowed = window.clamped = None
        if self.scaler is None:
            return loss
        if self._round.is_over(len(self.windows)):
            self._lower_scale(self.scaler)
        scaled = self.scaler.scale(loss)  # first: it makes the scale, and a float16 loss may lower it
        self._carry(_torch.scale_tensor(self.scaler))
        return scaled

    def _lower_scale(self, scaler: torch.amp.GradScaler) -> None:
        """Lower the scale for the steps that follow in a batch that takes many of them.

        Several epochs over a rollout in one `training_step`, or many steps of a critic, would else lose every step of
        it, and end as stuck.
        """
        overflowed = [o for o in self._round.take() if o.overflowed is not False]
        if not overflowed or lower_scale(scaler, [o for o in overflowed if o.counts_for_scale]):
            self._attempts = [a for a in self._attempts if a not in overflowed]
        self.log.complete(_torch.scale_tensor(scaler))

    def begin_backward(self) -> None:
        """The backward of a scaled loss begins; `backward_scale` is `None` again when it is over."""
        self.backward_scale = None if self.scaler is None else _torch.scale_tensor(self.scaler)

    def _gradients_were_dropped(self, window: Window) -> bool:
        """Whether there are none although there should be: a rank without a shard of the parameters never has any."""
        return (window.had_gradients or self.all_reduce_max is None) and not has_gradients(window.optimizer)

    def _carry(self, scale: Tensor) -> None:
        done: set[int] = set()
        several = len(self.windows) > 1
        for window in sorted(self.windows.values(), key=lambda w: w.scale is not None):
            if window.scale is not scale:
                gradients = Gradients(window.optimizer, done)
                if gradients:
                    factor = scale
                    if window.scale is not None:
                        factor = factor * inverse(window.scale)
                    to_true = window.to_true()
                    if to_true is not None:
                        factor = factor * to_true
                    gradients.multiply_(factor)
                if several:  # what two optimizers share is carried once
                    done.update(id(p) for p in parameters(window.optimizer))
            window.scale, window.folded = scale, None

    # -- unscale and check ---------------------------------------------------------------------------------------------

    def unscale_(self, optimizer: Optimizer) -> None:
        """Make the gradients of `optimizer` true ones. Does nothing if they are."""
        self._unscale(self.window(optimizer))

    def _unfold(self, window: Window) -> None:
        """Make what a folded step left true gradients."""
        to_true = window.to_true()
        if to_true is not None:
            Gradients(window.optimizer).multiply_(to_true)
            window.folded = None

    def _unscale(self, window: Window) -> None:
        self._unfold(window)
        scale = window.scale
        if scale is None:
            return
        window.require_scaled()
        shared = self._true_elsewhere(window)
        gradients = Gradients(window.optimizer, shared)
        everything = Gradients(window.optimizer) if shared else gradients
        everything.require_full_precision(window.optimizer)
        window.has_gradients = bool(everything)
        window.had_gradients |= window.has_gradients
        found_inf = _new_flag(window, scale.device)
        if gradients:
            found_inf = gradients.unscale_(inverse(scale), found_inf)
            if self._scale_may_be_below_one():  # then a finite value can leave the range when it is divided
                found_inf = gradients.check(found_inf)
        if shared and everything:
            found_inf = everything.check(found_inf)
        window.used_scale, window.scale, window.found_inf = scale, None, found_inf

    def _check(self, window: Window) -> None:
        """True gradients: are they finite?"""
        gradients = Gradients(window.optimizer)
        window.has_gradients = bool(gradients)
        window.had_gradients |= window.has_gradients
        device = gradients.device or (window.loss.device if window.loss is not None else torch.device("cpu"))
        found_inf = _new_flag(window, device)
        window.found_inf = gradients.check(found_inf) if gradients else found_inf

    def check_again(self, optimizer: Optimizer) -> None:
        """Look at true gradients that the user may have changed since they were checked: as they are now, they count.

        What they were before still tells whether the scale was too large.
        """
        window = self.window(optimizer)
        before = window.found_inf
        if before is None or not self.guarded:
            return
        if in_host_memory(before):
            if host_value(before):
                window.overflowed = True
            else:
                window.overflowed = window.overflowed or False
                window.clear_flag = before
        else:
            known = window.overflowed
            window.overflowed = torch.maximum(known, before) if isinstance(known, Tensor) else before
        self._check(window)
        if window.clamped is not None:
            assert window.found_inf is not None
            window.found_inf = torch.maximum(window.found_inf, window.clamped)

    def before_clamping(self, optimizer: Optimizer) -> None:
        """The gradients are about to be clipped by value. That makes inf finite, and mends nothing."""
        self.check_again(optimizer)
        window = self.window(optimizer)
        window.clamped = window.found_inf

    def _true_elsewhere(self, window: Window) -> set[int]:
        """Parameters that `window` shares with an optimizer whose gradients were unscaled since the last backward.

        Those that a folded step left are made true.
        """
        shared: set[int] = set()
        for other in self.windows.values():
            if other is window or other.scale is not None:
                continue
            common = {id(p) for p in parameters(window.optimizer)}.intersection(map(id, parameters(other.optimizer)))
            if common:
                self._unfold(other)
                shared |= common
        return shared

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
            look: Everything that may look at, or change, the true gradients before the step; what changes them calls
                :meth:`check_again`.
            fold: Nobody looks, and `look` would only clip: unscaling, clipping and the update of a fused optimizer may
                be one pass.
            max_norm: What `look` would clip the total 2-norm to; `None` if it does nothing at all.
            closure_runs_backward: Whether the optimizer is sure to call `closure` if gradients are still to come.
            kwargs: Go to `optimizer.step`.

        Returns:
            What `optimizer.step` returns; on a skip, what the closure returned.

        """
        window = self.window(optimizer)
        if not closure_runs_backward and not always_calls_closure(optimizer):
            self._unscale(window)
        undo = self._snapshot(window) if window.may_move_first else None
        window.closure_calls = 0
        result: Any = None
        skipped: Tensor | bool = False

        def amp_closure() -> Any:
            self.stepping = False
            output = checked_closure()
            self.stepping = True
            return output

        def checked_closure() -> Any:
            nonlocal result, skipped
            result = closure()
            window.closure_calls += 1
            if self.guards is not None:
                self.guards.before_step(optimizer)
            if not self.guarded:
                if not fold or max_norm is not None:
                    look()
                return result
            on_device = window.decides_on_device and _torch.is_fused(optimizer)
            on_device = on_device and not _torch.has_step_hooks(optimizer)
            if not (fold and on_device and window.found_inf is None and self._fold(window, max_norm)):
                if window.scale is not None:
                    self._unscale(window)
                elif window.found_inf is None:
                    self._check(window)
                else:
                    self.check_again(optimizer)  # the user had them unscaled
                if not fold or max_norm is not None:
                    look()
                self._agree(window)
            if not window.has_gradients:
                return result  # nothing to do, on any rank
            found_inf = window.found_inf
            assert found_inf is not None
            free = in_host_memory(found_inf)
            if on_device and not free and not self._host_must_know(optimizer):
                skipped = found_inf
                _torch.set_found_inf(optimizer, found_inf)
            elif host_value(found_inf) if on_device and free else self._read(window, found_inf):
                raise _Skip(window)
            elif free:
                window.clear_flag = found_inf
            return result

        outer, self.stepping = self.stepping, True
        try:
            output = optimizer.step(closure=amp_closure, **kwargs)
        except _Skip as skip:
            if skip.window is not window:
                raise
            output, skipped = result, True
            if undo is not None and window.closure_calls > 1:
                undo()
        finally:
            self.stepping = outer
            if window.decides_on_device:
                _torch.clear_amp_attributes(optimizer)
            window.stepped = True
        self._finish(window, skipped)
        return output

    def _fold(self, window: Window, max_norm: float | None) -> bool:
        """Leave unscaling and clipping to the fused optimizer; one read of the gradients decides. False: cannot."""
        scale = window.scale
        if window.folded is not None or (scale is not None and self._true_elsewhere(window)):
            return False
        gradients = Gradients(window.optimizer)
        device = gradients.device
        if device is None or not gradients.plain:
            return False
        if scale is not None:
            window.require_scaled()
            gradients.require_full_precision(window.optimizer)
        grad_scale = None if scale is None else scale.to(device)
        if max_norm is None:
            if scale is not None and self._scale_may_be_below_one():
                return False
            found_inf = gradients.check(_new_flag(window, device))
        else:
            norm = gradients.norm()
            if in_host_memory(norm) and not math.isfinite(host_value(norm)):
                return False  # each element may still be finite; the plain order tells
            if grad_scale is not None:
                norm = norm / grad_scale
            found_inf = nonfinite_flag(norm)
            divisor = ((norm + 1e-6) / max_norm).clamp(min=1.0)  # 1 / clip_coef of `clip_grad_norm_`
            grad_scale = divisor if grad_scale is None else grad_scale * divisor
        window.has_gradients = window.had_gradients = True
        window.found_inf = found_inf
        if self.all_reduce_max is not None:
            found_inf = self._agree(window)
        if scale is not None:
            window.folded = found_inf, scale
            window.used_scale, window.scale = scale, None
        _torch.set_grad_scale(window.optimizer, grad_scale)
        return True

    def _agree(self, window: Window) -> Tensor:
        """Make flag and loss those that all ranks act on: not finite if they are not finite anywhere; the flag.

        Reduced gradients agree by themselves, but a shard's overflow or a non-finite loss may be on one rank only, and
        who steps, and what it does to the scale, must be the same everywhere. One collective per closure call, on every
        rank, whatever it has found: so nobody waits for ever as long as all ranks step the same optimizers.
        What was not finite before it was mended goes with it: the scale must be the same, too.
        """
        found_inf = window.found_inf
        assert found_inf is not None
        if self.all_reduce_max is None:
            return found_inf
        device = found_inf.device if self.device is None else self.device
        loss = constant(0.0, device) if window.loss is None else nonfinite_flag(window.loss).to(device)
        before = window.overflowed
        overflowed = before.to(device) if isinstance(before, Tensor) else constant(float(bool(before)), device)
        has_gradients = constant(float(window.has_gradients), device)
        everywhere = torch.stack([found_inf.to(device), loss, has_gradients, overflowed])
        self.all_reduce_max(everywhere)
        found_inf, loss, anybody_has, overflowed = everywhere.unbind()
        window.overflowed = None if before is None else overflowed
        window.loss = torch.where(loss > 0, torch.nan, 0.0)
        if not window.has_gradients:  # others may: then this was a step, and the scale moves here too
            window.has_gradients = bool(anybody_has)
        window.found_inf = found_inf
        return found_inf

    def _read(self, window: Window, found_inf: Tensor) -> bool:
        """The flag, for which the host waits; with it, where guards ask for it, whether the loss was finite."""
        loss = window.loss
        if self.guards is None or loss is None or in_host_memory(loss):
            return bool(found_inf.item())
        both = (found_inf * 2 + nonfinite_flag(loss).to(found_inf)).item()
        window.loss = constant(torch.nan if both % 2 else 0.0, torch.device("cpu"))
        return both >= 2

    def _host_must_know(self, optimizer: Optimizer) -> bool:
        if isinstance(optimizer, torch.optim.SGD) and _torch.momentum_is_uninitialised(optimizer):
            return True
        return self.guards is not None and self.guards.host_must_know(optimizer)

    def _finish(self, window: Window, skipped: Tensor | bool) -> None:
        scale = None if self.scaler is None else window.used_scale
        self.log.append(window.index, scale, skipped, None if skipped is False else window.loss)
        if self.scaler is not None or self.guards is not None:
            outcome = Outcome(window, skipped)
            if self.scaler is not None:
                self._attempts.append(outcome)  # for the scale alone
                self._round.add(outcome)
            if self.guards is not None:
                self.guards.observe(outcome)
        window.loss = window.found_inf = window.used_scale = window.overflowed = window.clamped = None

    def _snapshot(self, window: Window) -> Callable[[], None] | None:
        """For optimizers that call their closure after they moved: undoes everything since now."""
        if not self.guarded or (window.stepped and window.closure_calls <= 1):
            return None
        return snapshot(window.optimizer)

    # -- end of batch --------------------------------------------------------------------------------------------------

    def finish_batch(self) -> None:
        """Move the scale, once, for all steps since the last call; close their records.

        Raises:
            FloatingPointError: If too many steps in a row were skipped.

        """
        scale: Tensor | None = None
        self._round.clear()
        if self.scaler is not None and self._attempts:
            attempts, self._attempts = self._attempts, []
            move_scale(self.scaler, [a for a in attempts if a.counts_for_scale])
            scale = _torch.scale_tensor(self.scaler)
        self.log.close_batch(scale)


def _new_flag(window: Window, device: torch.device) -> Tensor:
    """0.0, shape [], to be set by a check."""
    flag, window.clear_flag = window.clear_flag, None
    if flag is None or flag.device != device:
        return torch.zeros((), device=device, dtype=torch.float32)
    return flag
