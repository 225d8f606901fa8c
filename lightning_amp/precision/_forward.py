"""The forward half of the plugin: which precision a step runs in, and what surrounds it."""

from __future__ import annotations

import contextlib
import functools
from abc import abstractmethod
from collections.abc import Generator
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from typing_extensions import override

from lightning_amp.casting import Canonical, Choice, ReusedWeights
from lightning_amp.precision import _inputs
from lightning_amp.precision._evaluation import Surroundings


class ForwardContexts(MixedPrecision):
    """Contexts of the four kinds of steps; the training step's is completed by the plugin."""

    _module: LightningModule | None
    _choice: Choice | None  # known when the Trainer attaches, if it is "auto"
    _surroundings: Surroundings
    _reused: ReusedWeights
    _eval_choice: Choice | None  # known when the Trainer attaches
    _evaluating = False
    _training_step: _TrainingStep | None = None

    @property
    def precision(self) -> Canonical:  # type: ignore[override]
        """Lightning's name: `"16-mixed"`, `"bf16-mixed"` or `"32-true"`."""
        return self._settled().canonical

    @property
    def dtype(self) -> torch.dtype:
        """What autocast computes in; `torch.float32` for `"fp32"`."""
        return self._settled().dtype

    def _settled(self) -> Choice:
        # "auto" before a Trainer attached: what it would be on the device that Lightning chooses by default
        return self._choice or Choice.pick(torch.device(self.device))[0]

    def _before_evaluation(self) -> None:
        """Somebody is about to look at what training left."""

    def _forward_choice(self, evaluating: bool) -> Choice:
        return (self._eval_choice if evaluating else None) or self._settled()

    @override
    def autocast_context_manager(self) -> torch.autocast:
        choice = self._forward_choice(self._evaluating)
        dtype = choice.dtype if choice.mixed else torch.get_autocast_dtype(self.device)
        # no cache: it sums the gradients of all uses of a weight in half precision; see `casting/_reused_weights.py`
        return torch.autocast(self.device, dtype=dtype, enabled=choice.mixed, cache_enabled=False)

    @override
    def convert_input(self, data: Any) -> Any:
        """Float64 tensors of a batch become float32: autocast leaves float64 alone, and no layer takes a mixture."""
        module = self._module
        if module is None or _inputs.obviously_fine(data):
            return data
        # what training takes evaluation takes too, also when it is in fp32
        evaluating = not module.trainer.training
        if not (self._settled().mixed or self._forward_choice(evaluating).mixed):
            return data
        return _inputs.downcast(data, module)

    @override
    def forward_context(self) -> contextlib.AbstractContextManager[Any]:  # type: ignore[override]
        return self.autocast_context_manager()

    @override
    def train_step_context(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        step = self._training_step
        if self._evaluating:  # a training step that validation asked for: in the precision of evaluation
            return _TrainingStep(self)
        if step is None or step.active:
            step = self._training_step = _TrainingStep(self)
        return step

    def sharing_copies(self) -> contextlib.AbstractContextManager[None]:
        """Return what a training step runs in, so that a weight that it uses again is cast once."""
        return self._reused.inside("training_step")

    @abstractmethod
    def enter_train_step(self) -> contextlib.AbstractContextManager[Any]:
        """A training step begins; returns what surrounds it besides autocast."""

    @abstractmethod
    def leave_train_step(self) -> None:
        """The training step is over; in automatic optimization its optimizer step is still to come."""

    @override
    def val_step_context(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        return self.evaluation_context(self._module, "validation_step")

    @override
    def test_step_context(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        return self.evaluation_context(self._module, "test_step")

    @override
    def predict_step_context(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        return self.evaluation_context(self._module, "predict_step")

    @contextlib.contextmanager
    def evaluation_context(self, module: nn.Module | None, step: str | None = None) -> Generator[None, None, None]:
        """What an evaluation step runs in: autocast in the evaluation precision; metrics and outputs in fp32.

        Args:
            module: The attached module, or a shadow of it whose metrics and step are to be treated alike.
            step: Name of the step whose outputs become fp32; `None` where a hook runs instead.

        """
        self._before_evaluation()
        before, self._evaluating = self._evaluating, True
        try:
            mixed = self._forward_choice(True).mixed
            hook_context = functools.partial(self.evaluation_context, module)
            around = self._surroundings.evaluating(module, step, hook_context) if mixed else contextlib.nullcontext()
            # not in a hook, which is where people export a model: that needs the module's own `forward`
            shares = step is not None and module is self._module
            sharing = self._reused.inside(step) if shares else contextlib.nullcontext()
            with around, sharing, self.forward_context():
                yield
        finally:
            self._evaluating = before


class _TrainingStep:
    """`train_step_context`, made once and entered for each step: on a tiny model the making is a noticeable part of it.

    A class, not a generator, for the same reason. The `torch.autocast` inside is used again too, unless a subclass of
    the plugin has its own.
    """

    def __init__(self, plugin: ForwardContexts) -> None:
        self._plugin = plugin
        self._forward: contextlib.AbstractContextManager[Any] | None = None
        self._forward_stays = all(
            getattr(type(plugin), name) is getattr(ForwardContexts, name)
            for name in ("forward_context", "autocast_context_manager")
        )
        self._sharing = plugin.sharing_copies()
        self.active = False

    def __enter__(self) -> None:
        self._around = self._plugin.enter_train_step()
        self._around.__enter__()
        self._sharing.__enter__()
        if self._forward is None or not self._forward_stays:
            self._forward = self._plugin.forward_context()
        self._forward.__enter__()
        self.active = True

    def __exit__(self, *exc: Any) -> None:
        assert self._forward is not None
        self.active = False
        try:
            self._forward.__exit__(*exc)
        finally:
            self._sharing.__exit__(*exc)
            self._around.__exit__(*exc)
        if exc[0] is None:
            self._plugin.leave_train_step()
