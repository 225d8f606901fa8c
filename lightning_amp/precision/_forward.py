"""Make the contexts that steps run in: autocast, fp32 modules, metrics and outputs, shared weights, fp8 layers."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import WarningCache
from torch import Tensor, nn
from typing_extensions import final

from lightning_amp._containers import tensors_in, to_fp32
from lightning_amp.casting import (
    Choice,
    EpochEnd,
    Fp32Modules,
    Fp32Outputs,
    Overrides,
    ReusedWeights,
    Rule,
    metrics_in_fp32,
)
from lightning_amp.precision import _error_notes
from lightning_amp.precision._unused_rules import report_idle

_NOTHING = contextlib.nullcontext()
_EPOCH_ENDS = {
    "training_step": "on_train_epoch_end",
    "validation_step": "on_validation_epoch_end",
    "test_step": "on_test_epoch_end",
    "predict_step": "on_predict_epoch_end",
}
_said = WarningCache()


@final
class ForwardContexts:
    """The contexts of one attached module, until :meth:`detach`.

    Between two steps of an epoch it leaves nothing on the module, except fp32 modules and the next epoch-end hook.

    Args:
        module: The user's.
        device_type: The device whose autocast to use.
        training: Precision of training steps.
        evaluation: Precision of validation, test and prediction.
        rules: Rules for modules that compute in fp32. A rule that matches nothing raises a `ValueError`.
        autocast: Makes the plugin's forward context.
        autocast_stays: Whether that context is the same in each step, so that one can be reused.

    """

    def __init__(
        self,
        module: LightningModule,
        device_type: str,
        training: Choice,
        evaluation: Choice,
        rules: Sequence[Rule],
        autocast: Callable[[], contextlib.AbstractContextManager[Any]],
        *,
        autocast_stays: bool,
    ) -> None:
        self.training, self.evaluation = training, evaluation
        self.autocast, self.autocast_stays = autocast, autocast_stays
        self.evaluating = False
        self.fp8_layers: contextlib.AbstractContextManager[None] = _NOTHING
        self._module, self.device_type = module, device_type
        self._rules = rules
        self._prepare()
        self._fp32_metrics = metrics_in_fp32(module, device_type)
        # contexts of shadows, the copies of the module that a callback validates
        self._shadows: WeakKeyDictionary[nn.Module, Overrides] = WeakKeyDictionary()
        self._step: str | None = None  # the kind of the step that ran last
        self._epoch_ends: dict[str, EpochEnd] = {}
        self._training_step: _TrainingStep | None = None
        self._float64_entries: list[str] = []  # entries of the latest batch, if they are not cast

    def _prepare(self) -> None:
        self.fp32_modules = Fp32Modules(self._module, self._rules, self.device_type, active=self._mixed)
        self.reused_weights = ReusedWeights(self._module, self.device_type) if self._mixed else _NOTHING

    @property
    def _mixed(self) -> bool:
        return self.training.mixed or self.evaluation.mixed

    def change(self, training: Choice, evaluation: Choice) -> None:
        """Continue in other precisions, between two steps.

        If everything is fp32 from now on, the overrides of fp32 modules stay, because they have no effect.
        """
        was_mixed = self._mixed
        self.training, self.evaluation = training, evaluation
        if self._training_step is not None:
            self._training_step.forget_autocast()
        if self._mixed and not was_mixed:
            self.fp32_modules.remove()
            self._prepare()

    @contextlib.contextmanager
    def pretending(self, training: Choice) -> Generator[None, None, None]:
        """Make the contexts of a training step in another precision, for a step that runs again."""
        before, self.training = self.training, training
        try:
            yield
        finally:
            self.training = before

    @property
    def choice(self) -> Choice:
        """Return the precision of the step that runs now."""
        return self.evaluation if self.evaluating else self.training

    @property
    def in_fp8(self) -> bool:
        """Return whether the fp8 layers should multiply in fp8 now."""
        return not self.evaluating and self.training.name == "fp8"

    def finish(self) -> None:
        """Warn at the end of a fit of rules that had no effect."""
        if self._training_step is not None:
            report_idle(self.fp32_modules)

    def detach(self) -> None:
        """Restore the module."""
        for hook in self._epoch_ends.values():
            hook.restore()
        self.fp32_modules.remove()
        self._epoch_ends = {}

    # -- batches -------------------------------------------------------------------------------------------------------

    def convert_input(self, data: Any) -> Any:
        """Cast float64 tensors of a batch to float32. Autocast does not, and no layer accepts a mixture of both.

        So a loader that works in training also works in evaluation, even in fp32.
        """
        self._float64_entries = []
        if _has_no_float64(data):
            return data
        if self.training.mixed or (self.evaluation.mixed and not self._module.trainer.training):
            return _downcast(data, self._module)
        self._float64_entries = [path for path, tensor in tensors_in(data) if tensor.dtype == torch.float64]
        return data

    def explain(self, error: BaseException | None) -> None:
        """Annotate an error of a step; in fp32, raise a `RuntimeError` that names the float64 entries of the batch."""
        if error is not None:
            self.annotate(error, f"`{self._step}`" if self._step else "a hook")
        if not self._float64_entries or not isinstance(error, RuntimeError) or "double" not in str(error).lower():
            return
        if not any(p.dtype == torch.float64 for p in self._module.parameters()):
            entries = ", ".join(f"`batch{path}`" for path in self._float64_entries[:3])
            raise RuntimeError(
                f"lightning_amp: {entries} {'is' if len(self._float64_entries) == 1 else 'are'} float64, and the module"
                f" is float32 ({error}). Make the dataset return float32 (NumPy's default is float64), or call"
                " `.double()` on the module. With precision 'bf16' or 'fp16' the plugin casts batches itself."
            ) from error

    def annotate(self, error: BaseException, step: str) -> None:
        """Add a note to an error in which autocast has a part: where it was raised, and what to do."""
        if self.choice.mixed:
            _error_notes.note(error, self._module, self.choice.dtype, self.device_type, step)

    # -- training ------------------------------------------------------------------------------------------------------

    def training_step(self, fit: Any) -> contextlib.AbstractContextManager[None]:
        """Return the context of a training step. A training step inside of validation has its precision.

        `fit` is notified when the step begins and ends; `None` if nothing is trained.
        """
        step = self._training_step
        if step is None or step.active or self.evaluating:
            step = _TrainingStep(self, fit)
            if not self.evaluating:
                self._training_step = step
        return step

    def around_training_step(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context of the metrics.

        The first step of an epoch searches for them, and any other step takes 0.2 us.
        """
        if self._step != "training_step":
            self._begin("training_step", self.autocast)
        return self._fp32_metrics

    def use_fp8(self, layers: contextlib.AbstractContextManager[None]) -> None:
        """Enter this context in training steps and backwards."""
        self.fp8_layers = layers

    # -- evaluation ----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def evaluation_step(self, module: nn.Module, step: str | None = None) -> Generator[None, None, None]:
        """Run an evaluation step in its precision, with metrics and outputs in fp32.

        Args:
            module: The attached module, or a shadow of it, which is treated alike.
            step: Name of the step whose outputs become fp32; `None` if a hook runs instead.

        """
        before, self.evaluating = self.evaluating, True
        try:
            around = self._around_evaluation(module, step) if self.evaluation.mixed else _NOTHING
            # not in a hook, because users export models there, and an export needs the module's own `forward`
            shares = step is not None and module is self._module
            with around, self.reused_weights if shares else _NOTHING, self.autocast():
                yield
        except (RuntimeError, TypeError) as error:
            self.explain(error)
            raise
        finally:
            self.evaluating = before

    @contextlib.contextmanager
    def _around_evaluation(self, module: nn.Module, step: str | None) -> Generator[None, None, None]:
        if module is self._module:
            if step is not None and self._step != step:
                self._begin(step, functools.partial(self.evaluation_step, module))
            metrics = self._fp32_metrics
        elif (metrics := self._shadows.get(module)) is None:
            metrics = self._shadows[module] = metrics_in_fp32(module, self.device_type)
        with metrics, _NOTHING if step is None else Overrides([Fp32Outputs(module, step)]):
            yield

    # -- epochs --------------------------------------------------------------------------------------------------------

    def _begin(self, step: str, context: Callable[[], contextlib.AbstractContextManager[Any]]) -> None:
        """Prepare for the first step of an epoch, or for the first one after steps of another kind."""
        self._fp32_metrics = metrics_in_fp32(self._module, self.device_type)
        self._step = step
        name = _EPOCH_ENDS[step]
        if is_overridden(name, self._module, LightningModule):
            hook = self._epoch_ends.get(name)
            if hook is None or not hook.installed:
                hook = self._epoch_ends[name] = EpochEnd(self._module, name, lambda: self._epoch_end(context))
                hook.install()

    @contextlib.contextmanager
    def _epoch_end(self, context: Callable[[], contextlib.AbstractContextManager[Any]]) -> Generator[None, None, None]:
        self._step = None  # the next step begins another epoch
        with self._fp32_metrics, context():
            yield


@final
class _TrainingStep:
    """`train_step_context`, made once and entered for each step.

    For a tiny model, making a new context in each step, or a generator, would take a noticeable part of a step. The
    `torch.autocast` inside is used again too, unless a subclass of the plugin has its own.
    """

    def __init__(self, contexts: ForwardContexts, fit: Any) -> None:
        self._contexts, self._fit = contexts, fit
        self._autocast: contextlib.AbstractContextManager[Any] | None = None
        self.active = False

    def forget_autocast(self) -> None:
        """Make a new one for the next step."""
        self._autocast = None

    def __enter__(self) -> None:
        if self._fit is not None:
            self._fit.begin_training_step()
        self._around = self._contexts.around_training_step()
        self._around.__enter__()
        self._fp8 = self._contexts.fp8_layers
        self._fp8.__enter__()
        self._sharing = self._contexts.reused_weights
        self._sharing.__enter__()
        if self._autocast is None or not self._contexts.autocast_stays:
            self._autocast = self._contexts.autocast()
        self._inside = self._autocast  # kept here, because a change of precision resets the attribute
        self._inside.__enter__()
        self.active = True

    def __exit__(self, *exc: Any) -> None:
        self.active = False
        try:
            self._inside.__exit__(*exc)
        finally:
            self._sharing.__exit__(*exc)
            self._fp8.__exit__(*exc)
            self._around.__exit__(*exc)
        if exc[0] is not None:
            self._contexts.explain(exc[1])
        elif self._fit is not None:
            self._fit.end_training_step()


# -- float64 batches: NumPy's default, which autocast does not take ----------------------------------------------------


def _has_no_float64(data: Any) -> bool:
    """Return whether a batch is a tensor, or a plain list or tuple of tensors, without float64."""
    if type(data) is Tensor:
        return data.dtype != torch.float64
    items = data if type(data) in (list, tuple) else (data,)
    return all(isinstance(item, Tensor) and item.dtype != torch.float64 for item in items)


def _downcast(data: Any, module: LightningModule) -> Any:
    """Return the batch with float64 tensors as float32, with one warning; unchanged if the module is float64.

    Autocast leaves float64 tensors alone, so a linear layer would get a float64 input and a half-precision weight.
    """
    converted = to_fp32(data, (torch.float64,))
    if converted is data or any(p.dtype == torch.float64 for p in module.parameters()):
        return data
    _said.info(
        "lightning_amp: batches hold float64 tensors, which autocast does not take; they are cast to float32. Make the"
        " dataset return float32 (numpy's default is float64) to save the copy."
    )
    return converted
