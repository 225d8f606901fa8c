"""The state of the gradients of one optimizer: the scale that they carry, and whether they are finite."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import final

from lightning_amp._compat import _modules, _sharding, _torch
from lightning_amp.numerics import dense, nonfinite_flag
from lightning_amp.scaling import _scalars
from lightning_amp.scaling._early_moves import calls_closure_late
from lightning_amp.scaling._gradients import Gradients, has_gradients, inverse, new_flag, parameters
from lightning_amp.scaling._scalars import Skip, constant, merge_losses


@final
class GradientState:
    """The gradients of one optimizer since its last step.

    Attributes:
        optimizer: The user's optimizer.
        index: The optimizer's place in `configure_optimizers`.
        scale: The loss scale that the gradients carry now, []; `None`: they are true gradients.
        folded: Whether a fused optimizer divides by `scale` inside its kernel, unless it skips the step.
        found_inf: 1.0, [], if the gradients are not finite; `None` if they were not checked since the backward.
        used_scale: The scale by which the checked gradients were divided, []; `None` without scaling.
        overflow: Whether they overflowed before the user could change them; `None` if user code had no access.
        loss: A value [] that is finite exactly if all losses since the last step were; `None` before the first.
        bad_loss: Whether `loss` is not finite, if the host has read that together with `found_inf`; else `None`.
        has_gradients: Whether this rank has gradients, as of the last check; after :meth:`agree`, any rank.
        decides_on_device: Whether the optimizer is fused and reads `found_inf` on the device.
        is_torchs: Whether the optimizer is torch's own, which calls a closure that it is given.
        takes_closure: Whether `optimizer.step` accepts a closure.
        moves_early: Whether a step may move parameters before its last closure call.
        watched: The parameter whose backwards are watched.
        carried: The gradient of `watched` that was multiplied at the last change of `scale`.
        since: The number of scaled backwards before the last step.

    """

    def __init__(self, optimizer: Any, index: int) -> None:
        self.index = index
        self.scale: Tensor | None = None
        self.loss: Tensor | None = None
        self.has_gradients = False
        self._had_gradients = False  # on this rank, in any step
        self.watched: Any = None
        self.carried: weakref.ref[Tensor] | None = None
        self.since = 0
        self._kept = _StickyFlag()
        self._forget_check()
        self.adopt(optimizer)

    def adopt(self, optimizer: Any) -> None:
        """Go on with an optimizer that takes the place of the present one, with the same parameters."""
        if type(optimizer) is not type(getattr(self, "optimizer", None)):
            self.moves_early = calls_closure_late(optimizer)
        self.optimizer: Any = optimizer
        self.decides_on_device = _torch.decides_on_device(optimizer)
        self.is_torchs = type(optimizer).__module__.startswith("torch.optim")
        self.takes_closure = self.is_torchs or _takes_closure(optimizer)
        # FSDP2 keeps the gradients of batches without synchronisation elsewhere
        self.is_sharded = any(map(_sharding.is_sharded, parameters(optimizer)))

    def num_edits(self, has_hooks: bool) -> int:
        """Return a number that grows when the user's optimizer, or a hook of a step, changes parameters in place."""
        is_plain = self.is_torchs and not has_hooks
        return 0 if is_plain else sum(map(_modules.version, parameters(self.optimizer)))

    def _forget_check(self) -> None:
        self.found_inf: Tensor | None = None
        self.used_scale: Tensor | None = None
        self.overflow: Skip | None = None
        self.bad_loss: Skip | None = None
        self.folded = False

    @property
    def is_scaled(self) -> bool:
        """Return whether the gradients must be divided by `scale` before anything else is done with them."""
        return self.scale is not None and not self.folded

    # -- around the backward -------------------------------------------------------------------------------------------

    def add_loss(self, loss: Tensor, *, may_have_none: bool) -> None:
        """Record the loss, of any shape, of the next backward, and forget the last check.

        `may_have_none` is true if this rank may hold no shard of the parameters, and therefore never have gradients.
        """
        probe, shows_drops = self.loss, self._had_gradients or not may_have_none
        if probe is not None and shows_drops and not has_gradients(self.optimizer) and not self._elsewhere():
            probe = None  # gradients were dropped, so earlier losses do not matter any more
        self.loss = merge_losses(probe, loss)
        self._kept.begin_backward(self.optimizer)
        if self.folded:
            self.bad_loss = None
        else:
            self._forget_check()

    def _elsewhere(self) -> list[Tensor]:
        """Return the gradients that FSDP2 keeps of batches without synchronisation."""
        return _sharding.unsynchronised_gradients(parameters(self.optimizer)) if self.is_sharded else []

    def carry(self, to: Tensor, leave_out: Collection[int]) -> None:
        """Multiply the gradients that are still there, so that the next backward, at scale `to` [], can add to them.

        `leave_out` has the ids of parameters whose gradients were already rescaled with another optimizer.
        """
        if self.scale is to and not self.folded:
            return
        gradients, elsewhere = Gradients(self.optimizer, leave_out), self._elsewhere()
        if gradients or elsewhere:
            factor = to if self.scale is None else to * (self._to_true() if self.folded else inverse(self.scale))
            gradients.multiply_(factor)
            for gradient in elsewhere:
                gradient.mul_(factor)
        grad = getattr(self.watched, "grad", None)
        self.scale, self.carried = to, None if grad is None else weakref.ref(grad)
        self._forget_check()

    # -- unscale and check ---------------------------------------------------------------------------------------------

    def _to_true(self) -> Tensor:
        """Return the factor [] that turns the gradients after a folded step into true ones."""
        assert self.scale is not None and self.found_inf is not None  # noqa: PT018
        return torch.where(self.found_inf > 0, inverse(self.scale), 1.0)

    def unfold(self) -> None:
        """Unscale the gradients that a folded step has left scaled."""
        if self.folded:
            if self.scale is not None:
                Gradients(self.optimizer).multiply_(self._to_true())
            self.release()

    def unscale_(self, shared: Collection[int], *, may_overflow: bool) -> None:
        """Divide the gradients by their scale and check them. `may_overflow`: the scale may be below 1.

        `shared` has the ids of parameters whose gradients another optimizer has unscaled already.
        """
        scale = self.scale
        assert scale is not None
        gradients = Gradients(self.optimizer, shared)
        everything = Gradients(self.optimizer) if shared else gradients
        everything.require_full_precision(self.optimizer)
        self._note_gradients(everything)
        found_inf = gradients.unscale_(inverse(scale), new_flag(scale.device))
        if may_overflow:
            found_inf = gradients.check(found_inf)
        if shared:
            found_inf = everything.check(found_inf)
        self.scale, self.used_scale, self.found_inf = None, scale, self._kept.or_kept(found_inf)

    def check(self) -> None:
        """Check the present values of true gradients.

        The user may have changed them since an earlier check. The result of that check is kept, because it shows
        whether the scale was too large.
        """
        if self.found_inf is not None:
            self.overflow = Skip.on_device(self.found_inf) | (self.overflow or Skip.NO)
        gradients = Gradients(self.optimizer)
        self._note_gradients(gradients)
        device = gradients.device or (torch.device("cpu") if self.loss is None else self.loss.device)
        self.found_inf = self._kept.or_kept(gradients.check(new_flag(device)))

    def keep_found(self, *, infinities_only: bool = False) -> None:
        """Have the next step skipped if the last check found inf or NaN, even if the user repairs the gradients.

        With `infinities_only`, ignore NaN. Clipping by value hides inf but not NaN, so the next check still finds NaN,
        unless the user has removed it on purpose.
        """
        if self.found_inf is None or Skip.on_device(self.found_inf).known is False:
            return
        largest = Gradients(self.optimizer).largest() if infinities_only else None
        flag = self.found_inf if largest is None else torch.isinf(largest).to(self.found_inf)
        self._kept.keep(flag, self.optimizer)

    def fold(self, max_norm: float | None, *, may_overflow: bool) -> bool:
        """Leave unscaling, and clipping to a total 2-norm, to the fused optimizer. This reads the gradients once.

        Return whether that is possible. If it is not possible, nothing was changed.
        """
        gradients, scale = Gradients(self.optimizer), self.scale
        device = gradients.device
        if device is None or not gradients.plain or may_overflow:
            return False
        if scale is not None:
            gradients.require_full_precision(self.optimizer)
        grad_scale = None if scale is None else scale.to(device)
        if max_norm is None:
            found_inf = gradients.check(new_flag(device))
        else:
            if any(dtype == torch.float64 for _, dtype in gradients.groups):
                return False  # the norm needs more digits than a fused optimizer takes
            norm, found_inf = gradients.true_norm(grad_scale)
            if found_inf is None:
                return False
            divisor = ((norm + 1e-6) / max_norm).clamp(min=1.0)  # 1 / clip_coef of `clip_grad_norm_`
            grad_scale = divisor if grad_scale is None else grad_scale * divisor
        self._note_gradients(gradients)
        self.folded, self.used_scale, self.found_inf = True, scale, self._kept.or_kept(found_inf)
        _torch.set_grad_scale(self.optimizer, grad_scale)
        return True

    def agree(self, all_reduce_max: Callable[[Tensor], Any], device: torch.device | None) -> None:
        """Combine the flags of all ranks: the gradients are not finite if they are not finite on any rank.

        A shard's overflow or a non-finite loss may be on one rank only, but all ranks must skip and move the scale
        together. Every rank calls this collective operation once per check, whatever it found. So no rank waits
        forever as long as all ranks step the same optimizers. `all_reduce_max` reduces a tensor [4] in place, on
        `device` (`None`: the device of the gradients).
        """
        assert self.found_inf is not None
        device = self.found_inf.device if device is None else device
        loss = constant(0.0, device) if self.loss is None else nonfinite_flag(self.loss).to(device)
        before = (self.overflow or Skip.NO).flag(device)
        everywhere = torch.stack([self.found_inf.to(device), loss, constant(float(self.has_gradients), device), before])
        all_reduce_max(everywhere)
        self.found_inf, loss, anybody_has, before = everywhere.unbind()
        self.loss = torch.where(loss > 0, torch.nan, 0.0)
        if not self.has_gradients:  # if another rank has gradients, this rank moves its scale too
            self.has_gradients = bool(anybody_has)
        if self.overflow is not None:
            self.overflow = Skip.on_device(before)

    # -- the step ------------------------------------------------------------------------------------------------------

    def wait(self) -> bool:
        """Wait for the device once, and read whether to skip the step, and whether the loss was finite."""
        found_inf, probe = self.found_inf, self.loss
        assert found_inf is not None
        if probe is None or _scalars.in_host_memory(probe):
            return Skip(found_inf).wait()
        both = (found_inf * 2 + nonfinite_flag(probe).to(found_inf)).item()  # two flags in one transfer
        self.bad_loss = Skip.YES if both % 2 else Skip.NO
        return both >= 2

    def release(self) -> None:
        """Treat the gradients as true ones that were not checked."""
        self.scale = None
        self._forget_check()

    def finish(self) -> None:
        """Forget the losses and flags of the step that ended. Gradients that a folded step has left stay folded."""
        self.loss = self.bad_loss = self.carried = None
        self._kept.forget()
        if not self.folded or self.scale is None:
            self._forget_check()

    def _note_gradients(self, gradients: Gradients) -> None:
        self.has_gradients = bool(gradients)
        self._had_gradients |= self.has_gradients


@final
class _StickyFlag:
    """An overflow flag that lasts until the gradients with the overflow are dropped, set to zero, or used in a step.

    It skips the step even if the user repairs the gradients first. The plugin reports the beginning of its own
    backwards. Without loss scaling the user may call `loss.backward()` instead. A hook on one parameter detects that,
    because it runs before autograd adds to the gradient.
    """

    def __init__(self) -> None:
        self._flag: Tensor | None = None  # 1.0, [], if the next step must be skipped
        self._handle: Any = None

    def keep(self, flag: Tensor, optimizer: Optimizer) -> None:
        """Keep a flag [] that a check of this optimizer's gradients has set."""
        self._flag = self.or_kept(flag)
        mine: Any = parameters(optimizer)
        watched = next((p for p in mine if p.grad is not None and p.requires_grad and p.is_leaf), None)
        if self._handle is None and watched is not None:
            self._handle = watched.register_hook(lambda _: self._only_if(_largest(watched)))

    def or_kept(self, found_inf: Tensor) -> Tensor:
        """Return 1.0, [], if `found_inf` or the kept flag is set."""
        return found_inf if self._flag is None else torch.maximum(found_inf, self._flag.to(found_inf.device))

    def begin_backward(self, optimizer: Optimizer) -> None:
        """Forget the flag if the gradients were dropped or set to zero since."""
        if self._flag is not None:
            self._unwatch()
            self._only_if(Gradients(optimizer).largest())

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
    except (AttributeError, TypeError, ValueError):
        return True
    return any(p.name == "closure" or p.kind is p.VAR_KEYWORD for p in parameters)
