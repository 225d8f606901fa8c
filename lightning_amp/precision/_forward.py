"""Make the contexts that forwards run in: autocast, fp32 modules, metrics and outputs, shared weights, fp8 layers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from typing_extensions import final

from lightning_amp import _messages
from lightning_amp._compat._names import LightningModule, is_overridden
from lightning_amp._text import named
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

Context = contextlib.AbstractContextManager[Any]
_NOTHING = contextlib.nullcontext()
_EPOCH_ENDS = {
    "training_step": "on_train_epoch_end",
    "validation_step": "on_validation_epoch_end",
    "test_step": "on_test_epoch_end",
    "predict_step": "on_predict_epoch_end",
}


def autocast(choice: Choice, device_type: str) -> torch.autocast:
    """Return the context of a forward in this precision."""
    if not choice.mixed:
        return torch.autocast(device_type, enabled=False)
    # the cache would sum the gradients of all uses of a weight in half precision; see `casting/_reused_weights.py`
    return torch.autocast(device_type, dtype=choice.dtype, cache_enabled=False)


@final
class Together:
    """Several contexts as one, in a tenth of the time of an `ExitStack`. `end` is called with the error, if any."""

    def __init__(self, contexts: Sequence[Context], end: Callable[[BaseException | None], None]) -> None:
        self._contexts, self._end = contexts, end

    def __enter__(self) -> None:
        for context in self._contexts:
            context.__enter__()

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        for context in reversed(self._contexts):
            context.__exit__(kind, error, traceback)
        self._end(error)


@final
class ForwardContexts:
    """The contexts of one module, a `LightningModule` or a module of Fabric, until :meth:`detach`.

    Between two steps it leaves nothing on the module, except fp32 modules and the next epoch-end hook.

    Args:
        module: The user's.
        device_type: The device whose autocast to use.
        training: Precision of training steps.
        evaluation: Precision of validation, test and prediction.
        rules: Rules for modules that compute in fp32. A rule that matches nothing raises a `ValueError`.
        autocast: Makes the plugin's forward context.

    """

    def __init__(
        self,
        module: nn.Module,
        device_type: str,
        training: Choice,
        evaluation: Choice,
        rules: Sequence[Rule],
        autocast: Callable[[], Context],
    ) -> None:
        self.module, self.device_type = module, device_type
        self.training, self.evaluation = training, evaluation
        self.autocast = autocast
        self.evaluating = False
        mixed = training.mixed or evaluation.mixed
        self.fp32_modules = Fp32Modules(module, rules, device_type, active=mixed)
        self._reused_weights = ReusedWeights(module, device_type) if mixed else _NOTHING
        self._run: Any = None  # once it has trained
        self.fp8_layers: Context = _NOTHING  # entered in training steps and backwards
        self._metrics = metrics_in_fp32(module, device_type)
        self._step: str | None = None  # the kind of the step that ran last
        self._epoch_ends: dict[str, EpochEnd] = {}

    @property
    def choice(self) -> Choice:
        """Return the precision of the step that runs now."""
        return self.evaluation if self.evaluating else self.training

    @property
    def in_fp8(self) -> bool:
        """Return whether the fp8 layers should multiply in fp8 now."""
        return not self.evaluating and self.training.name == "fp8"

    def finish(self) -> None:
        """Warn at the end of a fit of rules that had no effect; log idle modules of other rules."""
        idle, is_whole_rule = self.fp32_modules.idle()
        if idle and self._run is not None:
            (_messages.warn if is_whole_rule else _messages.info)(
                f"lightning_amp: `fp32_modules` has no effect on {named(idle)}: the `forward` there never ran in this"
                " fit. Other methods of a module, and uses of its weight by other code, are not in fp32. Call the"
                " module itself, match the modules inside or around it whose `forward` runs, or put that code into"
                " `with lightning_amp.precision.fp32_region():`."
            )

    def detach(self) -> None:
        """Restore the module."""
        for hook in self._epoch_ends.values():
            hook.restore()
        self.fp32_modules.remove()

    def around(self, *, in_backward: bool = False) -> list[Context]:
        """Return the contexts of a training step except autocast, for Trainer and Fabric.

        With `in_backward`, of its backward, in which activation checkpointing runs forwards again.
        """
        return [self._metrics, self.fp8_layers, *([] if in_backward else [self._reused_weights])]

    def annotate(self, step: str, error: BaseException | None) -> None:
        """Add a note to an error about dtypes: where it was raised, and what to do."""
        _error_notes.note(error, self.choice, [self.module], step)

    # -- steps of a Trainer --------------------------------------------------------------------------------------------

    def training_step(self, run: Any) -> Context:
        """Return the context of a training step. A training step inside of validation has its precision.

        `run` is notified when the step begins and ends.
        """
        run.begin_training_step()
        self._begin("training_step", self.autocast)
        self._run = run
        return Together([*self.around(), self.autocast()], self._end_training_step)

    def _end_training_step(self, error: BaseException | None) -> None:
        self.annotate("`training_step`", error)
        if error is None:
            self._run.end_batch()

    def backward(self) -> Context:
        """Return the context of a backward."""
        return Together(self.around(in_backward=True), partial(self.annotate, "the backward"))

    @contextlib.contextmanager
    def evaluation_step(self, module: nn.Module, step: str | None = None) -> Generator[None, None, None]:
        """Run an evaluation step in its precision, with metrics and outputs in fp32.

        Args:
            module: The attached module, or a shadow of it, which is treated alike.
            step: Name of the step whose outputs become fp32; `None` if a hook runs instead.

        """
        before, self.evaluating = self.evaluating, True
        mixed, is_own = self.evaluation.mixed, module is self.module
        try:
            if mixed and is_own and step is not None:
                self._begin(step, partial(self.evaluation_step, module))
            metrics = self._metrics if is_own or not mixed else metrics_in_fp32(module, self.device_type)
            outputs = Overrides([Fp32Outputs(module, step)]) if mixed and step is not None else _NOTHING
            # users export models in hooks, and an export needs the module's own `forward`
            weights = self._reused_weights if is_own and step is not None else _NOTHING
            contexts = [*([metrics, outputs] if mixed else []), weights, self.autocast()]
            with Together(contexts, partial(self.annotate, f"`{step}`" if step else "a hook")):
                yield
        finally:
            self.evaluating = before

    def _begin(self, step: str, context: Callable[[], Context]) -> None:
        """Prepare for the first step of an epoch, or for the first one after steps of another kind."""
        if step == self._step:
            return
        self._step = step
        self._metrics = metrics_in_fp32(self.module, self.device_type)
        name = _EPOCH_ENDS[step]
        hook = self._epoch_ends.get(name)
        if is_overridden(name, self.module, LightningModule) and (hook is None or not hook.installed):
            hook = self._epoch_ends[name] = EpochEnd(self.module, name, partial(self._epoch_end, context))
            hook.install()

    @contextlib.contextmanager
    def _epoch_end(self, context: Callable[[], Context]) -> Generator[None, None, None]:
        self._step = None  # the next step begins another epoch
        with self._metrics, context():
            yield
