"""The hooks that Lightning calls on a plugin that owns the whole step: each hands over to the run that is on."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins import MixedPrecision, Precision
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_amp._compat import _lightning
from lightning_amp.casting import Choice
from lightning_amp.precision import _clipping, _refusals
from lightning_amp.precision._fit import Fit
from lightning_amp.precision._run import Run

_NOTHING = contextlib.nullcontext()


class RunHooks(MixedPrecision):
    """Translates; nothing is decided or computed here. Without a run there is autocast, and nothing else."""

    _run: Run | None = None

    @abstractmethod
    def _settled(self) -> Choice:
        """Return the precision of training."""

    @abstractmethod
    def flush(self) -> None:
        """Close what was stepped since the last batch."""

    @property
    def _fit(self) -> Fit | None:
        return None if self._run is None else self._run.fit

    def _autocast_off(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context without autocast."""
        return torch.autocast(self.device, enabled=False) if torch.is_autocast_enabled(self.device) else _NOTHING

    def unscale_(self, optimizer: Any) -> None:
        """Make the gradients of `optimizer` true ones, for a manual training loop that wants to look or to clip itself.

        Idempotent within a step; without loss scaling it only looks at them. If they are not finite, their next step is
        skipped, whatever they are mended to afterwards; mend them before. A backward that follows carries the
        gradients back to the scale, so accumulating after looking is fine.

        Args:
            optimizer: From `self.optimizers()`, or the user's own.

        """
        if self._fit is not None:
            self._fit.steps.unscale_(_lightning.unwrap_optimizer(optimizer))

    # -- forward -------------------------------------------------------------------------------------------------------

    @override
    def autocast_context_manager(self) -> torch.autocast:
        choice = self._settled() if self._run is None else self._run.forward.choice
        dtype = choice.dtype if choice.mixed else torch.get_autocast_dtype(self.device)
        # no cache: it sums the gradients of all uses of a weight in half precision; see `casting/_reused_weights.py`
        return torch.autocast(self.device, dtype=dtype, enabled=choice.mixed, cache_enabled=False)

    @override
    def convert_input(self, data: Any) -> Any:
        return data if self._run is None else self._run.forward.convert_input(data)

    @override
    def forward_context(self) -> contextlib.AbstractContextManager[Any]:  # type: ignore[override]
        return self.autocast_context_manager()

    def forward_context_of(self, precision: str) -> contextlib.AbstractContextManager[Any]:
        """Return what a training step ran in, by our name of its precision, to run it again; empty: as of now."""
        return self.forward_context()

    @override
    def train_step_context(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        run = self._run
        return self.forward_context() if run is None else run.forward.training_step(run.fit)

    @override
    def val_step_context(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        return self._own_evaluation("validation_step")

    @override
    def test_step_context(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        return self._own_evaluation("test_step")

    @override
    def predict_step_context(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        return self._own_evaluation("predict_step")

    def evaluation_context(
        self, module: nn.Module | None, step: str | None = None
    ) -> contextlib.AbstractContextManager[None]:
        """Return what an evaluation step runs in: autocast in the evaluation precision; metrics and outputs in fp32.

        Args:
            module: The attached module, or a shadow of it whose metrics and step are to be treated alike.
            step: Name of the step whose outputs become fp32; `None` where a hook runs instead.

        """
        return self.forward_context() if self._run is None else self._run.evaluation_step(module, step)

    def _own_evaluation(self, step: str) -> contextlib.AbstractContextManager[None]:
        return self.evaluation_context(None if self._run is None else self._run.module, step)

    def fp8_on(self, module: nn.Module, precision: str = "") -> contextlib.AbstractContextManager[None]:
        """Return a context in which a copy of the attached module multiplies in fp8, as its training steps do.

        Args:
            module: The copy.
            precision: Of the step, by our name; empty: as of now.

        """
        run = self._run
        if run is None or run.fp8 is None or (precision or run.forward.training.name) != "fp8":
            return _NOTHING
        return run.fp8.on(module)

    # -- backward ------------------------------------------------------------------------------------------------------

    @override
    def pre_backward(self, tensor: Tensor, module: LightningModule) -> Tensor:  # type: ignore[override]
        fit = self._fit
        if fit is None:  # in an evaluation, or after the run, nobody divides by the scale
            _refusals.require_trainer(self, module)
            return Precision.pre_backward(self, tensor, module)
        with self._autocast_off():
            return fit.scale(tensor)

    @override
    def backward(  # type: ignore[override]
        self, tensor: Tensor, model: LightningModule, optimizer: Any, *args: Any, **kwargs: Any
    ) -> None:
        run, fit = self._run, self._fit
        backward = partial(super().backward, tensor, model, optimizer, *args)
        if run is None:
            with self._autocast_off():
                return backward(**kwargs)
        # modules that activation checkpointing calls again share the casts of their weights
        with self._autocast_off(), run.forward.in_fp8_layers(), run.forward.sharing_copies():
            try:
                if fit is None:
                    backward(**kwargs)
                else:
                    fit.backward(backward, **kwargs)
            except (RuntimeError, TypeError) as error:
                run.forward.annotate(error, "the backward")
                raise

    @override
    def post_backward(self, tensor: Tensor, module: LightningModule) -> Tensor:  # type: ignore[override]
        if self._fit is None or self._fit.somebody_sees_backward:
            with self._autocast_off():
                super().post_backward(tensor, module)
        if self._run is not None:
            self._run.forward.weights_changed()
        return tensor.detach()

    # -- step ----------------------------------------------------------------------------------------------------------

    @override
    def optimizer_step(  # type: ignore[override]
        self, optimizer: Any, model: LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        fit = self._fit
        with self._autocast_off():
            if fit is None:  # in an evaluation, or after the run: gradients are true, and nobody counts
                output = Precision.optimizer_step(self, optimizer, model, closure, **kwargs)
            else:
                output = fit.step(_lightning.unwrap_optimizer(optimizer), closure, self.forward_context, kwargs)
        if self._run is not None:
            self._run.forward.weights_changed()
        return output

    @override
    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: int | float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        optimizer = _lightning.unwrap_optimizer(optimizer)
        if clip_val > 0 and gradient_clip_algorithm == GradClipAlgorithmType.VALUE:
            self.unscale_(optimizer)
            self.clip_grad_by_value(optimizer, clip_val)
            return
        if self._fit is not None:  # a norm that is not finite makes gradients NaN: the step finds it
            gradients = self._fit.steps.gradients
            gradients.unscale(gradients.state(optimizer))
        if clip_val > 0:
            self.clip_grad_by_norm(optimizer, clip_val)

    @override
    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        _clipping.clip_by_norm(self.main_params(optimizer), clip_val)

    @override
    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        _clipping.clip_by_value(self.main_params(optimizer), clip_val)

    # -- the end -------------------------------------------------------------------------------------------------------

    @override
    def teardown(self) -> None:
        run = self._run
        interrupted = run is not None and run.module.trainer.interrupted
        try:  # what fails here must not hide the exception that ended the run
            with contextlib.suppress(*([Exception] if interrupted else [])):
                self.flush()
                if run is not None and not interrupted:
                    run.finish()
        finally:
            self._detach_run()
            super().teardown()

    def _detach_run(self) -> None:
        """End the run, and leave the user's objects as they were."""
        run, self._run = self._run, None
        if run is not None:
            run.detach()
