"""What the plugin holds from the moment a Trainer attaches to its teardown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim import Optimizer
from typing_extensions import final

from lightning_amp.casting import Choice, Rule
from lightning_amp.precision import _refusals
from lightning_amp.precision._fit import Fit
from lightning_amp.precision._forward import ForwardContexts
from lightning_amp.precision._fp8 import Fp8
from lightning_amp.scaling import RecordLog
from lightning_amp.skipped_steps import BufferPlace, matching_places


@final
class Run:
    """One call of `fit`, `validate`, `test` or `predict`; never pickled.

    Args:
        plugin: That runs.
        module: The user's.
        training: The precision of training steps.
        evaluation: That of validation, test and prediction.
        fp32_modules: Rules; see `AmpPrecision`.
        autocast_stays: Whether the plugin's forward context can be used again.

    Attributes:
        module: The same.
        fitting: Whether it is a fit.
        forward: What its steps run in.
        fit: Its backwards and optimizer steps; `None` until the optimizers exist, and where nothing is trained.
        fp8: Its layers in fp8; `None` without.
        named_buffers: What a skipped step puts back besides normalisation statistics.

    Raises:
        ValueError: If a rule matches nothing.

    """

    def __init__(
        self,
        plugin: MixedPrecision,
        module: LightningModule,
        training: Choice,
        evaluation: Choice,
        fp32_modules: Sequence[Rule],
        *,
        autocast_stays: bool,
    ) -> None:
        self.module = module
        self.fitting = module.trainer.state.fn == TrainerFn.FITTING
        self.fit: Fit | None = None
        self.fp8: Fp8 | None = None
        self.named_buffers: list[BufferPlace] = []
        self._plugin = plugin
        context: Callable[[], Any] = plugin.forward_context
        self.forward = ForwardContexts(
            module, plugin.device, training, evaluation, fp32_modules, context, autocast_stays=autocast_stays
        )

    def check(self, restore_buffers: Sequence[str], fp8_recipe: Any = None) -> None:
        """Refuse a module that cannot be trained, find its buffers, and turn fp8 on.

        Later than the rest, since a strategy may wrap what it gets.

        Args:
            restore_buffers: Rules; see `AmpPrecision`.
            fp8_recipe: A checked one; `None` without fp8.

        Raises:
            ValueError: With all that is wrong, if a rule matches nothing, or if no layer qualifies for fp8.
            ImportError: If fp8 needs a torchao that is not there.

        """
        if self.fitting:
            device = self.module.trainer.strategy.root_device
            _refusals.check(self.module, self.forward.training, device, self.forward.fp32_modules)
            self.named_buffers = matching_places(self.module, restore_buffers)
            if fp8_recipe is not None:
                self.fp8 = Fp8(self.module, self.forward, fp8_recipe, device)

    def connect(
        self,
        optimizers: Sequence[Optimizer],
        *,
        scaler: torch.amp.GradScaler | None,
        skip_nonfinite: bool,
        log: RecordLog,
        own_norm: bool,
        after_batch: Callable[[], None] = lambda: None,
    ) -> None:
        """Begin a fit, if this is one; see :class:`Fit` for the arguments."""
        if self.fit is not None:
            self.fit.detach()
        if self.fitting:
            self.fit = Fit(
                self._plugin,
                self.module,
                optimizers,
                scaler=scaler,
                skip_nonfinite=skip_nonfinite,
                log=log,
                mixed=self.forward.training.mixed,
                named_buffers=self.named_buffers,
                own_norm=own_norm,
                after_batch=after_batch,
            )

    def go_on_in(self, training: Choice, evaluation: Choice, scaler: torch.amp.GradScaler | None) -> None:
        """Change the precision between two batches."""
        self.forward.change(training, evaluation)
        if self.fit is not None:
            self.fit.change_scaler(scaler, mixed=training.mixed)

    def finish(self) -> None:
        """Make gradients that are left true ones, and say which settings have done nothing."""
        if self.fit is not None:
            self.fit.steps.gradients.release()
        self.forward.finish()
        if self.fp8 is not None:
            self.fp8.finish()

    def evaluation_step(self, module: Any, step: str | None) -> AbstractContextManager[None]:
        """Return what an evaluation step, or a hook around it, runs in; see `AmpPrecision.evaluation_context`."""
        if self.fit is not None:
            self.fit.settle()
        return self.forward.evaluation_step(module, step)

    def detach(self) -> None:
        """Leave the user's objects as they were."""
        try:
            if self.fit is not None:
                self.fit.detach()
        finally:
            self.forward.detach()
