"""`AmpPrecision`: mixed precision in which only rounding, speed and memory differ from fp32.

One optimizer step, for every precision, in automatic and manual optimization. `docs/design.md` has the
whole list, which a test compares with recorded steps:

    scale the loss -> backward (autocast off) -> unscale once -> check finite -> on_before_optimizer_step hooks
      -> clip -> step or skip -> record -> [end of batch] update the scale once, for all optimizers

This file translates the hooks of Lightning. `_settings.py` chooses precision and scaler. `_run.py` owns a run: its
backwards and steps, and the undos at its end. `_forward.py` makes the contexts of steps, `scaling/_steps.py` steps, and
`scaling/_log.py` keeps the records. Without a running Trainer, the plugin only provides autocast.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial, partialmethod
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_amp import _messages
from lightning_amp._arguments import require_bool
from lightning_amp._compat import _names
from lightning_amp._compat._names import GradClipAlgorithmType, LightningModule, MixedPrecision, Precision, TrainerFn
from lightning_amp._compat._torch import autocast_off, unwrap_optimizer
from lightning_amp._last_trainer import LastTrainer
from lightning_amp.casting import Choice
from lightning_amp.precision import _clipping, _refusals, _upcast_parameters
from lightning_amp.precision._first_line import first_line, precision_on, resumed
from lightning_amp.precision._forward import autocast
from lightning_amp.precision._run import Run
from lightning_amp.precision._settings import PluginArguments
from lightning_amp.scaling import DerivativeScale, OptimizerSteps, RecordLog, Saved, StepCounts, load_state

STOCK_KEY, STOCK_FSDP_KEY = "MixedPrecision", "FSDPPrecision"
"""The entries of a checkpoint in which stock Lightning keeps its scaler, for the two kinds of strategies.

Our scaler is saved there too, so that a run can continue in stock Lightning.
"""

_KEYS = ("AmpPrecision", "FSDPAmpPrecision", STOCK_KEY, STOCK_FSDP_KEY, "native_amp_scaling_state")
"""All entries that may hold a scaler's state; the first one that is there counts."""

_DERIVATIVES = "derivative_scale"  # saved only if the run has used it


class AmpPrecision(PluginArguments, StepCounts, MixedPrecision):  # type: ignore[misc]
    r"""Precision plugin: autocast and loss scaling that change rounding, speed and memory, and nothing else.

    .. code-block:: python

        trainer = L.Trainer(plugins=[AmpPrecision("fp16")])

    It is a `lightning.pytorch.plugins.MixedPrecision` that owns the whole optimizer step. When a step is skipped,
    parameters, optimizer state, LR schedules and the growth of the scale do not advance, nor does :attr:`num_steps`.

    Args:
        precision: `"auto"`, `"bf16"`, `"fp16"`, `"fp8"` or `"fp32"`, or another common spelling: `"bf16-mixed"`,
            `"16-mixed"`, `"32-true"`, `16`, `32`, `torch.bfloat16`, `torch.float16`, `torch.float32`, and these as
            strings. `"fp32"` runs the same pipeline without autocast. `"auto"` picks by the device, the same on each
            start, and logs its choice and reason in one line. On a CPU it is `"bf16"` with AMX, with AVX512-BF16 of
            AMD, or with the bf16 instructions of Arm, else `"fp32"`. A precision that the device cannot run raises
            before the first batch.
        scaler: `None` (dynamic loss scaling for fp16, none otherwise), a :class:`DynamicLossScaler`, a
            `torch.amp.GradScaler`, whose settings are taken, or a float for a static scale. The range of bf16 is that
            of fp32, so it needs none. With `"bf16"` one is an error. With `"auto"` and `"fp32"`
            an unneeded one is left unused (one line says so, and `scaler` is `None`), so that one configuration serves
            all machines.
        fp32_modules: Rules for modules that compute in fp32, forward and backward, with their floating inputs upcast:
            globs on qualified names (`"decoder.head"`, `"*.norm"`) or module classes. Use it for computations that half
            precision breaks, such as positional phases and large logits.
        eval_precision: Validate, test and predict in another precision, any spelling of `precision`. `None`: the same.
        skip_nonfinite: Skip a step with non-finite gradients in bf16 and fp32 too, where no scaler does. 64 skips in a
            row stop the run. `False` gives plain fp32 behaviour: the NaN reaches the weights.
        restore_buffers: Rules for buffers that a skipped step restores, besides the statistics of normalisation layers:
            globs on qualified names (`"queue*"`, `"head.centre"`). Use it for buffers that a step writes itself, such
            as queues of keys, centres and codebooks. They may have any dtype, and be edited or replaced.
        upcast_parameters: Make trainable parameters that are fp16 or bf16 when a fit begins (a model loaded in
            bfloat16) float32, permanently, before optimizers exist; in `"fp32"` too. Half-precision buffers of their
            modules too; frozen parameters stay. `False`: such parameters are an error, except in `"fp32"`.
        fp8_recipe: For `"fp8"` only: how values are scaled before they are rounded to 8 bits. `None` is
            `"rowwise_with_gw_hp"`, the most accurate; `"rowwise"`, `"tensorwise"` (the fastest), or a
            `torchao.float8.Float8LinearConfig`, with `emulate=True` for a device without fp8.

    Raises:
        ValueError: For an unknown precision, a scaler with `"bf16"` or `"fp8"`, or a scaler with an `update` of its
            own. When the Trainer attaches, for a precision that the device cannot run, a rule that matches nothing, or
            if no layer qualifies for fp8.
        ImportError: When the Trainer attaches, if fp8 is requested without torchao 0.18 or later.
        FloatingPointError: During training, if the run is stuck: 64 steps in a row were skipped, and none of these
            skips has lowered the loss scale.
        RuntimeError: During training, for an optimizer step on scaled gradients past the plugin.

    Cost: a fused optimizer does not wait for the device. Any other optimizer reads the flag once per step: in fp16 as
    in torch, in bf16 and fp32 unless `skip_nonfinite=False`. Reading :attr:`last_step`, :attr:`num_steps` or
    :attr:`num_skipped` waits for the device.

    """

    _run: Run | None = None

    def __init__(
        self,
        precision: str | int | torch.dtype = "auto",
        *,
        scaler: torch.amp.GradScaler | float | None = None,
        fp32_modules: Sequence[type[nn.Module] | str] = (),
        eval_precision: str | int | torch.dtype | None = None,
        skip_nonfinite: bool = True,
        restore_buffers: Sequence[str] = (),
        upcast_parameters: bool = False,
        fp8_recipe: Any = None,  # not typed: a LightningCLI would import torchao to resolve the class
    ) -> None:
        self._take(precision, eval_precision, scaler, fp32_modules, skip_nonfinite, restore_buffers, fp8_recipe)
        require_bool("upcast_parameters", upcast_parameters)
        self.upcast_parameters = upcast_parameters
        self._fp8_layers: dict[str, str | None] = {}
        self._choice, self.scaler = self._until_attached()
        self._start_afresh()

    def _start_afresh(self) -> None:
        self._last_trainer = LastTrainer()
        self._derivatives = DerivativeScale()
        self.records = RecordLog(describe_skips=self._describe_skips)  # callbacks subscribe to it

    def _describe_skips(self) -> str:
        return "" if self._run is None else _refusals.describe_nonfinite_gradients(self._run.module)

    def __str__(self) -> str:
        """Return the plugin as text. For a Trainer of the other kind of Lightning, which refuses it, raise an error."""
        _names.require_kind_of_caller(self)
        return repr(self)

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of autocast, `torch.bfloat16` for `"fp8"` too, `torch.float32` for `"fp32"`."""
        return self._settled().dtype

    def flush(self) -> None:
        """Complete the steps since the last batch, wait for the device, and hand all records to the subscribers."""
        if self._steps is not None:
            self._steps.end_round()
        self.records.flush()

    @property
    def _steps(self) -> OptimizerSteps | None:
        return None if self._run is None else self._run.steps

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        _refusals.require_trainer(self, module)
        assert isinstance(module, LightningModule)
        trainer = module.trainer
        _refusals.require_strategy(self, trainer.strategy)
        self._detach_run()
        device = trainer.strategy.root_device
        self.device = device.type
        fitting = trainer.state.fn == TrainerFn.FITTING
        training, evaluation, why = self._choose(device, fitting=fitting)
        self._choice, self.scaler = training, self._scaler_for(training, self.device)
        if fitting:
            self._begin_log(self._last_trainer.goes_on(trainer), training.name)
            if self.upcast_parameters:  # before `fp32_modules`, because these refuse half-precision parameters
                _upcast_parameters.upcast(module)
        own_norm = not _clipping.is_default(self, "clip_grad_by_norm", AmpPrecision)
        self._run = run = Run(self, module, training, evaluation, own_norm)
        run.check()
        if run.fp8 is not None:
            self._fp8_layers = run.fp8.layers
        if fitting:
            fp8, resumes = [] if run.fp8 is None else run.fp8.summaries, trainer.ckpt_path is not None
            _messages.info(first_line(self, [run.forward], why, fp8, resumes=resumes))
        elif why:
            _messages.info(f"lightning_amp: {precision_on(training, self.device, why)}.")
        return module

    def _begin_log(self, goes_on: bool, precision: str) -> None:
        """Begin the records of a fit. A second fit of the same Trainer continues the counts of the first."""
        before, self.records = self.records, RecordLog(describe_skips=self._describe_skips)
        self.records.go_on_in(precision, 64 if self.scaler is None else self.scaler.max_consecutive_skips)
        if goes_on:
            self.records.restore(before.num_steps, before.num_skipped, before.streak, before.last)
            return
        self._derivatives = DerivativeScale()
        if self.scaler is not None:
            self.scaler.reset()

    @override
    def connect(self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]) -> Any:
        if self._run is not None:
            self._run.connect([unwrap_optimizer(optimizer) for optimizer in optimizers])
        return super().connect(model, optimizers, lr_schedulers)

    @override
    def autocast_context_manager(self) -> torch.autocast:
        choice = self._settled() if self._run is None else self._run.forward.choice
        return autocast(choice, self.device)

    @override
    def forward_context(self) -> AbstractContextManager[Any]:  # type: ignore[override]
        return self.autocast_context_manager()

    def forward_context_of(self, precision: str) -> AbstractContextManager[Any]:
        """Return the forward context of a training step, to run it again in this precision, or in the present one."""
        if self._run is None or precision in ("", self._run.forward.training.name):
            return self.forward_context()
        return autocast(Choice.of(precision), self.device)

    @override
    def train_step_context(self) -> AbstractContextManager[None]:  # type: ignore[override]
        run = self._run
        return self.forward_context() if run is None else run.forward.training_step(run)

    def evaluation_context(self, module: nn.Module | None, step: str | None = None) -> AbstractContextManager[None]:
        """Return the context of an evaluation step: autocast in its precision, with metrics and outputs in fp32.

        `step` is its name; `None` for a hook. `module` is a shadow to treat like the attached module.
        """
        run = self._run
        if run is None:
            return self.forward_context()
        if run.steps is not None:
            run.protection.settle(in_window=True)
        return run.forward.evaluation_step(run.module if module is None else module, step)

    val_step_context = partialmethod(evaluation_context, None, "validation_step")  # type: ignore[assignment]
    test_step_context = partialmethod(evaluation_context, None, "test_step")  # type: ignore[assignment]
    predict_step_context = partialmethod(evaluation_context, None, "predict_step")  # type: ignore[assignment]

    def fp8_on(self, module: nn.Module, precision: str = "") -> AbstractContextManager[None]:
        """Return a context in which a copy of the module multiplies in fp8, if training steps of this precision do."""
        run = self._run
        if run is None or run.fp8 is None or (precision or run.forward.training.name) != "fp8":
            return nullcontext()
        return run.fp8.on(module)

    def scaled_grad(self, outputs: Any, inputs: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Differentiate as `torch.autograd.grad`, without losing small gradients to zero in fp16.

        For gradient penalties: call it inside `training_step` with `create_graph=True`. It returns true gradients, in
        float32 where they would be half precision. They have a scale of their own, which adapts by itself
        (:class:`~lightning_amp.scaling.DerivativeScale`). If it is too large, the loss is infinite, the step is
        skipped, and the scale falls to a quarter. Without loss scaling this is `torch.autograd.grad`.
        :func:`lightning_amp.precision.scaled_grad` does the same under any plugin. With `learn=False`, for a step that
        runs again, the scale stays.
        """
        with autocast_off(self.device):
            return self._derivatives.grad(self.scaler, outputs, inputs, **kwargs)

    # -- backward and step ---------------------------------------------------------------------------------------------

    @override
    def pre_backward(self, tensor: Tensor, module: LightningModule) -> Tensor:  # type: ignore[override]
        run, steps = self._run, self._steps
        # in an evaluation, or after the run, nothing would divide by the scale
        if run is None or steps is None or run.forward.evaluating:
            _refusals.require_trainer(self, module)
            return Precision.pre_backward(self, tensor, module)
        with autocast_off(self.device):
            return run.scale(steps, tensor)

    @override
    def backward(  # type: ignore[override]
        self, tensor: Tensor, model: LightningModule, optimizer: Any, *args: Any, **kwargs: Any
    ) -> None:
        backward = partial(super().backward, tensor, model, optimizer, *args, **kwargs)
        with autocast_off(self.device):
            return backward() if self._run is None else self._run.backward(backward)

    @override
    def post_backward(self, tensor: Tensor, module: LightningModule) -> Tensor:  # type: ignore[override]
        run = self._run
        if run is None or run.steps is None or run.fold_plan.current().somebody_sees_backward:
            with autocast_off(self.device):
                super().post_backward(tensor, module)
        return tensor.detach()

    def unscale_(self, optimizer: Any) -> None:
        """Unscale the gradients of `optimizer`, for a manual training loop that reads or clips them itself.

        A second call in the same step changes nothing. Without loss scaling it only checks them. If they are not
        finite, the next step is skipped, even if you replace these values afterwards; replace them before. A later
        backward scales the gradients again, so you may go on accumulating.

        Args:
            optimizer: From `self.optimizers()`, or the user's own.

        """
        if self._steps is not None:
            self._steps.unscale_(optimizer)

    @override
    def optimizer_step(  # type: ignore[override]
        self, optimizer: Any, model: LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        run, steps = self._run, self._steps
        with autocast_off(self.device):
            if run is None or steps is None:  # gradients are not scaled and steps not counted
                return Precision.optimizer_step(self, optimizer, model, closure, **kwargs)
            return run.step(steps, unwrap_optimizer(optimizer), closure, kwargs)

    @override
    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: int | float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        optimizer = unwrap_optimizer(optimizer)
        if clip_val > 0 and gradient_clip_algorithm == GradClipAlgorithmType.VALUE:
            self.unscale_(optimizer)
            self.clip_grad_by_value(optimizer, clip_val)
            return
        if self._steps is not None:  # no check here: the step finds the NaN gradients that a non-finite norm causes
            self._steps.unscale(self._steps.state(optimizer))
        if clip_val > 0:
            self.clip_grad_by_norm(optimizer, clip_val)

    @override
    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        _clipping.clip_by_norm(self.main_params(optimizer), clip_val)

    @override
    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        _clipping.clip_by_value(self.main_params(optimizer), clip_val)

    # -- checkpoints, copies, the end ----------------------------------------------------------------------------------

    @override
    def state_dict(self) -> dict[str, Any]:
        if self._run is not None and self._run.steps is not None:
            self._run.protection.settle(in_window=True)  # the entries of the module are its buffers
        self.flush()
        derivatives = self._derivatives.state()
        return self._state() | ({} if derivatives is None else {_DERIVATIVES: derivatives})

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self._run is None or self._run.fitting:
            self._load(state_dict, type(self).__qualname__)

    def _load(self, state_dict: dict[str, Any], name: str) -> None:
        path = None if self._run is None else self._run.module.trainer.ckpt_path
        saved = Saved(state_dict, name if path is None else f"{path}: {name}")
        if _DERIVATIVES in saved:  # loaded first, because it may be refused
            self._derivatives.load(saved, _DERIVATIVES)
        _messages.info(*load_state(saved, self.scaler, self.records))
        _messages.info(*resumed(state_dict, self._settled().name, self.scaler))
        if self._steps is not None:
            self._steps.begin_anew()

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.scaler is not None:
            checkpoint[STOCK_KEY] = self.scaler.state_dict()

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self._run is not None and not self._run.fitting:
            return  # `test` or `validate` of a checkpoint
        # state that the checkpoint lacks is reset, even if an earlier fit has left some
        if self.scaler is not None:
            self.scaler.reset()
        self.records.restore(0, 0, (), None)
        self._derivatives = DerivativeScale()
        if self._steps is not None:
            self._steps.begin_anew()
        key = next((key for key in _KEYS if checkpoint.get(key)), None)
        if key is not None and type(self).__qualname__ not in checkpoint:
            self._load(checkpoint[key], key)  # otherwise Lightning itself calls `load_state_dict`

    def __getstate__(self) -> dict[str, Any]:
        """Return the settings and the scaler for a pickle or a deep copy, without the run."""
        left_out = ("records", "_run", "_last_trainer", "_derivatives")
        return {name: value for name, value in vars(self).items() if name not in left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._start_afresh()

    @override
    def teardown(self) -> None:
        try:
            if self._run is not None:
                self._run.finish()
        finally:
            self._detach_run()
            super().teardown()

    def _detach_run(self) -> None:
        """End the run, and leave the user's objects as they were."""
        run, self._run = self._run, None
        if run is not None:
            run.detach()
