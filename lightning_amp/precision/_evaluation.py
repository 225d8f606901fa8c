"""What a step finds around it besides autocast: metrics in fp32, outputs in fp32, modules in fp32, epoch-end hooks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn

from lightning_amp.casting import EpochEnd, Fp32Metrics, Fp32Modules, Fp32Outputs, Rule
from lightning_amp.precision._idle_rules import IdleRules

Context = Callable[[], contextlib.AbstractContextManager[Any]]

_NOTHING = contextlib.nullcontext()
_HOOKS = {
    "training_step": "on_train_epoch_end",
    "validation_step": "on_validation_epoch_end",
    "test_step": "on_test_epoch_end",
    "predict_step": "on_predict_epoch_end",
}


class Surroundings:
    """Knows the module that is attached, and makes what surrounds its steps.

    Between two steps of an epoch nothing of it is on the module, except fp32 modules and the epoch-end hook to come.
    """

    def __init__(self) -> None:
        self._module: LightningModule | None = None
        self._device_type = "cpu"
        self._islands: Fp32Modules | None = None
        self._idle_rules: IdleRules | None = None
        self._step: str | None = None  # which kind of step ran last
        self._metrics: Fp32Metrics | None = None
        self._hooks: dict[str, EpochEnd] = {}
        # a shadow of the module that a callback validates beside it
        self._shadows: WeakKeyDictionary[nn.Module, Fp32Metrics] = WeakKeyDictionary()

    def attach(self, module: LightningModule, device_type: str, rules: Sequence[Rule], *, mixed: bool) -> None:
        """A Trainer takes this module.

        Args:
            module: The user's.
            device_type: Where it computes.
            rules: Which of its modules compute in fp32.
            mixed: Whether any step runs under autocast.

        """
        self.detach()
        self._islands = Fp32Modules(module, rules, device_type, active=mixed)
        self._module, self._device_type = module, device_type
        if len(self._islands) and module.trainer.state.fn == TrainerFn.FITTING:
            self._idle_rules = IdleRules(module, self._islands)

    def finish(self) -> None:
        """A fit has come to its end."""
        if self._idle_rules is not None:
            self._idle_rules.say()

    def detach(self) -> None:
        """The module is as it was."""
        for hook in self._hooks.values():
            hook.restore()
        if self._islands is not None:
            self._islands.remove()
        self._module = self._islands = self._idle_rules = self._step = self._metrics = None
        self._hooks = {}

    @property
    def fp32_modules(self) -> set[nn.Module]:
        """All modules that compute in fp32, those inside the matching ones included."""
        return set() if self._islands is None else self._islands.modules

    @property
    def num_fp32_modules(self) -> int:
        """How many modules the rules match, those inside the matching ones not counted."""
        return 0 if self._islands is None else len(self._islands)

    def training(self, context: Context) -> contextlib.AbstractContextManager[Any]:
        """What surrounds a training step. Made once per epoch; otherwise 0.2 us.

        Args:
            context: What `on_train_epoch_end` is to run in.

        """
        if self._module is None:
            return _NOTHING
        if self._idle_rules is not None:
            self._idle_rules.before_training_step()
        if self._metrics is None or self._step != "training_step":
            self._metrics = self._begin(self._module, "training_step", context)
        return self._metrics

    @contextlib.contextmanager
    def evaluating(self, module: nn.Module | None, step: str | None, context: Context) -> Generator[None, None, None]:
        """What surrounds an evaluation step: metrics and outputs in fp32.

        Args:
            module: Whose step: the attached module or a shadow of it.
            step: Name of the method; `None` if a hook runs instead.
            context: What the epoch-end hook is to run in, if it is the attached module's.

        """
        if module is None or self._module is None:
            yield
            return
        metrics = self._metrics
        if module is not self._module:
            metrics = self._shadows.get(module)
            if metrics is None:
                metrics = self._shadows[module] = Fp32Metrics(module, self._device_type)
        elif metrics is None or (step is not None and self._step != step):
            metrics = self._begin(self._module, step, context)
        with metrics, _NOTHING if step is None else Fp32Outputs(module, step):
            yield
        if self._idle_rules is not None and step is not None:
            self._idle_rules.after_evaluation_step()

    def _begin(self, module: LightningModule, step: str | None, context: Context) -> Fp32Metrics:
        """The first step of an epoch, or the first after steps of another kind."""
        if self._metrics is None:
            self._metrics = Fp32Metrics(module, self._device_type)
        else:
            self._metrics.find(module)
        self._step = step
        name = _HOOKS.get(step or "")
        if name is not None and is_overridden(name, module, LightningModule):
            hook = self._hooks.get(name)
            if hook is None or not hook.installed:
                hook = self._hooks[name] = EpochEnd(module, name, lambda: self._epoch_end(context))
                hook.install()
        return self._metrics

    @contextlib.contextmanager
    def _epoch_end(self, context: Context) -> Generator[None, None, None]:
        self._step = None  # what follows is another epoch
        with self._metrics or _NOTHING, context():
            yield
