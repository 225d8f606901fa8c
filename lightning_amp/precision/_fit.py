"""One fit: backward, optimizer step and batch end, from `connect` to `teardown`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.loops.optimization.automatic import Closure
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import final

from lightning_amp._compat import _lightning, _modules
from lightning_amp.precision import _refusals
from lightning_amp.precision._anomaly import AnomalyCheck
from lightning_amp.precision._fold_plan import FoldPlan
from lightning_amp.precision._scaler_by_hand import ScalerByHand
from lightning_amp.precision._unseen_steps import UnseenSteps
from lightning_amp.scaling import BackwardWatch, HalfGradientsError, OptimizerSteps, RecordLog, StepPlan
from lightning_amp.skipped_steps import BufferPlace, SkipProtection


@final
class Fit:
    """Backward, step and batch end of one fit. Made when the optimizers exist, and dropped when the fit is over.

    Args:
        plugin: Clips.
        module: The user's.
        optimizers: The user's own, not wrapped.
        scaler: Of the plugin; `None` without loss scaling.
        skip_nonfinite: Whether steps that are not finite are skipped where no scaler asks for it.
        log: Gets a record of each step.
        mixed: Whether training steps run under autocast.
        named_buffers: What a skipped step puts back besides normalisation statistics.
        own_norm: Whether the plugin is a subclass that clips by norm in its own way.
        after_batch: Is called at the end of each batch in which there may have been an optimizer step.

    """

    def __init__(
        self,
        plugin: MixedPrecision,
        module: LightningModule,
        optimizers: Sequence[Optimizer],
        *,
        scaler: torch.amp.GradScaler | None,
        skip_nonfinite: bool,
        log: RecordLog,
        mixed: bool,
        named_buffers: Sequence[BufferPlace],
        own_norm: bool,
        after_batch: Callable[[], None] = lambda: None,
    ) -> None:
        self._plugin, self._module = plugin, module
        self._automatic = module.automatic_optimization
        self._optimizers, self._skip_nonfinite = optimizers, skip_nonfinite
        self._after_batch = after_batch
        watch = self._watch(scaler)
        several = module.trainer.world_size > 1 and torch.distributed.is_initialized()
        all_reduce_max = partial(torch.distributed.all_reduce, op=torch.distributed.ReduceOp.MAX) if several else None
        device = module.trainer.strategy.root_device if several else None
        self.steps = OptimizerSteps(
            scaler,
            skip_nonfinite,
            log,
            optimizers,
            watch=watch,
            all_reduce_max=all_reduce_max,
            device=device,
        )
        self._unseen_steps = None if watch is None else UnseenSteps(self.steps, watch)
        self._protection = SkipProtection(module, named_buffers, on=self.steps.skips)
        self._fold_plan = FoldPlan(module, own_norm)
        self._anomaly: AnomalyCheck | None = None
        self._may_turn_half = mixed  # the first step tells whether parameters do
        self._compiling = _modules.CompiledBackwardWithoutAutocast()
        self._compiling.start()
        self._by_hand = self._scaler_by_hand()

    def _watch(self, scaler: torch.amp.GradScaler | None) -> BackwardWatch | None:
        if scaler is None or not scaler.is_enabled():
            return None
        return BackwardWatch(self._optimizers, self._module.parameters())

    def _scaler_by_hand(self) -> ScalerByHand | None:
        if self.steps.scaler is None:
            return None
        return ScalerByHand(self.steps.scaler, self.steps, self._plugin, self._module, self._note_backward)

    def change_scaler(self, scaler: torch.amp.GradScaler | None, *, mixed: bool) -> None:
        """Go on in another precision, between two batches.

        What protects from skipped steps stays: the schedules have not been told yet of the last one.

        Args:
            scaler: Its scaler, if it has one.
            mixed: Whether training steps run under autocast.

        """
        watch = self._watch(scaler)
        self._let_go()
        self.steps.change_scaler(scaler, self._skip_nonfinite, watch)
        self._unseen_steps = None if watch is None else UnseenSteps(self.steps, watch)
        self._by_hand = self._scaler_by_hand()
        self._may_turn_half = mixed

    # -- training step -------------------------------------------------------------------------------------------------

    def begin_training_step(self) -> None:
        """Prepare for a training step; in manual optimization, end the batch of what hooks have stepped since."""
        if not self._automatic:
            self._finish_batch()
        self._protection.enter_step(manual=not self._automatic, on=self.steps.skips)

    def end_training_step(self) -> None:
        """End a training step; in automatic optimization its optimizer step is still to come."""
        if self._protection.active:
            self._protection.leave_step()
        if not self._automatic:
            self._finish_batch()

    def _finish_batch(self) -> None:
        self.steps.finish_batch()
        self._after_batch()

    def settle(self) -> None:
        """Leave everything as it ought to be for somebody who looks now: validation, or a checkpoint."""
        self._protection.settle()

    # -- backward ------------------------------------------------------------------------------------------------------

    def scale(self, loss: Tensor) -> Tensor:
        """Show the true loss to hooks; returns it scaled, with gradients that are still there brought to its scale."""
        if self._fold_plan.current().somebody_sees_backward:
            _lightning.run_hook(self._module, "on_before_backward", loss)
        self._note_backward()
        scaled = self.steps.scale_loss(loss)
        if self.steps.scaler is not None and torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled():
            self._anomaly = AnomalyCheck(loss)
        return scaled

    def _note_backward(self) -> None:
        if self._protection.active:
            self._protection.note_backward()

    def backward(self, run: Callable[..., None], **kwargs: Any) -> None:
        """Run a backward of a scaled loss.

        Args:
            run: Does it.
            kwargs: Go to `torch.Tensor.backward`.

        """
        anomaly, self._anomaly = self._anomaly, None
        self.steps.begin_backward()
        try:
            if anomaly is None:
                run(**kwargs)
            else:
                with anomaly:
                    run(**{**kwargs, "retain_graph": True})
                anomaly.check(self._module)
        finally:
            self.steps.end_backward()

    @property
    def somebody_sees_backward(self) -> bool:
        """Return whether a hook of the module or a callback runs around the backward."""
        return self._fold_plan.current().somebody_sees_backward

    # -- step ----------------------------------------------------------------------------------------------------------

    def step(
        self, optimizer: Optimizer, closure: Callable[[], Any], context: Callable[[], Any], kwargs: dict[str, Any]
    ) -> Any:
        """Step or skip, in the order of `_events.py`; returns the output.

        Args:
            optimizer: The user's own.
            closure: Computes loss and gradients; Lightning's, or in manual optimization the user's.
            context: Makes what the user's closure runs in. Lightning's enters it around `training_step` itself.
            kwargs: Go to `optimizer.step`.

        """
        try:
            result = self.steps.step(
                optimizer,
                partial(self._compute, closure, None if self._automatic else context, optimizer),
                partial(self._before_update, optimizer),
                self._plan(optimizer),
                closure_runs_backward=isinstance(closure, Closure),
                **kwargs,
            )
        except HalfGradientsError as error:
            raise ValueError(f"lightning_amp: {_refusals.half_in_a_step(self._module) or error}.") from error
        if self._protection.active:
            self._protection.observe(optimizer, result)
        if self._may_turn_half:
            self._may_turn_half = False
            _refusals.warn_of_half_in_a_step(self._module)
        if self._automatic:
            self._finish_batch()
        return result.output

    def _plan(self, optimizer: Optimizer) -> StepPlan:
        fold, max_norm = self._fold_plan.current().fold()
        protection = self._protection
        if not protection.active:  # who has nothing to protect is not asked in each step
            return StepPlan(fold, max_norm)
        return StepPlan(fold, max_norm, protection.host_must_know(optimizer), protection.asks_for_loss)

    def _compute(self, closure: Callable[[], Any], context: Callable[[], Any] | None, optimizer: Optimizer) -> Any:
        if context is None:
            output = closure()
        else:
            with context():
                output = closure()
        if self._protection.active:
            self._protection.before_step(optimizer)
        return output

    def _before_update(self, optimizer: Optimizer) -> None:
        """Let everybody see the true gradients, and clip."""
        plan = self._fold_plan.current()
        if plan.somebody_looks:
            _lightning.run_hook(self._module, "on_before_optimizer_step", optimizer)
            self.steps.check_again(optimizer)
        if plan.own_clipping:
            self.steps.state(optimizer).keep_found(infinities_only=True)
        _lightning.run_clipping(self._plugin, self._module, optimizer)
        if plan.own_clipping:
            self.steps.check_again(optimizer)

    # -- the end -------------------------------------------------------------------------------------------------------

    def mend(self, state_dict: dict[str, Any]) -> None:
        """Take what an overflow wrote into buffers out of a checkpoint."""
        self._protection.mend(state_dict)

    def detach(self) -> None:
        """Leave the user's objects, and torch, as they were."""
        try:
            self._protection.detach()
        finally:
            self._let_go()
            self._compiling.stop()

    def _let_go(self) -> None:
        self.steps.forget_found()
        if self._by_hand is not None:
            self._by_hand.detach()
        if self._unseen_steps is not None:
            self._unseen_steps.detach()
