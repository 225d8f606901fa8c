"""`AmpPrecision`: mixed precision in which only rounding, speed and memory differ from fp32.

`_events.py` lists what happens in a step, in order; here each hook of Lightning is translated, one line each.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_amp._arguments import require_bool
from lightning_amp._compat import _lightning, _torch
from lightning_amp.casting import Canonical, Choice, checked_module_rules
from lightning_amp.findings import StepRecord
from lightning_amp.precision import _first_line, _refusals, _upcast_parameters
from lightning_amp.precision._fallback import Fallback, FallsBack
from lightning_amp.precision._fold_plan import is_default
from lightning_amp.precision._ledger import STOCK_KEY, Ledger, find_entry
from lightning_amp.precision._run import Run
from lightning_amp.precision._settings import Settings
from lightning_amp.scaling import RecordLog, Saved
from lightning_amp.skipped_steps import checked_buffer_rules


class AmpPrecision(FallsBack):
    r"""Precision plugin: autocast and loss scaling that change rounding, speed and memory, and nothing else.

    .. code-block:: python

        trainer = L.Trainer(plugins=[AmpPrecision("fp16")])

    It is a `lightning.pytorch.plugins.MixedPrecision` that owns the whole optimizer step; the order of events is
    `EVENTS` of `lightning_amp/precision/_events.py`. A skipped step did not happen: neither for the parameters
    and the optimizer, nor for the scale's growth, and :attr:`num_steps` does not count it.

    Args:
        precision: `"auto"`, `"bf16"`, `"fp16"`, `"fp8"` or `"fp32"`, or what you have in your hands: `"bf16-mixed"`,
            `"16-mixed"`, `"32-true"`, `16`, `32`, `torch.bfloat16`, `torch.float16`, `torch.float32`, and these as
            strings. `"fp32"` runs the same pipeline without autocast: one word turns mixed precision off. `"auto"`
            picks by the device and says in one log line what and why. On a CPU with bfloat16 instructions it measures
            for 0.2 s at most, once per process, and picks `"fp32"` only if bf16 is clearly slower. A resumed run stays
            in the precision of its checkpoint. A precision that the device cannot run raises before the first batch.
        scaler: `None` (dynamic loss scaling for fp16, none otherwise), a :class:`DynamicLossScaler`, any
            `torch.amp.GradScaler`, or a float for a scale that never moves. bf16 and fp32 need none, since their range
            is that of fp32: with `"bf16"` it is an error, with `"auto"` and `"fp32"` it is left unused there (one line
            says so, and `scaler` is `None`), so that one configuration serves all machines.
        fp32_modules: Rules for modules that compute in fp32, forward and backward, with their floating inputs upcast:
            globs on qualified names (`"decoder.head"`, `"*.norm"`) or module classes. For what half precision breaks:
            positional phases, large logits.
        eval_precision: Validate, test and predict in another precision, any spelling of `precision`. `None`: the same.
        skip_nonfinite: Skip a step with non-finite gradients in bf16 and fp32 too, where no scaler does. 64 in a row
            stop the run. `False` gives plain fp32 behaviour: the NaN reaches the weights.
        restore_buffers: Rules for buffers that a skipped step puts back, beside the statistics of normalisation layers:
            globs on qualified names (`"queue*"`, `"head.centre"`). For what a step writes by itself: queues of keys,
            centres, codebooks, of any dtype, in place or replaced.
        upcast_parameters: Make trainable parameters that are fp16 or bf16 when a fit begins (a model loaded in
            bfloat16) float32, for good, before optimizers exist; the same in `"fp32"`. Half-precision buffers beside
            them become float32 too, frozen parameters stay. `False`: they are an error, but in `"fp32"`.
        fp8_recipe: For `"fp8"` only: how values are scaled before they are rounded to 8 bits. `None` is
            `"rowwise_with_gw_hp"`, the most accurate; `"rowwise"`, `"tensorwise"` (the fastest), or a
            `torchao.float8.Float8LinearConfig`, with `emulate=True` for a device without fp8.
        fallback: Precisions to go on in, in order, when the run is stuck: `["bf16", "fp32"]`. After so many skips in a
            row, at least half of them because of gradients, the next batch is in the next one, which a warning says.
            The loss scale ends there, and the count starts at 0. A checkpoint resumes in its own precision, another
            Trainer starts in `precision`. With `"auto"`, what stands before the one that was picked is passed over.

    Raises:
        ValueError: For an unknown precision, a scaler with `"bf16"` or `"fp8"`, a `fallback` that cannot help; when the
            Trainer attaches, for a precision that the device cannot run, a rule that matches nothing, or if no layer
            qualifies for fp8.
        ImportError: When the Trainer attaches, if fp8 lacks a torchao of 0.18 or later.
        FloatingPointError: During training, after so many skipped steps in a row that the run is stuck.

    Cost: a fused optimizer does not wait for the device. One that is not reads the flag once per step: in fp16 as in
    torch, in bf16 and fp32 unless `skip_nonfinite=False`. Reading :attr:`last_step`, :attr:`num_steps` or
    :attr:`num_skipped` waits for the device.

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
        upcast_parameters: bool = False,
        fp8_recipe: Any = None,  # a name, or of a class that is torchao's, which a LightningCLI would import to see it
        fallback: Sequence[str | int | torch.dtype] = (),
    ) -> None:
        self._settings = Settings(precision, eval_precision, scaler, fp8_recipe)
        self._fallback = Fallback(fallback, self._settings.requested)
        self.fp8_recipe = self._settings.fp8_recipe
        self._fp8_layers: dict[str, str | None] = {}
        self.fp32_modules = checked_module_rules(fp32_modules)
        require_bool("skip_nonfinite", skip_nonfinite)
        self.skip_nonfinite = skip_nonfinite
        self.restore_buffers = checked_buffer_rules(restore_buffers)
        require_bool("upcast_parameters", upcast_parameters)
        self.upcast_parameters = upcast_parameters
        self.device = (torch.accelerator.current_accelerator(True) or torch.device("cpu")).type  # for now
        self.scaler = self._settings.given_scaler
        self._choice: Choice | None = None
        if self._settings.requested != "auto":
            self._choice = Choice.of(self._settings.requested)
            self.scaler = self._settings.scaler(self._choice.name)
        self._forget()

    def _forget(self) -> None:
        """Have the settings alone, as before the first fit."""
        self._ledger = Ledger(self._skip_limit, self._describe_skips, offers_fallback=self._offers_fallback)
        self._run: Run | None = None
        self._why_stuck = ""

    # -- what the outside reads ----------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._settings.requested!r})"

    def __str__(self) -> str:
        return _refusals.as_text(repr(self))

    def __format__(self, spec: str) -> str:
        """Add which plugin a strategy takes instead, where a strategy refuses this one in its message."""
        frame = inspect.currentframe()
        return format(f"{self!s}{_refusals.hint(self, None if frame is None else frame.f_back)}", spec)

    @property
    @override
    def precision(self) -> Canonical:  # type: ignore[override]
        """Return Lightning's name: `"16-mixed"`, `"bf16-mixed"` (for `"fp8"` too) or `"32-true"`."""
        return self._settled().canonical

    @property
    def dtype(self) -> torch.dtype:
        """Return what autocast computes in: `torch.bfloat16` for `"fp8"` too, `torch.float32` for `"fp32"`."""
        return self._settled().dtype

    @override
    def _settled(self) -> Choice:
        # "auto" before a Trainer attached: by the instructions of the device that Lightning chooses by default. Nothing
        # is measured before a process is the one that trains: the threads of a measurement do not survive a fork.
        return self._choice or Choice.by_instructions(torch.device(self.device))[0]

    @property
    def fp8_layers(self) -> Mapping[str, str | None]:
        """Return each `nn.Linear` by its qualified name: `None` if it ran in fp8 in the last fit, else why not."""
        return dict(self._fp8_layers)

    @property
    def last_step(self) -> StepRecord | None:
        """Return the last attempted optimizer step. Waits for the device."""
        return self._so_far()[2]

    @property
    def num_steps(self) -> int:
        """Count optimizer steps that were applied in this run: in all fits of one Trainer. Waits for the device."""
        return self._so_far()[0]

    @property
    def num_skipped(self) -> int:
        """Count optimizer steps that were skipped in this run: in all fits of one Trainer. Waits for the device."""
        return self._so_far()[1]

    def _so_far(self) -> tuple[int, int, StepRecord | None]:
        scaler = self._active_scaler
        return self._ledger.log.so_far(None if scaler is None else _torch.scale_tensor(scaler))

    @property
    def records(self) -> RecordLog:
        """Return the log that callbacks subscribe to."""
        return self._ledger.log

    @override
    def flush(self) -> None:
        """Close what was stepped since the last batch, and hand all records to who subscribed. Waits for the device."""
        if self._fit is not None:
            self._fit.steps.finish_batch()
        self._ledger.log.flush()

    # -- gradients inside of the loss ----------------------------------------------------------------------------------

    def scaled_grad(self, outputs: Any, inputs: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Differentiate as `torch.autograd.grad`, but so that small gradients do not become zero in fp16.

        For gradient penalties: call it inside `training_step` with `create_graph=True`; what comes back are true
        gradients, in float32 where they would be half precision. The scale is not that of the loss, and adapts by
        itself (:class:`~lightning_amp.scaling.DerivativeScale`): if it was too large the loss is infinite, the step is
        skipped, and the next one has a quarter of it. Without loss scaling this is `torch.autograd.grad`.
        :func:`lightning_amp.precision.scaled_grad`, with the same arguments, does not depend on this plugin.

        Args:
            outputs: Tensor of any shape, or a sequence of them.
            inputs: What to differentiate by.
            kwargs: Go to `torch.autograd.grad`. With `learn=False`, for a step that runs again, the scale stays.

        Returns:
            One gradient per input, of its shape; `None` where `allow_unused`.

        """
        with self._autocast_off():
            return self._ledger.derivatives.grad(self._active_scaler, outputs, inputs, **kwargs)

    @property
    def _active_scaler(self) -> torch.amp.GradScaler | None:
        return self.scaler if self.scaler is not None and self.scaler.is_enabled() else None

    # -- a fit begins and ends -----------------------------------------------------------------------------------------

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        _refusals.require_trainer(self, module)
        assert isinstance(module, LightningModule)
        self._attach(module)
        return module

    def _attach(self, module: LightningModule) -> None:
        trainer = module.trainer
        _refusals.require_strategy(self, trainer.strategy)
        self._detach_run()
        device = trainer.strategy.root_device
        self.device = device.type
        fitting = trainer.state.fn == TrainerFn.FITTING
        start, why = self._settings.choose(device, partial(_pick, module, device), fitting=fitting)
        # a checkpoint is restored later
        goes_on = self._ledger.begin(trainer, self._skip_limit) if fitting else self._ledger.knows(trainer)
        choice = self._fallback.begin(start, device, goes_on=goes_on, fitting=fitting)
        self._set_precision(choice)
        if fitting:
            self._why_stuck = ""
            self._begin_records()
            if not goes_on:
                self._settings.reset(self.scaler)
            if self.upcast_parameters:  # before `fp32_modules`, which refuses
                _upcast_parameters.upcast(module)
        evaluation = self._settings.evaluation(choice, device)
        stays = all(is_default(self, name, AmpPrecision) for name in ("forward_context", "autocast_context_manager"))
        self._run = run = Run(self, module, choice, evaluation, self.fp32_modules, autocast_stays=stays)
        run.check(self.restore_buffers, self.fp8_recipe)
        if run.fp8 is not None:
            self._fp8_layers = run.fp8.layers
        _first_line.say(
            run.forward,
            self.scaler,
            why,
            fitting=run.fitting,
            resumed=trainer.ckpt_path is not None,
            scaler_unused=self._settings.given_scaler is not None and self.scaler is None,
            num_restored_buffers=len(run.named_buffers),
            fallback=self._fallback.said,
            skips=self._active_scaler is not None or self.skip_nonfinite,
            fp8=run.fp8.summary if run.fp8 is not None and run.forward.in_fp8 else "",
        )

    @override
    def connect(self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]) -> Any:
        if self._run is not None:
            self._run.connect(
                [_lightning.unwrap_optimizer(o) for o in optimizers],
                scaler=self.scaler,
                skip_nonfinite=self.skip_nonfinite,
                log=self.records,
                own_norm=not is_default(self, "clip_grad_by_norm", AmpPrecision),
                after_batch=self._fall_back_if_stuck,
            )
        return super().connect(model, optimizers, lr_schedulers)

    def _describe_skips(self) -> str:
        return "" if self._run is None else _refusals.describe_nonfinite_gradients(self._run.module)

    # -- checkpoints and copies ----------------------------------------------------------------------------------------

    @override
    def state_dict(self) -> dict[str, Any]:
        if self._fit is not None:
            self._fit.settle()
        self.flush()
        return {**self._ledger.state(self.scaler), **self._fallback.state()}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._load(state_dict, type(self).__qualname__)

    def _load(self, state_dict: dict[str, Any], name: str) -> None:
        path = None if self._run is None else self._run.module.trainer.ckpt_path
        name = name if path is None else f"{path}: {name}"
        self._resume_precision(Saved(state_dict, name))
        self._ledger.load(state_dict, self.scaler, name)
        if self._fit is not None:
            self._fit.steps.gradients.note_scale()

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.scaler is not None:
            checkpoint[STOCK_KEY] = self.scaler.state_dict()
        if self._fit is not None:
            self._fit.mend(checkpoint["state_dict"])

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        # what it does not know starts afresh, also where an earlier fit left something
        self._restart_precision()
        self._settings.reset(self.scaler)
        self._ledger.clear()
        if self._fit is not None:
            self._fit.steps.gradients.note_scale()
        if type(self).__qualname__ not in checkpoint:  # else Lightning itself calls `load_state_dict`
            key = find_entry(checkpoint)
            if key is not None:
                self._load(checkpoint[key], key)

    def __getstate__(self) -> dict[str, Any]:
        """Take the settings and the scaler along in a pickle or a deep copy, not the run."""
        return {name: value for name, value in vars(self).items() if name not in ("_ledger", "_run")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if self._fallback.reached is not None or self._fallback.resumed is not None:
            self._fallback.forget()
            start = self._settings.requested
            self._choice = None if start == "auto" else Choice.of(start)
            self.scaler = self._settings.scaler("fp16") if start == "fp16" else self._settings.given_scaler
        self._forget()


def _pick(module: LightningModule, device: torch.device) -> tuple[Choice, str]:
    """Return what `"auto"` is, and why. Rank 0 decides for all, since two measurements may differ."""
    strategy = module.trainer.strategy
    picked = Choice.pick(device, module) if strategy.is_global_zero else None
    return strategy.broadcast(picked) or Choice.pick(device, module)
