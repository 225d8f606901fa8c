"""`AmpPrecision`: mixed precision in which only rounding, speed and memory differ from fp32.

One optimizer step, for every precision and for automatic and manual optimization:

    training_step                    under autocast; automatic: the closure; manual: user code, closures included
    on_before_backward               gets the loss that `training_step` returned
    scale the loss                   gradients that are still there from before are carried to the same scale
    backward                         autocast off
    on_after_backward                gradients are still scaled here
    unscale, once                    or when `clip_gradients` or `unscale_` asks for true gradients before
    check finite                     one flag per optimizer, on the device
    on_before_optimizer_step         callbacks, then module: true gradients, fused optimizers included
    check again                      where a hook, or the user's own clipping, may have changed them
    clip                             `configure_gradient_clipping`
    step or skip                     `optimizer.step` runs with a closure that did all of the above, as in fp32
    record                           references to the device's scalars, read back in blocks
    [end of batch] update the scale  once, for all; sooner, but only downwards, where many steps of a batch overflow

Where nobody looks in between and the optimizer is fused, unscale, check, clip and step touch each gradient twice
instead of four times; the result is the same within rounding (`scaling/_steps.py`).
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.loops.optimization.automatic import Closure
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_amp._arguments import require_bool
from lightning_amp._compat import _lightning, _modules, _torch
from lightning_amp._last_trainer import LastTrainer
from lightning_amp.casting import Choice, Precision, ReusedWeights, checked_module_rules, parse_precision
from lightning_amp.precision import _checkpoint, _first_line, _refusals, _scaler_choice, _strategies
from lightning_amp.precision._anomaly import AnomalyCheck
from lightning_amp.precision._counters import Counters
from lightning_amp.precision._evaluation import Surroundings
from lightning_amp.precision._fold_plan import HookGate
from lightning_amp.precision._forward import ForwardContexts
from lightning_amp.precision._manual import ManualHelpers
from lightning_amp.precision._unseen_steps import UnseenSteps
from lightning_amp.scaling import DerivativeScale, DynamicLossScaler, HalfGradientsError, OptimizerSteps, RecordLog
from lightning_amp.skipped_steps import FitGuards, Place, checked_buffer_rules, matching_places


class AmpPrecision(ManualHelpers, ForwardContexts, Counters):
    r"""Precision plugin: autocast and loss scaling that change rounding, speed and memory, and nothing else.

    .. code-block:: python

        trainer = L.Trainer(plugins=[AmpPrecision("fp16")])

    It is a `lightning.pytorch.plugins.MixedPrecision` that owns the whole optimizer step; the order of events is
    written at the top of `lightning_amp/precision/_amp.py`. A skipped step did not happen: neither for the parameters
    and the optimizer, nor for the scale's growth, and :attr:`num_steps` does not count it.

    Args:
        precision: `"auto"`, `"bf16"`, `"fp16"` or `"fp32"`, or what you have in your hands: `"bf16-mixed"`,
            `"16-mixed"`, `"32-true"`, `16`, `32`, `torch.bfloat16`, `torch.float16`, `torch.float32`, and these as
            strings. `"fp32"` runs the same pipeline without autocast: one word turns mixed precision off. `"auto"`
            picks by the device and says in one log line what and why. A precision that the device cannot run raises
            before the first batch.
        scaler: `None` (dynamic loss scaling for fp16, none otherwise), a :class:`DynamicLossScaler`, any
            `torch.amp.GradScaler`, or a float for a scale that never moves. bf16 and fp32 need none, since their range
            is that of fp32: with `"bf16"` it is an error, with `"auto"` and `"fp32"` it is left unused there (one line
            says so, and :attr:`scaler` is `None`), so that one configuration serves all machines.
        fp32_modules: Rules for modules that compute in fp32, forward and backward, with their floating inputs upcast:
            globs on qualified names (`"decoder.head"`, `"*.norm"`) or module classes. For what half precision breaks:
            positional phases, large logits.
        eval_precision: Validate, test and predict in another precision, any spelling of `precision`. `None`: the same.
        skip_nonfinite: Skip a step with non-finite gradients in bf16 and fp32 too, where no scaler does. 64 in a row
            stop the run. `False` gives plain fp32 behaviour: the NaN reaches the weights.
        restore_buffers: Rules for buffers that a skipped step puts back, beside the statistics of normalisation layers:
            globs on qualified names (`"queue*"`, `"head.centre"`). For what a step writes by itself: queues of keys,
            centres, codebooks, of any dtype, in place or replaced.

    Raises:
        ValueError: For an unknown precision, or a scaler with `"bf16"`; when the Trainer attaches, for a precision
            that the device cannot run, or a rule that matches nothing.
        FloatingPointError: During training, after so many skipped steps in a row that the run is stuck.

    Cost: no synchronisation is added. An optimizer that is not fused costs one read of the flag per step, as in torch.
    Reading :attr:`last_step`, :attr:`num_steps` or :attr:`num_skipped` waits for the device.

    """

    def __init__(
        self,
        precision: str | int | torch.dtype = "auto",
        *,
        scaler: torch.amp.GradScaler | float | None = None,
        fp32_modules: Sequence[type[nn.Module] | str] = (),
        eval_precision: str | int | torch.dtype | None = None,
        skip_nonfinite: bool = True,
        restore_buffers: Sequence[str] = (),
    ) -> None:
        self._requested: Precision = parse_precision(precision)
        self._choice = None if self._requested == "auto" else Choice.of(self._requested)
        self.fp32_modules = checked_module_rules(fp32_modules)
        self._eval_requested: Precision | None = None
        if eval_precision is not None:
            self._eval_requested = parse_precision(eval_precision, "eval_precision")
        self._eval_choice: Choice | None = None  # when the Trainer attaches
        require_bool("skip_nonfinite", skip_nonfinite)
        self.skip_nonfinite = skip_nonfinite
        self.restore_buffers = checked_buffer_rules(restore_buffers)
        self.device = "cuda" if torch.cuda.is_available() else "cpu"  # until the strategy says which
        self.scaler = self._given_scaler = _scaler_choice.checked_scaler(scaler)  # "auto" may use it on another machine
        self._first_scaler_state = None if self.scaler is None else self.scaler.state_dict()
        if self._choice is not None:
            self._settle_scaler()
        self._last_trainer = LastTrainer()
        self._start_run()

    def _settle_scaler(self) -> None:
        assert self._choice is not None
        self.scaler = _scaler_choice.settled_scaler(self._choice.name, self._requested, self._given_scaler, self.scaler)
        if self.scaler is not None:
            self._first_scaler_state = self._first_scaler_state or self.scaler.state_dict()

    def _start_run(self, goes_on: bool = False) -> None:
        limit = self.scaler.max_consecutive_skips if isinstance(self.scaler, DynamicLossScaler) else 64
        before, self._log = self._log if goes_on else None, RecordLog(limit)
        if before is None:
            self._derivatives = DerivativeScale()
        else:
            self._log.restore(before.num_steps, before.num_skipped, list(before.streak), before.last)
        self._steps = OptimizerSteps(self.scaler, self.skip_nonfinite, self._log)
        self._module: LightningModule | None = None
        self._hook_gate: HookGate | None = None
        self._guards: FitGuards | None = None
        self._unseen: UnseenSteps | None = None
        self._named_buffers: list[Place] = []
        self._anomaly: AnomalyCheck | None = None
        self._stepped = False
        self._surroundings = Surroundings()
        self._reused = ReusedWeights()
        self._compiling = _modules.CompiledBackwardWithoutAutocast()

    # -- what the outside reads ----------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._requested!r})"

    def __str__(self) -> str:
        return _refusals.as_text(repr(self))

    def __format__(self, spec: str) -> str:
        """Add which plugin a strategy takes instead, where a strategy refuses this one in its message."""
        frame = inspect.currentframe()
        return format(f"{self!s}{_strategies.hint(self, None if frame is None else frame.f_back)}", spec)

    # -- the Trainer attaches ------------------------------------------------------------------------------------------

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        _strategies.require_trainer(self, module)
        assert isinstance(module, LightningModule)
        self._attach(module)
        return module

    def _attach(self, module: LightningModule) -> None:
        strategy = module.trainer.strategy
        _strategies.check(self, strategy)
        device = strategy.root_device
        self._surroundings.detach()
        self._reused.detach()
        self._training_step = None
        self.device = device.type
        why = ""
        if self._requested == "auto":
            self._choice, why = Choice.pick(device)
            self._settle_scaler()
        assert self._choice is not None
        self._choice.require(device)
        self._eval_choice = Choice.for_evaluation(self._eval_requested, self._choice, device)
        if self.scaler is not None:
            _torch.set_scaler_device(self.scaler, self.device)
        if module.trainer.state.fn == TrainerFn.FITTING:  # a checkpoint is restored later
            goes_on = self._last_trainer.goes_on(module.trainer)
            if not goes_on:
                self._reset_scaler()
            self._start_run(goes_on)
            self._log.describe_skips = self._describe_skips
        mixed = self._choice.mixed or self._eval_choice.mixed
        self._surroundings.attach(module, self.device, self.fp32_modules, mixed=mixed)
        if mixed:
            self._reused.attach(module, self.device, lambda: module.trainer.current_epoch)
        self._module = module
        if module.trainer.state.fn == TrainerFn.FITTING:  # here, since a strategy may wrap what it is given
            _refusals.check(module, self._choice, device, self._surroundings.fp32_modules)
            self._named_buffers = matching_places(module, self.restore_buffers)
        _first_line.say(
            self._choice,
            self._eval_choice,
            self.device,
            why,
            fitting=module.trainer.state.fn == TrainerFn.FITTING,
            scaler=self.scaler,
            scaler_unused=self._given_scaler is not None and self.scaler is None,
            resumed=module.trainer.ckpt_path is not None,
            num_fp32_modules=self._surroundings.num_fp32_modules,
            num_restored_buffers=len(self._named_buffers),
            skips=self._steps.guarded,
        )

    def _reset_scaler(self) -> None:
        if isinstance(self.scaler, DynamicLossScaler):
            self.scaler.reset()
        elif self.scaler is not None and self._first_scaler_state:
            _torch.reset_scale(self.scaler, self._first_scaler_state["scale"])

    @override
    def connect(self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]) -> Any:
        self._steps.attach([_lightning.unwrap_optimizer(o) for o in optimizers])
        module = self._module
        if module is not None and module.trainer.state.fn == TrainerFn.FITTING:
            if module.trainer.world_size > 1 and torch.distributed.is_initialized():
                self._steps.device = module.trainer.strategy.root_device
                self._steps.all_reduce_max = partial(torch.distributed.all_reduce, op=torch.distributed.ReduceOp.MAX)
            self._compiling.start()
            if self._steps.scaler is not None:
                self._unseen = UnseenSteps(module, self._steps)
            if self._steps.guarded:  # the schedulers are not in the strategy yet; `enter_step` finds them
                self._guards = FitGuards(module, self._steps, self._named_buffers)
        return super().connect(model, optimizers, lr_schedulers)

    @override
    def teardown(self) -> None:
        interrupted = self._module is not None and self._module.trainer.interrupted
        try:  # what fails here must not hide the exception that ended the run
            with contextlib.suppress(*([Exception] if interrupted else [])):
                self._steps.finish_batch()
                self._log.flush()
                if not interrupted:
                    self._surroundings.finish()
        finally:
            if self._guards is not None:
                self._guards.detach()
            if self._unseen is not None:
                self._unseen.detach()
            self._surroundings.detach()
            self._reused.detach()
            self._compiling.stop()
            self._module = self._hook_gate = self._guards = self._unseen = self._training_step = None
            self._named_buffers = []
            self._steps.attach([])
            super().teardown()

    # -- forward -------------------------------------------------------------------------------------------------------

    @override
    def enter_train_step(self) -> contextlib.AbstractContextManager[Any]:
        module = self._module
        manual = module is not None and not module.automatic_optimization
        if manual:
            self._steps.finish_batch()  # steps that hooks took since the last batch
        if self._guards is not None:
            self._guards.enter_step(manual)
        return self._surroundings.training(self.forward_context)

    @override
    def leave_train_step(self) -> None:
        if self._guards is not None:
            self._guards.leave_step()
        if self._module is not None and not self._module.automatic_optimization:
            self._steps.finish_batch()

    @override
    def _before_evaluation(self) -> None:
        if self._guards is not None:
            self._guards.settle()

    # -- backward ------------------------------------------------------------------------------------------------------

    @override
    def pre_backward(self, tensor: Tensor, module: LightningModule) -> Tensor:  # type: ignore[override]
        if self._module is None:
            _strategies.require_trainer(self, module)
        with self._autocast_off():
            if self._gate(module).somebody_sees_backward:
                _lightning.run_hook(module, "on_before_backward", tensor)
            if self._guards is not None:
                self._guards.note_backward()
            scaled = self._steps.scale_loss(tensor)
            if self._steps.scaler is not None and torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled():
                self._anomaly = AnomalyCheck(tensor)
            return scaled

    @override
    def backward(  # type: ignore[override]
        self, tensor: Tensor, model: LightningModule, optimizer: Any, *args: Any, **kwargs: Any
    ) -> None:
        anomaly, self._anomaly = self._anomaly, None
        self._steps.begin_backward()
        try:
            with self._autocast_off(), self._reused.inside():
                if anomaly is None:
                    super().backward(tensor, model, optimizer, *args, **kwargs)
                else:
                    with anomaly:
                        super().backward(tensor, model, optimizer, *args, **{**kwargs, "retain_graph": True})
                    anomaly.check(model)
        finally:
            self._steps.backward_scale = None

    @override
    def post_backward(self, tensor: Tensor, module: LightningModule) -> Tensor:  # type: ignore[override]
        if self._gate(module).somebody_sees_backward:
            with self._autocast_off():
                super().post_backward(tensor, module)
        self._reused.forget()
        return tensor.detach()

    def _gate(self, module: LightningModule) -> HookGate:
        if self._hook_gate is None or not self._hook_gate.is_current():
            self._hook_gate = HookGate(self, module)
        return self._hook_gate

    # -- step ----------------------------------------------------------------------------------------------------------

    @override
    def optimizer_step(  # type: ignore[override]
        self, optimizer: Any, model: LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        optimizer = _lightning.unwrap_optimizer(optimizer)
        automatic = model.automatic_optimization
        fold, max_norm = self._gate(model).fold()
        try:
            with self._autocast_off():
                output = self._steps.step(
                    optimizer,
                    # in automatic optimization Lightning's closure enters the forward context around `training_step`
                    closure if automatic else partial(self._in_forward_context, closure),
                    partial(self._look, model, optimizer),
                    fold=fold,
                    max_norm=max_norm,
                    closure_runs_backward=isinstance(closure, Closure),
                    **kwargs,
                )
        except HalfGradientsError as error:
            raise ValueError(f"lightning_amp: {_refusals.half_in_a_step(model) or error}.") from error
        self._reused.forget()
        if not self._stepped and self._settled().mixed:
            _refusals.warn_of_half_in_a_step(model)
        self._stepped = True
        if automatic:
            self._steps.finish_batch()
        return output

    def _look(self, module: LightningModule, optimizer: Optimizer) -> None:
        gate = self._gate(module)
        if gate.somebody_looks:
            _lightning.run_hook(module, "on_before_optimizer_step", optimizer)
            self._steps.check_again(optimizer)
        _lightning.run_clipping(self, module, optimizer)
        if gate.own_clipping:
            self._steps.check_again(optimizer)

    def _in_forward_context(self, closure: Callable[[], Any]) -> Any:
        with self.forward_context():
            return closure()

    def _describe_skips(self) -> str:
        return "" if self._module is None else _refusals.describe_nonfinite_gradients(self._module)

    # -- state ---------------------------------------------------------------------------------------------------------

    @override
    def state_dict(self) -> dict[str, Any]:
        if self._guards is not None:
            self._guards.settle()
        self._steps.finish_batch()
        self._log.flush()
        return _checkpoint.dump(self.scaler, self._log, self._derivatives)

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._load(state_dict, type(self).__qualname__)

    def _load(self, state_dict: dict[str, Any], name: str) -> None:
        path = None if self._module is None else self._module.trainer.ckpt_path
        name = name if path is None else f"{path}: {name}"
        _checkpoint.load(state_dict, self.scaler, self._log, self._derivatives, name)
        if self.scaler is not None:
            self._steps.first_scale = self.scaler.get_scale()

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.scaler is not None:
            checkpoint[_checkpoint.STOCK_KEY] = self.scaler.state_dict()
        if self._guards is not None:
            self._guards.buffers.mend(checkpoint["state_dict"])

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self._reset_scaler()  # what it does not know starts afresh, also where an earlier fit left something
        self._log.restore(0, 0, [], None)
        self._derivatives = DerivativeScale()
        self._steps.first_scale = 1.0 if self.scaler is None else self.scaler.get_scale()
        if type(self).__qualname__ not in checkpoint:  # else Lightning itself calls `load_state_dict`
            key = _checkpoint.find(checkpoint)
            if key is not None:
                self._load(checkpoint[key], key)

    def __getstate__(self) -> dict[str, Any]:
        """What a pickle or a deep copy takes along: the settings and the scaler, not the run."""
        run = {
            "_log",
            "_derivatives",
            "_steps",
            "_module",
            "_hook_gate",
            "_guards",
            "_unseen",
            "_anomaly",
            "_compiling",
        }
        run |= {"_surroundings", "_reused", "_training_step", "_named_buffers"}
        return {k: v for k, v in vars(self).items() if k not in run}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._start_run()
