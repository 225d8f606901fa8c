"""Track the gradients of one optimizer from a backward to its step: their scale, and whether they are finite."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import final

from lightning_amp._compat import _modules, _sharding, _torch
from lightning_amp.numerics import dense, nonfinite_flag
from lightning_amp.scaling import _scalars
from lightning_amp.scaling._gradients import Gradients, has_gradients, inverse, parameters
from lightning_amp.scaling._records import Skip, merge_losses
from lightning_amp.scaling._scalars import constant


class Scaled(NamedTuple):
    """True gradients times `scale` []."""

    scale: Tensor


class Unscaled(NamedTuple):
    """True gradients.

    Attributes:
        found_inf: 1.0, [], if they are not finite now; `None` if they were not checked since the backward.
        used_scale: The scale that they were divided by, [].
        overflow_before_edits: Whether they overflowed before the user could change them; `None` if user code had no
            access to them.

    """

    found_inf: Tensor | None = None
    used_scale: Tensor | None = None
    overflow_before_edits: Skip | None = None


class Folded(NamedTuple):
    """Scaled gradients that a fused optimizer unscales inside its kernel, unless it skips the step.

    Attributes:
        found_inf: 1.0, [], if it skips the step.
        scale: The scale that they carry until then, []; `None` without scaling.

    """

    found_inf: Tensor
    scale: Tensor | None

    def to_true(self) -> Tensor | float:
        """Return the factor [] that turns the gradients after the step into true ones."""
        return 1.0 if self.scale is None else torch.where(self.found_inf > 0, inverse(self.scale), 1.0)


Form: TypeAlias = "Scaled | Unscaled | Folded"

UNCHECKED = Unscaled()
"""True gradients that were not checked, as a backward without scaling leaves them."""


@final
class GradientState:
    """The gradients of one optimizer since its last step.

    Attributes:
        optimizer: The user's optimizer.
        index: The optimizer's place in `configure_optimizers`.
        form: Whether the gradients are scaled now, and whether they are finite.
        loss_probe: A value [] that is finite exactly if all losses since the last step were; `None` before the first.
        has_gradients: Whether any rank has gradients, as of the last check.
        bad_loss: Whether `loss_probe` is not finite, if the host has read it together with `found_inf`; else `None`.
            The probe stays on its device, because copying it back to the device would wait for it again.
        decides_on_device: Whether the optimizer is fused and reads `found_inf` on the device.
        always_calls_closure: Whether the optimizer is torch's own, which calls a closure that it is given.
        takes_closure: Whether `optimizer.step` accepts a closure.

    """

    def __init__(self, optimizer: Optimizer, index: int, form: Form = UNCHECKED) -> None:
        self.optimizer = optimizer
        self.index = index
        self.form: Form = form
        self.loss_probe: Tensor | None = None
        self.has_gradients = False
        self.bad_loss: Skip | None = None
        self.decides_on_device = _torch.decides_on_device(optimizer)
        self.always_calls_closure = type(optimizer).__module__.startswith("torch.optim")
        self.takes_closure = self.always_calls_closure or _takes_closure(optimizer)
        # FSDP2 keeps the gradients of batches without synchronisation elsewhere
        self._is_sharded = any(map(_sharding.is_sharded, parameters(optimizer)))
        self._may_move_first = not self.always_calls_closure or isinstance(optimizer, torch.optim.LBFGS)
        self._kept = _StaysFound()
        self._closure_calls: int | None = None  # in its last step
        self._moves_first = False  # whether it has moved parameters before its first closure call
        self._had_gradients = False  # on this rank, in any step
        self._left_gradients = False  # of a sharded optimizer: the last backward did, so that it was a synchronised one
        self._spare_flag: Tensor | None = None  # a flag that is still 0.0, for reuse

    @property
    def found_inf(self) -> Tensor | None:
        """Return 1.0, [], if the gradients are not finite, else 0.0; `None` if they were not checked."""
        return None if isinstance(self.form, Scaled) else self.form.found_inf

    @property
    def used_scale(self) -> Tensor | None:
        """Return the scale that this step divides the gradients by, []; `None` without scaling."""
        if isinstance(self.form, Folded):
            return self.form.scale
        return self.form.used_scale if isinstance(self.form, Unscaled) else None

    @property
    def overflow_before_edits(self) -> Skip | None:
        """Return whether the gradients overflowed before the user changed them."""
        return self.form.overflow_before_edits if isinstance(self.form, Unscaled) else None

    # -- around the backward -------------------------------------------------------------------------------------------

    def add_loss(self, loss: Tensor, *, may_have_none: bool) -> None:
        """Record the loss, of any shape, of the next backward, and forget the last check.

        `may_have_none` is true if this rank may hold no shard of the parameters, and therefore never have gradients.
        """
        probe = self.loss_probe
        shows_drops = self._left_gradients if self._is_sharded else self._had_gradients or not may_have_none
        if probe is not None and shows_drops and not has_gradients(self.optimizer):
            probe = None  # gradients were dropped, so earlier losses do not matter any more
        self.loss_probe, self.bad_loss = merge_losses(probe, loss), None
        if not self._kept.is_empty:  # dropped or zeroed gradients do not affect the next step
            self._kept.begin_backward(Gradients(self.optimizer).largest())
        if isinstance(self.form, Unscaled):
            self.form = UNCHECKED

    def end_backward(self) -> None:
        """Note whether a backward has left gradients. All that FSDP2 had kept elsewhere are in these."""
        self._left_gradients = self._is_sharded and has_gradients(self.optimizer)

    def carry(self, to: Scaled, leave_out: Collection[int]) -> None:
        """Multiply the gradients that are still there, so that the next backward can add to them.

        `leave_out` has the ids of parameters whose gradients were already rescaled with another optimizer.
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
        """Unscale the gradients that a fused step has left scaled."""
        if isinstance(self.form, Folded):
            factor = self.form.to_true()
            if isinstance(factor, Tensor):
                Gradients(self.optimizer).multiply_(factor)
            self.form = UNCHECKED

    def unscale_(self, scale: Tensor, shared: Collection[int], *, may_overflow: bool) -> None:
        """Divide the gradients by `scale` [] and check them. `may_overflow`: the scale may be below 1.

        `shared` has the ids of parameters whose gradients another optimizer has unscaled already.
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
        """Check the present values of true gradients.

        The user may have changed them since an earlier check. The result of that check is kept, because it shows
        whether the scale was too large.
        """
        form = self.form
        assert isinstance(form, Unscaled)
        overflow = form.overflow_before_edits
        if form.found_inf is not None:
            before = Skip.on_device(form.found_inf)
            if before.known is False:
                self._spare_flag = form.found_inf
            overflow = before | (overflow or Skip.NO)
        gradients = Gradients(self.optimizer)
        self._note_gradients(gradients)
        device = gradients.device or (torch.device("cpu") if self.loss_probe is None else self.loss_probe.device)
        found_inf = gradients.check(self._new_flag(device))
        self.form = Unscaled(self._kept.beside(found_inf), form.used_scale, overflow)

    def keep_found(self, *, infinities_only: bool = False) -> None:
        """Have the next step skipped if the last check found inf or NaN, even if the user repairs the gradients.

        With `infinities_only`, ignore NaN. Clipping by value hides inf but not NaN, so the next check still finds NaN,
        unless the user has removed it on purpose.
        """
        found_inf = self.found_inf
        if found_inf is None or Skip.on_device(found_inf).known is False:
            return
        largest = Gradients(self.optimizer).largest() if infinities_only else None
        flag = found_inf if largest is None else torch.isinf(largest).to(found_inf)
        self._kept.keep(flag, list(parameters(self.optimizer)))

    def fold(self, max_norm: float | None, *, may_overflow: bool) -> bool:
        """Leave unscaling, and clipping to a total 2-norm, to the fused optimizer. This reads the gradients once.

        Return whether that is possible. If it is not possible, nothing was changed.
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
        """Combine the flags of all ranks: the gradients are not finite if they are not finite on any rank.

        A shard's overflow or a non-finite loss may be on one rank only, but all ranks must skip and move the scale
        together. Every rank calls this collective operation once per closure call, whatever it found. So no rank waits
        forever as long as all ranks step the same optimizers. `all_reduce_max` reduces a tensor [4] in place, on
        `device` (`None`: the device of the gradients).
        """
        form = self.form
        assert not isinstance(form, Scaled)
        assert form.found_inf is not None
        device = form.found_inf.device if device is None else device
        loss = constant(0.0, device) if self.loss_probe is None else nonfinite_flag(self.loss_probe).to(device)
        before = (self.overflow_before_edits or Skip.NO).flag(device)
        has_gradients = constant(float(self.has_gradients), device)
        everywhere = torch.stack([form.found_inf.to(device), loss, has_gradients, before])
        all_reduce_max(everywhere)
        found_inf, loss, anybody_has, before = everywhere.unbind()
        self.loss_probe = torch.where(loss > 0, torch.nan, 0.0)
        if not self.has_gradients:  # if another rank has gradients, this rank moves its scale too
            self.has_gradients = bool(anybody_has)
        if isinstance(form, Folded):
            self.form = Folded(found_inf, form.scale)
        else:
            overflow = None if form.overflow_before_edits is None else Skip.on_device(before)
            self.form = Unscaled(found_inf, form.used_scale, overflow)

    # -- the step ------------------------------------------------------------------------------------------------------

    def wait(self, *, asks_for_loss: bool) -> bool:
        """Wait for the device once, and read whether to skip the step and, on request, whether the loss was finite."""
        found_inf, probe = self.found_inf, self.loss_probe
        assert found_inf is not None
        if not asks_for_loss or probe is None or _scalars.in_host_memory(probe):
            return Skip(found_inf).wait()
        both = (found_inf * 2 + nonfinite_flag(probe).to(found_inf)).item()  # two flags in one transfer
        self.bad_loss = Skip.YES if both % 2 else Skip.NO
        return both >= 2

    def keep_spare(self, flag: Tensor) -> None:
        """Keep a flag [] that is still 0.0 for reuse."""
        self._spare_flag = flag

    @property
    def needs_snapshot(self) -> bool:
        """Return whether the optimizer may change parameters before its last closure call."""
        return self._may_move_first and (self._moves_first or self._closure_calls is None or self._closure_calls > 1)

    def count_edits(self) -> int:
        """Return a number that grows when parameters change; always 0 for optimizers that never move them first."""
        return sum(map(_modules.version, parameters(self.optimizer))) if self._may_move_first else 0

    def note_closure_calls(self, count: int, *, moved_first: bool) -> None:
        """Record how often a step has called its closure, and if it moved parameters before, even if it failed."""
        self._closure_calls = count
        self._moves_first |= moved_first

    def release(self) -> None:
        """Treat the gradients as true ones that were not checked."""
        self.form = UNCHECKED

    def finish(self) -> None:
        """Forget the losses and flags of the step that ended."""
        self.loss_probe = self.bad_loss = None
        self.forget_found()
        if isinstance(self.form, Unscaled) or (isinstance(self.form, Folded) and self.form.scale is None):
            self.form = UNCHECKED

    def forget_found(self) -> None:
        """Forget what earlier checks have found."""
        self._kept.forget()

    def _note_gradients(self, gradients: Gradients) -> None:
        self.has_gradients = bool(gradients)
        self._had_gradients |= self.has_gradients

    def _new_flag(self, device: torch.device) -> Tensor:
        """Return a flag [] of 0.0 to which a check may write."""
        flag, self._spare_flag = self._spare_flag, None
        if flag is not None and flag.device == device:
            return flag
        return torch.zeros((), device=device, dtype=torch.float32)


@final
class _StaysFound:
    """An overflow flag that lasts until the gradients with the overflow are dropped, set to zero, or used in a step.

    It skips the step even if the user repairs the gradients first. The plugin reports the beginning of its own
    backwards. Without loss scaling the user may call `loss.backward()` instead. A hook on one parameter detects that,
    because it runs before autograd adds to the gradient.
    """

    def __init__(self) -> None:
        self._flag: Tensor | None = None  # 1.0, [], if the next step must be skipped
        self._handle: Any = None

    @property
    def is_empty(self) -> bool:
        return self._flag is None

    def keep(self, flag: Tensor, parameters: list[Any]) -> None:
        """Keep a flag [] that a check of these parameters' gradients has set."""
        self._flag = self.beside(flag)
        if self._handle is None:
            watched = next((p for p in parameters if p.grad is not None and p.requires_grad and p.is_leaf), None)
            if watched is not None:
                self._handle = watched.register_hook(lambda _: self._only_if(_largest(watched)))

    def beside(self, found_inf: Tensor) -> Tensor:
        """Return 1.0, [], if `found_inf` or the kept flag is set."""
        return found_inf if self._flag is None else torch.maximum(found_inf, self._flag.to(found_inf.device))

    def begin_backward(self, left: Tensor | None) -> None:
        """Forget the flag if `left`, the largest gradient [], is 0, or `None` since all gradients were dropped."""
        self._unwatch()
        self._only_if(left)

    def forget(self) -> None:
        self._flag = None
        self._unwatch()

    def _only_if(self, left: Tensor | None) -> None:
        if left is None:
            self.forget()
        elif self._flag is not None:
            self._flag = self._flag * (left != 0).to(self._flag)

    def _unwatch(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None


def _largest(parameter: Any) -> Tensor | None:
    return None if parameter.grad is None else dense(parameter.grad.detach()).abs().max()


def _takes_closure(optimizer: Optimizer) -> bool:
    """Return whether `optimizer.step` accepts a closure; some third-party optimizers do not."""
    try:
        parameters = inspect.signature(optimizer.step).parameters.values()
    except (TypeError, ValueError):
        return True
    return any(p.name == "closure" or p.kind is p.VAR_KEYWORD for p in parameters)
