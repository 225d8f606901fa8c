"""Evaluate a shadow of the module batch by batch, as Lightning's loop does: one side of a comparison."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import final

from lightning_amp._compat import _lightning
from lightning_amp._compat._names import LightningModule, Trainer, is_overridden
from lightning_amp.casting import is_metric
from lightning_amp.precision import AmpPrecision
from lightning_amp.shadow._module_copy import copy_batch
from lightning_amp.shadow._shadow import Shadow
from lightning_amp.tracing import RandomState, fp32_throughout, full_precision, paired_random

Stage = Literal["validation", "test"]
"""The stage, as it appears in the names of hooks (`on_test_batch_start`) and steps (`test_step`)."""

Precision = Literal["amp", "fp32", "eval fp32"]
"""As the real evaluation, in true fp32, or as with `eval_precision="fp32"`."""


@final
class EvaluationPass:
    """Validates or tests a shadow.

    The shadow is a copy of the module at this moment, so a pass may begin in the middle of an evaluation. Its metrics
    include the batches that the module has seen. Hooks before the first batch do not run again.

    Args:
        trainer: The trainer, inside its evaluation loop.
        module: The real module.
        stage: The stage whose step and hooks run.
        precision: `"amp"`: the contexts of the real evaluation. `"fp32"`: true fp32; half-precision weights, buffers
            and batches are upcast. `"eval fp32"`: the context of `eval_precision="fp32"`.
        metrics: Metrics of the loaders that the module has finished.

    Attributes:
        notes: A sentence if the pass in fp32 leaves out casts to half precision.
    """

    def __init__(
        self,
        trainer: Trainer,
        module: LightningModule,
        stage: Stage,
        precision: Precision,
        metrics: Mapping[str, Tensor] | None = None,
    ) -> None:
        self._stage: Stage = stage
        self._precision, self.notes = precision, list[str]()
        self._plugin: Any = trainer.precision_plugin
        self.device_type = trainer.strategy.root_device.type
        self._real_module = module
        self._shadow = Shadow(trainer, module, upcast=precision == "fp32")
        self.module, self.view = self._shadow.module, self._shadow.view
        self._loader_idx = _lightning.evaluation_loader_idx(trainer)
        self._metrics = {**(metrics or {}), **_lightning.evaluation_metrics(self.view)}

    def _context(self, step: str | None = None, *, is_hook: bool = False) -> AbstractContextManager[Any]:
        """Return the context of the step, of a hook of a batch, or else of the hook at the end of the epoch."""
        if self._precision == "fp32":
            return fp32_throughout(self.device_type, __file__, self.notes)
        if self._precision == "eval fp32":
            return full_precision(self.device_type)
        if isinstance(self._plugin, AmpPrecision) and not is_hook:  # this context also handles metrics and outputs
            return self._plugin.evaluation_context(self.module, step)
        if step is None:
            return nullcontext()
        return self._plugin.test_step_context() if self._stage == "test" else self._plugin.val_step_context()

    def start_afresh(self) -> None:
        """Reset the metrics of the batches so far, and run the hooks before the first batch.

        Remove with `own_results`.
        """
        self.view._results.clear()
        self.view._logger_connector._callback_metrics.clear()
        self._metrics.clear()
        with self.active():
            for module in self.module.modules():
                if is_metric(module):
                    module.reset()  # pyright: ignore[reportCallIssue]
        with self.active(), self._shadow.running(), self._context(is_hook=True):
            for hook in (f"on_{self._stage}_start", f"on_{self._stage}_epoch_start"):
                if is_overridden(hook, self.module):
                    self._shadow.call(hook)

    def step(
        self, batch: Any, batch_idx: int, loader_idx: int | None, watch: AbstractContextManager[Any] | None = None
    ) -> None:
        """Run the batch hooks and the step on a copy of a batch, and restore the random generators.

        It names, weights and reduces what is logged as the evaluation loop does. Remove with `own_results`.

        Args:
            batch: The batch; unchanged.
            batch_idx: The index of the batch in its loader.
            loader_idx: Index of the batch's loader; `None` with one loader.
            watch: Entered around the step.

        """
        call, stage = self._shadow.call, self._stage
        with self.active(), self._shadow.running(), paired_random(self.device_type):
            if loader_idx != self._loader_idx:
                self._finish_loader()
                self._loader_idx = loader_idx
            batch = copy_batch(batch, upcast=self._precision == "fp32")
            args = (batch, batch_idx) if loader_idx is None else (batch, batch_idx, loader_idx)
            self.view._logger_connector.on_batch_start(batch, loader_idx)
            try:
                with self._context(is_hook=True):
                    call(f"on_{stage}_batch_start", *args)
                with self._context(f"{stage}_step"), watch or nullcontext():
                    outputs = call(f"{stage}_step", *args)
                with self._context(is_hook=True):
                    call(f"on_{stage}_batch_end", outputs, *args)
            finally:
                self.view._results.batch = self.view._results.batch_size = None

    def active(self) -> AbstractContextManager[None]:
        """Return the context for code that changes the shadow between its steps. All ranks must enter it."""
        return self._shadow.active()

    def finish(self, random_state: RandomState | None) -> dict[str, Tensor]:
        """Run the epoch-end hook and return the epoch's metrics by name. Remove with `own_results`.

        `random_state` has the random generators before the epoch-end hook of the real module.
        """
        if self._shadow.exchange is None:  # averaged weights may have been swapped out before the hook
            with torch.inference_mode(False), torch.no_grad():
                for own, value in zip(self.module.parameters(), self._real_module.parameters(), strict=True):
                    own.copy_(value)
        in_order = paired_random(self.device_type, random_state)
        with self.active(), self._shadow.running(), in_order, self._context(is_hook=True):
            self._finish_loader()
            connector = self.view._logger_connector
            connector.epoch_end_reached()
            connector._evaluation_epoch_end()
            with self._context():
                self._shadow.call(f"on_{self._stage}_epoch_end")
            connector.on_epoch_end()
            self._keep_metrics()
        return self._metrics

    def close(self) -> None:
        """Free the shadow."""
        self._shadow.close()

    # Remove with `own_results`.
    def _finish_loader(self) -> None:
        self.view._logger_connector.epoch_end_reached()
        self._keep_metrics()

    # Remove with `own_results`.
    def _keep_metrics(self) -> None:
        self.view._logger_connector.update_eval_epoch_metrics()
        self._metrics.update(self.view._logger_connector.metrics["callback"])


def follow_ddp_buffers(trainer: Trainer, module: LightningModule) -> None:
    """Copy rank 0's buffers to the shadows of all ranks, as DDP does for the real module at its next forward.

    Otherwise the BatchNorm statistics of shadow and real module would differ on all other ranks.
    """
    ddp = trainer.strategy.model
    # DDP does not copy buffers after a forward without synchronised gradients, as in manual optimization.
    if isinstance(ddp, DistributedDataParallel) and ddp.will_sync_module_buffers():
        for name, buffer in module.named_buffers():
            if name not in ddp.parameters_to_ignore and buffer.numel():
                torch.distributed.broadcast(buffer, group_src=0, group=ddp.process_group)
