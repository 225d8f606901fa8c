"""The gradients of one optimizer between a backward and its step, and what they are multiplied by."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import final

from lightning_amp._compat import _torch
from lightning_amp.numerics import nonfinite_flag
from lightning_amp.scaling import _skip
from lightning_amp.scaling._gradients import Gradients, has_gradients, inverse, parameters
from lightning_amp.scaling._loss_probe import merge_losses
from lightning_amp.scaling._skip import Skip, constant
from lightning_amp.scaling._stays_found import StaysFound


class Scaled(NamedTuple):
    """They are the true ones times `scale` []."""

    scale: Tensor


class Unscaled(NamedTuple):
    """They are the true ones.

    Attributes:
        found_inf: 1.0, [], if they are not finite now; `None` if nobody has looked since the backward.
        used_scale: What they were divided by, [].
        overflow: Whether they were not finite before the user changed them; `None` if nobody could.

    """

    found_inf: Tensor | None = None
    used_scale: Tensor | None = None
    overflow: Skip | None = None


class Folded(NamedTuple):
    """A fused optimizer makes them true ones inside of its kernel, if it steps at all.

    Attributes:
        found_inf: 1.0, [], if it does not.
        scale: What they are multiplied by until then, []; `None` without scaling.

    """

    found_inf: Tensor
    scale: Tensor | None

    def to_true(self) -> Tensor | float:
        """Return the factor [] that makes what the step left true gradients."""
        return 1.0 if self.scale is None else torch.where(self.found_inf > 0, inverse(self.scale), 1.0)


Form: TypeAlias = "Scaled | Unscaled | Folded"

UNSEEN = Unscaled()
"""True gradients that nobody has looked at, as a backward without scaling leaves them."""


@final
class GradientState:
    """The gradients of one optimizer since its last step.

    Args:
        optimizer: Whose; any of the user's.
        index: Its place in `configure_optimizers`.
        form: What its gradients are multiplied by now.

    Attributes:
        form: The same, kept up to date.
        loss_probe: Finite, [], as long as every loss since the last step was; `None` before the first.
        has_gradients: On any rank; known once they were looked at.
        bad_loss: What `loss_probe` tells, where the host has read it with the flag of the gradients; else `None`. The
            probe itself stays on its device: to bring it back there later would be another wait.

    """

    def __init__(self, optimizer: Optimizer, index: int, form: Form = UNSEEN) -> None:
        self.optimizer = optimizer
        self.index = index
        self.form: Form = form
        self.loss_probe: Tensor | None = None
        self.has_gradients = False
        self.bad_loss: Skip | None = None
        self.decides_on_device = _torch.decides_on_device(optimizer)
        self.always_calls_closure = type(optimizer).__module__.startswith("torch.optim")
        self.takes_closure = self.always_calls_closure or _takes_closure(optimizer)
        self.may_move_first = not self.always_calls_closure or isinstance(optimizer, torch.optim.LBFGS)
        self._kept = StaysFound()
        self._closure_calls: int | None = None  # of its last step
        self._had_gradients = False  # on this rank, in any step
        self._spare_flag: Tensor | None = None  # 0.0 for sure, to be used again

    @property
    def found_inf(self) -> Tensor | None:
        """Return 1.0, [], if the gradients are not finite; `None` if that is not known."""
        return None if isinstance(self.form, Scaled) else self.form.found_inf

    @property
    def used_scale(self) -> Tensor | None:
        """Return what the gradients were, or in a fused optimizer are, divided by, []."""
        if isinstance(self.form, Folded):
            return self.form.scale
        return self.form.used_scale if isinstance(self.form, Unscaled) else None

    @property
    def overflow(self) -> Skip | None:
        """Return whether the gradients overflowed before the user changed them."""
        return self.form.overflow if isinstance(self.form, Unscaled) else None

    # -- around the backward -------------------------------------------------------------------------------------------

    def add_loss(self, loss: Tensor, *, may_have_none: bool) -> None:
        """Note the loss of the backward to come; what was known about gradients without it is over.

        Args:
            loss: Any shape.
            may_have_none: Whether this rank may hold no shard of the parameters, and so never has gradients.

        """
        probe = self.loss_probe
        if probe is not None and (self._had_gradients or not may_have_none) and not has_gradients(self.optimizer):
            probe = None  # they were dropped: earlier losses say nothing about the step to come
        self.loss_probe, self.bad_loss = merge_losses(probe, loss), None
        if not self._kept.is_empty:  # dropped or zeroed gradients are not in the step to come
            self._kept.begin_backward(Gradients(self.optimizer).largest())
        if isinstance(self.form, Unscaled):
            self.form = UNSEEN

    def carry(self, to: Scaled, leave_out: Collection[int]) -> None:
        """Multiply the gradients that are still there so that they fit to those of the backward to come.

        Args:
            to: Their new form.
            leave_out: Ids of parameters that another optimizer shares and that were carried with it.

        """
        form = self.form
        if isinstance(form, Scaled) and form.scale is to.scale:
            return
        gradients = Gradients(self.optimizer, leave_out)
        if gradients:
            factor = to.scale
            if isinstance(form, Scaled):
                factor = factor * inverse(form.scale)
            elif isinstance(form, Folded):
                factor = factor * form.to_true()
            gradients.multiply_(factor)
        self.form = to

    # -- unscale and check ---------------------------------------------------------------------------------------------

    def unfold(self) -> None:
        """Make what a folded step left true gradients."""
        if isinstance(self.form, Folded):
            factor = self.form.to_true()
            if isinstance(factor, Tensor):
                Gradients(self.optimizer).multiply_(factor)
            self.form = UNSEEN

    def unscale_(self, scale: Tensor, shared: Collection[int], *, may_overflow: bool) -> None:
        """Divide the gradients by `scale` [] and check them.

        Args:
            scale: What they are multiplied by.
            shared: Ids of parameters whose gradients another optimizer has unscaled already.
            may_overflow: Whether the scale may be below 1, so that a finite value can leave the range.

        """
        gradients = Gradients(self.optimizer, shared)
        everything = Gradients(self.optimizer) if shared else gradients
        everything.require_full_precision(self.optimizer)
        self._note_gradients(everything)
        found_inf = gradients.unscale_(inverse(scale), self._new_flag(scale.device))
        if may_overflow:
            found_inf = gradients.check(found_inf)
        if shared:
            found_inf = everything.check(found_inf)
        self.form = Unscaled(self._kept.beside(found_inf), scale)

    def check(self) -> None:
        """Check gradients that are true ones already."""
        assert isinstance(self.form, Unscaled)
        gradients = Gradients(self.optimizer)
        self._note_gradients(gradients)
        device = gradients.device or (torch.device("cpu") if self.loss_probe is None else self.loss_probe.device)
        found_inf = gradients.check(self._new_flag(device))
        self.form = Unscaled(self._kept.beside(found_inf), self.form.used_scale, self.form.overflow)

    def check_again(self) -> None:
        """Check true gradients that the user may have changed since they were checked: as they are now, they count.

        What they were before still tells whether the scale was too large.
        """
        form = self.form
        if not isinstance(form, Unscaled) or form.found_inf is None:
            return
        overflow = Skip.on_device(form.found_inf)
        if overflow.known is False:
            self._spare_flag = form.found_inf
        self.form = Unscaled(form.found_inf, form.used_scale, overflow | (form.overflow or Skip.NO))
        self.check()

    def keep_found(self, *, infinities_only: bool = False) -> None:
        """Have the next step skipped if the latest check found anything, whatever the user makes of the gradients.

        Args:
            infinities_only: Not if it found NaN: clipping by value leaves it, so that a user who removes it mends.

        """
        found_inf = self.found_inf
        if found_inf is None or Skip.on_device(found_inf).known is False:
            return
        largest = Gradients(self.optimizer).largest() if infinities_only else None
        flag = found_inf if largest is None else torch.isinf(largest).to(found_inf)
        self._kept.keep(flag, list(parameters(self.optimizer)))

    def fold(self, max_norm: float | None, *, may_overflow: bool) -> bool:
        """Leave unscaling and clipping to the fused optimizer; one read of the gradients decides.

        Args:
            max_norm: What to clip their total 2-norm to.
            may_overflow: See :meth:`unscale_`.

        Returns:
            Whether it can be done. If not, nothing was changed.

        """
        scale = self.form.scale if isinstance(self.form, Scaled) else None
        gradients = Gradients(self.optimizer)
        device = gradients.device
        if device is None or not gradients.plain or (max_norm is None and scale is not None and may_overflow):
            return False
        if scale is not None:
            gradients.require_full_precision(self.optimizer)
        grad_scale = None if scale is None else scale.to(device)
        if max_norm is None:
            found_inf = gradients.check(self._new_flag(device))
        else:
            norm, found_inf = gradients.true_norm(grad_scale)
            if found_inf is None:
                return False
            divisor = ((norm + 1e-6) / max_norm).clamp(min=1.0)  # 1 / clip_coef of `clip_grad_norm_`
            grad_scale = divisor if grad_scale is None else grad_scale * divisor
        self._note_gradients(gradients)
        self.form = Folded(self._kept.beside(found_inf), scale)
        _torch.set_grad_scale(self.optimizer, grad_scale)
        return True

    def agree(self, all_reduce_max: Callable[[Tensor], Any], device: torch.device | None) -> None:
        """Agree with all ranks: the gradients are not finite if they are not finite anywhere.

        A shard's overflow or a non-finite loss may be on one rank only, and all ranks must step, and move the scale,
        alike. One collective per closure call on every rank, whatever it found: no rank waits forever as long as all
        step the same optimizers.

        Args:
            all_reduce_max: Reduces a tensor [4] in place, over all ranks.
            device: That it works on; `None`: where the gradients are.

        """
        form = self.form
        assert not isinstance(form, Scaled)
        assert form.found_inf is not None
        device = form.found_inf.device if device is None else device
        loss = constant(0.0, device) if self.loss_probe is None else nonfinite_flag(self.loss_probe).to(device)
        before = (self.overflow or Skip.NO).flag(device)
        has_gradients = constant(float(self.has_gradients), device)
        everywhere = torch.stack([form.found_inf.to(device), loss, has_gradients, before])
        all_reduce_max(everywhere)
        found_inf, loss, anybody_has, before = everywhere.unbind()
        self.loss_probe = torch.where(loss > 0, torch.nan, 0.0)
        if not self.has_gradients:  # others may: then this was a step, and the scale moves here too
            self.has_gradients = bool(anybody_has)
        if isinstance(form, Folded):
            self.form = Folded(found_inf, form.scale)
        else:
            overflow = None if form.overflow is None else Skip.on_device(before)
            self.form = Unscaled(found_inf, form.used_scale, overflow)

    # -- the step ------------------------------------------------------------------------------------------------------

    def wait(self, *, asks_for_loss: bool) -> bool:
        """Return whether the step is to be skipped. Waits for the device; with it, if asked, for the loss."""
        found_inf, probe = self.found_inf, self.loss_probe
        assert found_inf is not None
        if not asks_for_loss or probe is None or _skip.in_host_memory(probe):
            return Skip(found_inf).wait()
        skip, bad_loss = Skip.wait_together(found_inf, nonfinite_flag(probe).to(found_inf))
        self.bad_loss = bad_loss
        return skip.wait()

    def keep_spare(self, flag: Tensor) -> None:
        """Keep a flag [] that is 0.0, to be used again."""
        self._spare_flag = flag

    @property
    def needs_snapshot(self) -> bool:
        """Return whether the optimizer may move parameters before it has called its closure for the last time."""
        return self.may_move_first and (self._closure_calls is None or self._closure_calls > 1)

    def note_closure_calls(self, count: int) -> None:
        """Note how often a step has called its closure, whether it ended well or not."""
        self._closure_calls = count

    def release(self) -> None:
        """Take the gradients as true ones that nobody has looked at."""
        self.form = UNSEEN

    def finish(self) -> None:
        """Begin anew: the gradients are those of no loss until the next backward."""
        self.loss_probe = self.bad_loss = None
        self.forget_found()
        if isinstance(self.form, Unscaled) or (isinstance(self.form, Folded) and self.form.scale is None):
            self.form = UNSEEN

    def forget_found(self) -> None:
        """Let the gradients alone decide about the next step."""
        self._kept.forget()

    def _note_gradients(self, gradients: Gradients) -> None:
        self.has_gradients = bool(gradients)
        self._had_gradients |= self.has_gradients

    def _new_flag(self, device: torch.device) -> Tensor:
        """Return 0.0, [], to be set by a check."""
        flag, self._spare_flag = self._spare_flag, None
        if flag is not None and flag.device == device:
            return flag
        return torch.zeros((), device=device, dtype=torch.float32)


def _takes_closure(optimizer: Optimizer) -> bool:
    """Return whether its `step` has a place for a closure; some optimizers take gradients only."""
    try:
        parameters = inspect.signature(optimizer.step).parameters.values()
    except (TypeError, ValueError):
        return True
    return any(p.name == "closure" or p.kind is p.VAR_KEYWORD for p in parameters)
