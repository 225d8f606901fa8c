"""One run of a Trainer: what the plugin owns while it lasts, and one stack of undos that ends it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import final

from lightning_amp import _messages
from lightning_amp._compat import _lightning, _modules, _torch
from lightning_amp._compat._names import BaseFinetuning, LightningModule, TrainerFn, do_nothing_closure
from lightning_amp._text import counted
from lightning_amp.casting import Choice
from lightning_amp.numerics import all_finite
from lightning_amp.precision import _refusals
from lightning_amp.precision._clipping import FoldPlan
from lightning_amp.precision._forward import ForwardContexts
from lightning_amp.precision._fp8 import Fp8
from lightning_amp.scaling import (
    Calls,
    HalfGradientsError,
    OptimizerSteps,
    RecordLog,
    StepPlan,
    max_over_ranks,
    parameters,
)
from lightning_amp.skipped_steps import BufferPlace, SkipProtection, matching_places

_CALLS = Calls(
    "the precision plugin",
    "self.manual_backward(loss)",
    "`step()` of what `self.optimizers()` returns, not of its `.optimizer`, nor with `use_pl_optimizer=False`",
    "Return it from `configure_optimizers`, and call `step()` of what `self.optimizers()` returns (several optimizers"
    " need `self.automatic_optimization = False`)",
    takes_plain=True,
)


@final
class Run:
    """One call of `fit`, `validate`, `test` or `predict`; never pickled.

    Args:
        plugin: The plugin that runs. A rule of its `fp32_modules` that matches nothing raises a `ValueError`.
        module: The user's.
        training: Precision of training steps.
        evaluation: Precision of validation, test and prediction.
        own_norm: Whether a subclass of the plugin clips by norm in its own way.

    Attributes:
        fitting: Whether something is trained.
        steps: Its optimizer steps; `None` until the optimizers exist, and if nothing is trained.
        named_buffers: Buffers that a skipped step puts back besides normalisation statistics.

    """

    def __init__(
        self, plugin: Any, module: LightningModule, training: Choice, evaluation: Choice, own_norm: bool
    ) -> None:
        self.module = module
        self.device = module.trainer.strategy.root_device
        self.fitting = module.trainer.state.fn == TrainerFn.FITTING
        self.steps: OptimizerSteps | None = None
        self.fp8: Fp8 | None = None
        self.named_buffers: list[BufferPlace] = []
        self._plugin, self._own_norm = plugin, own_norm
        self._automatic = module.automatic_optimization
        self._checked: Tensor | None = None  # a loss whose backward is checked for anomalies
        self._undo = contextlib.ExitStack()
        self.forward = ForwardContexts(
            module, plugin.device, training, evaluation, plugin.fp32_modules, plugin.forward_context
        )
        self._undo.callback(self.forward.detach)

    def check(self) -> None:
        """Refuse a module that cannot be trained, find its buffers, and turn fp8 on if there is a recipe.

        It is not in the constructor, so that a run that is refused here can be ended.
        """
        if self.fitting:
            _refusals.check(self.module, self.forward.training, self.device, self.forward.fp32_modules.modules)
            self.named_buffers = matching_places(self.module, self._plugin.restore_buffers)
            if (recipe := self._plugin.fp8_recipe) is not None:
                callbacks = self.module.trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
                unfreezes = any(isinstance(callback, BaseFinetuning) for callback in callbacks)
                self.fp8 = Fp8([self.forward], recipe, self.device, may_unfreeze=unfreezes)

    def connect(self, optimizers: Sequence[Optimizer]) -> None:
        """If this run is a fit, begin it with the user's unwrapped optimizers."""
        if not self.fitting:
            return
        if self.steps is not None:
            self.steps.close()
            self.protection.detach()
        self.steps = OptimizerSteps(
            self._plugin.scaler,
            self._plugin.skip_nonfinite,
            self._plugin.records,
            optimizers,
            calls=_CALLS,
            watched=self.module.parameters(),
            all_reduce_max=max_over_ranks() if self.module.trainer.world_size > 1 else None,
            device=self.device,
        )
        self._undo.callback(self.steps.close)
        self._optimizers: Sequence[Optimizer] = optimizers
        self.protection = SkipProtection(self.module, self.named_buffers, on=self.steps.skips)
        self._undo.callback(self.protection.detach)
        self.fold_plan = FoldPlan(self.module, self._own_norm)
        # the first step shows whether parameters become half precision
        self._may_turn_half = self.forward.training.mixed
        self._undo.enter_context(_modules.compiled_backward_without_autocast())

    # -- forward -------------------------------------------------------------------------------------------------------

    def begin_training_step(self) -> None:
        """Prepare for a training step; in manual optimization, end the batch in which hooks have stepped since."""
        self.end_batch()
        if self.steps is not None:
            optimizers = self.module.trainer.strategy.optimizers
            for optimizer in optimizers if optimizers is not self._optimizers else ():
                self.steps.state(_torch.unwrap_optimizer(optimizer))  # the gradients of new ones begin now
            self._optimizers = optimizers
            self.protection.enter_step()

    def end_batch(self) -> None:
        """End the round of a batch in manual optimization; in automatic optimization the optimizer step ends it."""
        if self.steps is not None and not self._automatic:
            self.steps.end_round()

    # -- backward ------------------------------------------------------------------------------------------------------

    def scale(self, steps: OptimizerSteps, loss: Tensor) -> Tensor:
        """Show the true loss to hooks, bring all gradients that are still there to its scale, and return it scaled."""
        if self.fold_plan.current().somebody_sees_backward:
            _lightning.run_hook(self.module, "on_before_backward", loss)
        self.protection.note_backward()
        scaled = steps.scale_loss(loss)
        if steps.scaler is not None and torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled():
            self._checked = loss
        return scaled

    def backward(self, run: Callable[..., None]) -> None:
        """Run the backward of a scaled loss."""
        checked, self._checked = self._checked, None
        steps = None if self.forward.evaluating else self.steps
        scaled = contextlib.nullcontext() if steps is None else steps.scaled_backward()
        with self.forward.backward(), scaled:
            if checked is None:
                run()
            else:
                self._run_checked(run, checked)

    def _run_checked(self, run: Callable[..., None], loss: Tensor) -> None:
        """Run the backward of a scaled loss, which may overflow, and then check whether the true backward is finite.

        The scaled backward runs without the check for NaN, and still records traces. If it leaves non-finite gradients,
        the true `loss` is differentiated again with the check. A real anomaly raises torch's own `RuntimeError`, with
        its trace. After an overflow the step is skipped as usual.

        Cost: the graph is kept, each backward reads a flag, and a second backward runs after an overflow.
        """
        with torch.autograd.set_detect_anomaly(True, check_nan=False):
            run(retain_graph=True)
        params = [p for p in self.module.parameters() if p.requires_grad]
        if not all_finite(p.grad for p in params if p.grad is not None) and loss.requires_grad:
            torch.autograd.grad(loss, params, allow_unused=True)

    # -- step ----------------------------------------------------------------------------------------------------------

    def step(
        self, steps: OptimizerSteps, optimizer: Optimizer, closure: Callable[[], Any], kwargs: dict[str, Any]
    ) -> Any:
        """Step or skip, in the order of `docs/design.md`, and return the output.

        The closure computes loss and gradients. It is Lightning's, or in manual optimization the user's.
        """
        compute = partial(self._compute, closure, optimizer)
        update = partial(self._before_update, steps, optimizer)
        fold, max_norm = self.fold_plan.current().fold()
        host_must_know, in_closure = self.protection.host_must_know(optimizer), closure is not do_nothing_closure
        plan = StepPlan(fold, max_norm, host_must_know, in_closure)
        try:
            output, result = steps.step(optimizer, compute, update, plan, **kwargs)
        except HalfGradientsError as error:
            raise ValueError(f"lightning_amp: {_refusals.half_in_a_step(self.module) or error}.") from error
        self.protection.observe(optimizer, result)
        if self._may_turn_half:
            self._may_turn_half = False
            if found := _refusals.half_in_a_step(self.module):
                _messages.warn(f"lightning_amp: {found}.")
        if self._automatic:
            steps.end_round()
        return output

    def _compute(self, closure: Callable[[], Any], optimizer: Optimizer) -> Any:
        if self._automatic:  # Lightning's closure itself enters the context of `training_step`
            output = closure()
        else:
            with self._plugin.forward_context():
                output = closure()
        self.protection.before_step(optimizer)
        return output

    def _before_update(self, steps: OptimizerSteps, optimizer: Optimizer) -> None:
        """Show the true gradients to all hooks, and clip them."""
        plan = self.fold_plan.current()
        if plan.somebody_looks:
            _lightning.run_hook(self.module, "on_before_optimizer_step", optimizer)
            steps.check_again(optimizer)
        if plan.own_clipping:
            steps.state(optimizer).keep_found(infinities_only=True)
        _lightning.run_clipping(self._plugin, self.module, optimizer)
        if plan.own_clipping:
            steps.check_again(optimizer)

    # -- the end -------------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Read the last records, and warn of lost steps and of settings that had no effect.

        An error here must not hide the exception that ended the run.
        """
        interrupted, log = self.module.trainer.interrupted, self._plugin.records
        with contextlib.suppress(*([Exception] if interrupted else [])):
            states = () if self.steps is None else self.steps.states.values()
            idle = [one.optimizer for one in states if one.scale is not None and one.since <= 0]  # never stepped
            by_hand = any(not log.num_attempted or any(p.grad is not None for p in parameters(one)) for one in idle)
            if self.steps is not None:
                self.steps.release()
                self.steps.end_round()
            log.flush()
            if not interrupted:
                self._warn_of_lost_steps(log, by_hand)
                self.forward.finish()

    def _warn_of_lost_steps(self, log: RecordLog, by_hand: bool) -> None:
        """Say how many steps were skipped, beyond those that lowered the scale, unless a locator has explained them.

        If an optimizer with scaled gradients never stepped, its weights may have been changed by hand.
        """
        if self.fitting and log.num_lost and not any(s.cause is not None for s in log.subscriptions):
            _messages.info(
                f"lightning_amp: {counted(log.num_lost, 'optimizer step')} of this fit changed nothing,"
                " because the loss or a gradient was not finite; steps that lowered the loss scale do not count. Attach"
                " `OverflowLocator()`: it names the layer, or the data, and what helps."
            )
        if self.fitting and not self._automatic and by_hand:
            _messages.info(
                "lightning_amp: an optimizer never stepped. The gradients of `manual_backward` are multiplied with the"
                " loss scale until `optimizer.step()` or `lightning_amp.precision.unscale_`: call one of them before"
                " you change weights by hand. Use no `GradScaler` of your own."
            )

    def detach(self) -> None:
        """Restore the user's objects."""
        self._undo.close()
