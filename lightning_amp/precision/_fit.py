"""Hold the state of one run of a Trainer, and in a fit its backwards, optimizer steps and batch ends."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.loops.optimization.automatic import Closure
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import final

from lightning_amp import _messages
from lightning_amp._compat import _lightning, _modules
from lightning_amp.casting import Choice, Rule
from lightning_amp.precision import _refusals
from lightning_amp.precision._anomaly import AnomalyCheck
from lightning_amp.precision._bypass import BYPASSED, ScalerByHand
from lightning_amp.precision._clipping import FoldPlan
from lightning_amp.precision._forward import ForwardContexts
from lightning_amp.precision._fp8 import Fp8
from lightning_amp.scaling import (
    BackwardWatch,
    BypassedSteps,
    HalfGradientsError,
    OptimizerSteps,
    RecordLog,
    StepPlan,
)
from lightning_amp.skipped_steps import BufferPlace, SkipProtection, matching_places

REPLACEABLE = ("forward_context", "autocast_context_manager", "clip_grad_by_norm")
"""Methods of the plugin. A run needs to know which of them were replaced, by a subclass or on the instance."""


@final
class Run:
    """One call of `fit`, `validate`, `test` or `predict`; never pickled.

    Args:
        plugin: The plugin that runs.
        module: The user's.
        training: Precision of training steps.
        evaluation: Precision of validation, test and prediction.
        fp32_modules: Rules for modules. A rule that matches nothing raises a `ValueError`.
        replaced: The methods in `REPLACEABLE` that a subclass or the user has replaced.

    Attributes:
        fit: Its backwards and optimizer steps; `None` until the optimizers exist, and if nothing is trained.
        named_buffers: Buffers that a skipped step puts back besides normalisation statistics.

    """

    def __init__(
        self,
        plugin: MixedPrecision,
        module: LightningModule,
        training: Choice,
        evaluation: Choice,
        fp32_modules: Sequence[Rule],
        replaced: Collection[str] = (),
    ) -> None:
        self.module = module
        self.device = module.trainer.strategy.root_device
        self.fitting = module.trainer.state.fn == TrainerFn.FITTING
        self.fit: Fit | None = None
        self.fp8: Fp8 | None = None
        self.named_buffers: list[BufferPlace] = []
        self._plugin, self._replaced = plugin, replaced
        self.forward = ForwardContexts(
            module,
            plugin.device,
            training,
            evaluation,
            fp32_modules,
            plugin.forward_context,
            autocast_stays=not {"forward_context", "autocast_context_manager"}.intersection(replaced),
        )

    def check(self, restore_buffers: Sequence[str], fp8_recipe: Any = None) -> None:
        """Refuse a module that cannot be trained, find its buffers, and turn fp8 on if there is a recipe.

        It is not in the constructor, so that a run that is refused here can be detached.
        """
        if self.fitting:
            _refusals.check(self.module, self.forward.training, self.device, self.forward.fp32_modules.modules)
            self.named_buffers = matching_places(self.module, restore_buffers)
            if fp8_recipe is not None:
                self.fp8 = Fp8(self.module, self.forward, fp8_recipe, self.device)

    def connect(
        self,
        optimizers: Sequence[Optimizer],
        scaler: torch.amp.GradScaler | None,
        skip_nonfinite: bool,
        log: RecordLog,
        after_batch: Callable[[], None] = lambda: None,
    ) -> None:
        """If this run is a fit, begin it with the user's unwrapped optimizers.

        Without a scaler, steps that are not finite are skipped if `skip_nonfinite`. `after_batch` is called at the end
        of each batch in which there may have been an optimizer step.
        """
        if self.fit is not None:
            self.fit.detach()
        if self.fitting:
            own_norm = "clip_grad_by_norm" in self._replaced
            self.fit = Fit(self, self._plugin, optimizers, scaler, skip_nonfinite, log, after_batch, own_norm)

    def go_on_in(self, training: Choice, evaluation: Choice, scaler: torch.amp.GradScaler | None) -> None:
        """Change the precision between two batches."""
        self.forward.change(training, evaluation)
        if self.fit is not None:
            self.fit.change_scaler(scaler, mixed=training.mixed)

    def backward(self, run: Callable[..., None]) -> None:
        """Run a backward."""
        with self.forward.fp8_layers:  # activation checkpointing calls modules again
            try:
                if self.fit is None:
                    run()
                else:
                    self.fit.backward(run)
            except (RuntimeError, TypeError) as error:
                self.forward.annotate(error, "the backward")
                raise

    def evaluation_step(self, module: nn.Module | None, step: str | None) -> contextlib.AbstractContextManager[None]:
        """Return the context of an evaluation step, or of a hook; see `AmpPrecision.evaluation_context`."""
        if self.fit is not None:
            self.fit.protection.settle()
        return self.forward.evaluation_step(self.module if module is None else module, step)

    def forward_context_of(self, precision: str) -> contextlib.AbstractContextManager[Any]:
        """Return the forward context of a training step in this precision; an empty name is the present precision."""
        if precision in ("", self.forward.training.name):
            return self._plugin.forward_context()
        with self.forward.pretending(Choice.of(precision)):
            return self._plugin.forward_context()

    def fp8_on(self, module: nn.Module, precision: str) -> contextlib.AbstractContextManager[None]:
        """Return the context of a copy's fp8 layers in a training step of this precision.

        An empty name stands for the present precision.
        """
        if self.fp8 is None or (precision or self.forward.training.name) != "fp8":
            return contextlib.nullcontext()
        return self.fp8.on(module)

    def finish(self, flush: Callable[[], None]) -> None:
        """Read the last records, unscale the remaining gradients, and warn of settings that had no effect.

        An error here must not hide the exception that ended the run.
        """
        interrupted = self.module.trainer.interrupted
        with contextlib.suppress(*([Exception] if interrupted else [])):
            flush()
            if not interrupted:
                if self.fit is not None:
                    self.fit.steps.gradients.release()
                self.forward.finish()

    def detach(self) -> None:
        """Restore the user's objects."""
        try:
            if self.fit is not None:
                self.fit.detach()
        finally:
            self.forward.detach()


@final
class Fit:
    """Backward, step and batch end of one fit. Made when the optimizers exist, and dropped when the fit is over.

    For the arguments see :meth:`Run.connect`. `own_norm`: a subclass of the plugin clips by norm in its own way.
    """

    def __init__(
        self,
        run: Run,
        plugin: MixedPrecision,
        optimizers: Sequence[Optimizer],
        scaler: torch.amp.GradScaler | None,
        skip_nonfinite: bool,
        log: RecordLog,
        after_batch: Callable[[], None],
        own_norm: bool,
    ) -> None:
        self._plugin, self._module = plugin, (module := run.module)
        self._automatic = module.automatic_optimization
        self._optimizers, self._skip_nonfinite = optimizers, skip_nonfinite
        self._after_batch = after_batch
        watch = self._watch(scaler)
        several = module.trainer.world_size > 1 and torch.distributed.is_initialized()
        all_reduce_max = partial(torch.distributed.all_reduce, op=torch.distributed.ReduceOp.MAX) if several else None
        device = run.device if several else None
        self.steps = OptimizerSteps(
            scaler, skip_nonfinite, log, optimizers, watch=watch, all_reduce_max=all_reduce_max, device=device
        )
        self.protection = SkipProtection(module, run.named_buffers, on=self.steps.skips)
        self.fold_plan = FoldPlan(module, own_norm)
        self._anomaly: AnomalyCheck | None = None
        # the first step shows whether parameters become half precision
        self._may_turn_half = run.forward.training.mixed
        self._compiling = _modules.CompiledBackwardWithoutAutocast()
        self._compiling.start()
        self._guard(watch)

    def _watch(self, scaler: torch.amp.GradScaler | None) -> BackwardWatch | None:
        if scaler is None or not scaler.is_enabled():
            return None
        return BackwardWatch(self._optimizers, self._module.parameters())

    def _guard(self, watch: BackwardWatch | None) -> None:
        """Refuse steps that bypass the plugin, and redirect the scaler's methods to it, while there is a loss scale."""
        self._guards: list[BypassedSteps | ScalerByHand] = []
        if watch is not None and self.steps.scaler is not None:
            scaler, calls = self.steps.scaler, (self._note_backward, self._skip_left_out)
            by_hand = ScalerByHand(scaler, self.steps, self._plugin, self._module, *calls)
            self._guards = [by_hand, BypassedSteps(self.steps, watch, BYPASSED)]

    def change_scaler(self, scaler: torch.amp.GradScaler | None, *, mixed: bool) -> None:
        """Go on in another precision, between two batches.

        The protection from skipped steps stays, because the schedules do not yet have the result of the last step.
        """
        watch = self._watch(scaler)
        self._let_go()
        self.steps.change_scaler(scaler, self._skip_nonfinite, watch)
        self._guard(watch)
        self._may_turn_half = mixed

    # -- training step -------------------------------------------------------------------------------------------------

    def begin_training_step(self) -> None:
        """Prepare for a training step; in manual optimization, end the batch in which hooks have stepped since."""
        if not self._automatic:
            self._finish_batch()
        self.protection.enter_step(manual=not self._automatic, on=self.steps.skips)

    def end_training_step(self) -> None:
        """End a training step; in automatic optimization its optimizer step is still to come."""
        if self.protection.active:
            self.protection.leave_step()
        if not self._automatic:
            self._finish_batch()

    def _finish_batch(self) -> None:
        self.steps.finish_batch()
        self._after_batch()

    # -- backward ------------------------------------------------------------------------------------------------------

    def scale(self, loss: Tensor) -> Tensor:
        """Show the true loss to hooks, bring all gradients that are still there to its scale, and return it scaled."""
        if self.fold_plan.current().somebody_sees_backward:
            _lightning.run_hook(self._module, "on_before_backward", loss)
        self._note_backward()
        scaled = self.steps.scale_loss(loss)
        if self.steps.scaler is not None and torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled():
            self._anomaly = AnomalyCheck(loss)
        return scaled

    def _note_backward(self) -> None:
        if self.protection.active:
            self.protection.note_backward()

    def backward(self, run: Callable[..., None]) -> None:
        """Run a backward of a scaled loss."""
        anomaly, self._anomaly = self._anomaly, None
        self.steps.gradients.begin_backward()
        try:
            if anomaly is None:
                run()
            else:
                with anomaly:
                    run(retain_graph=True)
                anomaly.check(self._module)
        finally:
            self.steps.gradients.end_backward()

    # -- step ----------------------------------------------------------------------------------------------------------

    def step(self, optimizer: Optimizer, closure: Callable[[], Any], kwargs: dict[str, Any]) -> Any:
        """Step or skip, in the order of `_events.py`, and return the output.

        The closure computes loss and gradients. It is Lightning's, or in manual optimization the user's.
        """
        try:
            output, result = self.steps.step(
                optimizer,
                partial(self._compute, closure, optimizer),
                partial(self._before_update, optimizer),
                self._plan(optimizer),
                closure_runs_backward=isinstance(closure, Closure),
                **kwargs,
            )
        except HalfGradientsError as error:
            raise ValueError(f"lightning_amp: {_refusals.half_in_a_step(self._module) or error}.") from error
        if self.protection.active:
            self.protection.observe(optimizer, result)
        if self._may_turn_half:
            self._may_turn_half = False
            if found := _refusals.half_in_a_step(self._module):
                _messages.warn(f"lightning_amp: {found}.")
        if self._automatic:
            self._finish_batch()
        return output

    def _skip_left_out(self) -> None:
        for optimizer, result in self.steps.skip_left_out():
            if self.protection.active:
                self.protection.before_step(optimizer)
                self.protection.observe(optimizer, result)

    def _plan(self, optimizer: Optimizer) -> StepPlan:
        fold, max_norm = self.fold_plan.current().fold()
        protection = self.protection
        if not protection.active:  # a step with nothing to protect does not read the flag
            return StepPlan(fold, max_norm)
        return StepPlan(fold, max_norm, protection.host_must_know(optimizer), protection.asks_for_loss)

    def _compute(self, closure: Callable[[], Any], optimizer: Optimizer) -> Any:
        if self._automatic:  # Lightning's closure itself enters the context of `training_step`
            output = closure()
        else:
            with self._plugin.forward_context():
                output = closure()
        if self.protection.active:
            self.protection.before_step(optimizer)
        return output

    def _before_update(self, optimizer: Optimizer) -> None:
        """Show the true gradients to all hooks, and clip them."""
        plan = self.fold_plan.current()
        if plan.somebody_looks:
            _lightning.run_hook(self._module, "on_before_optimizer_step", optimizer)
            self.steps.check_again(optimizer)
        if plan.own_clipping:
            self.steps.gradients.state(optimizer).keep_found(infinities_only=True)
        _lightning.run_clipping(self._plugin, self._module, optimizer)
        if plan.own_clipping:
            self.steps.check_again(optimizer)

    # -- the end -------------------------------------------------------------------------------------------------------

    def detach(self) -> None:
        """Restore the user's objects and torch's switches."""
        try:
            self.protection.detach()
        finally:
            self._let_go()
            self._compiling.stop()

    def _let_go(self) -> None:
        self.steps.gradients.forget_found()
        for guard in self._guards:
            guard.detach()
