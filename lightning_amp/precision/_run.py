"""What the plugin holds from the moment a Trainer attaches to its teardown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim import Optimizer
from typing_extensions import final

from lightning_amp.casting import Choice
from lightning_amp.precision import _first_line, _refusals
from lightning_amp.precision._fit import Fit
from lightning_amp.precision._forward import ForwardContexts
from lightning_amp.skipped_steps import Place, matching_places

if TYPE_CHECKING:
    from lightning_amp.precision._amp import AmpPrecision


@final
class Run:
    """One call of `fit`, `validate`, `test` or `predict`; never pickled.

    Args:
        plugin: Whose settings hold.
        module: The user's.
        training: The precision of training steps.
        evaluation: That of validation, test and prediction.
        autocast_stays: Whether the plugin's forward context can be used again.

    Attributes:
        module: The same.
        fitting: Whether it is a fit.
        forward: What its steps run in.
        fit: Its backwards and optimizer steps; `None` until the optimizers exist, and where nothing is trained.
        named_buffers: What a skipped step puts back besides normalisation statistics.

    Raises:
        ValueError: If a rule of `fp32_modules` matches nothing.

    """

    def __init__(
        self,
        plugin: AmpPrecision,
        module: LightningModule,
        training: Choice,
        evaluation: Choice,
        *,
        autocast_stays: bool,
    ) -> None:
        self.module = module
        self.fit: Fit | None = None
        self._plugin = plugin
        self.fitting = module.trainer.state.fn == TrainerFn.FITTING
        self.named_buffers: list[Place] = []
        self.forward = ForwardContexts(
            module,
            plugin.device,
            training,
            evaluation,
            plugin.fp32_modules,
            plugin.forward_context,
            autocast_stays=autocast_stays,
        )

    def check(self, why: str, *, scaler_unused: bool) -> None:
        """Refuse what cannot be trained, and say what is on.

        Args:
            why: The reason of `"auto"`; empty for a precision that was asked for.
            scaler_unused: Whether a scaler was passed that the precision does not need.

        Raises:
            ValueError: With all that is wrong, or if a rule of `restore_buffers` matches nothing.

        """
        if self.fitting:  # here, since a strategy may wrap what it is given
            device = self.module.trainer.strategy.root_device
            _refusals.check(self.module, self.forward.training, device, self.forward.fp32_modules)
            self.named_buffers = matching_places(self.module, self._plugin.restore_buffers)
        _first_line.say(self, self._plugin.scaler, why, scaler_unused=scaler_unused)

    @property
    def skips(self) -> bool:
        """Return whether a step that is not finite is skipped."""
        scaler = self._plugin.scaler
        return self._plugin.skip_nonfinite or (scaler is not None and scaler.is_enabled())

    def connect(self, optimizers: Sequence[Optimizer], *, own_norm: bool) -> None:
        """Begin a fit, if this is one.

        Args:
            optimizers: The user's own, not wrapped.
            own_norm: Whether the plugin is a subclass that clips by norm in its own way.

        """
        if not self.fitting:
            return
        if self.fit is not None:
            self.fit.detach()
        self.fit = Fit(
            self._plugin,
            self.module,
            optimizers,
            mixed=self.forward.training.mixed,
            named_buffers=self.named_buffers,
            own_norm=own_norm,
        )

    def evaluation_step(self, module: Any, step: str | None) -> AbstractContextManager[None]:
        """Return what an evaluation step, or a hook around it, runs in; see `AmpPrecision.evaluation_context`."""
        if self.fit is not None:
            self.fit.settle()
        return self.forward.evaluation_step(module, step)

    def backward(self, run: Callable[..., None], **kwargs: Any) -> None:
        """Run a backward; modules that activation checkpointing calls again share the casts of their weights."""
        with self.forward.sharing_copies():
            if self.fit is None:
                run(**kwargs)
            else:
                self.fit.backward(run, **kwargs)

    def detach(self) -> None:
        """Leave the user's objects as they were."""
        try:
            if self.fit is not None:
                self.fit.detach()
        finally:
            self.forward.detach()
