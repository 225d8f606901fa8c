"""Evaluate a shadow of the module batch by batch, as Lightning's loop does: one side of a comparison."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import final

from lightning_amp._compat import _lightning
from lightning_amp.casting import is_metric
from lightning_amp.precision import AmpPrecision
from lightning_amp.shadow._module_copy import copy_batch
from lightning_amp.shadow._own_results import (
    finish_evaluation_batch,
    finish_evaluation_epoch_end,
    finish_evaluation_loader,
    forget_results,
    start_evaluation_batch,
    start_evaluation_epoch_end,
)
from lightning_amp.shadow._shadow import Shadow
from lightning_amp.tracing import RandomState, fp32_throughout, full_precision, paired_random

Stage = Literal["validation", "test"]
"""The stage, as it appears in the names of hooks (`on_test_batch_start`) and steps (`test_step`)."""

Context = Callable[[LightningModule], AbstractContextManager[Any]]


@final
class EvaluationPass:
    """Validates or tests a shadow.

    The shadow is a copy of the module at this moment, so a pass may begin in the middle of an evaluation. Its metrics
    include the batches that the module has seen. Hooks before the first batch do not run again.

    Args:
        trainer: The trainer, inside its evaluation loop.
        module: The real module.
        stage: The stage whose step and hooks run.
        hook_context: Returns the context of hooks, given the shadow's module.
        step_context: Returns the context of the step.
        epoch_end_context: Returns the context of the epoch-end hook, inside `hook_context`.
        metrics: Metrics of the loaders that the module has finished.
        upcast: Convert half-precision weights, buffers and batches to float32, for a pass in fp32.
    """

    def __init__(
        self,
        trainer: Trainer,
        module: LightningModule,
        stage: Stage,
        *,
        hook_context: Context,
        step_context: Context,
        epoch_end_context: Context,
        metrics: Mapping[str, Tensor] | None = None,
        upcast: bool = False,
    ) -> None:
        self._stage: Stage = stage
        self._upcast = upcast
        self.device_type = trainer.strategy.root_device.type
        self._hook_context = hook_context
        self._step_context = step_context
        self._epoch_end_context = epoch_end_context
        self._real_module = module
        self._shadow = Shadow(trainer, module, upcast=upcast)
        self.module, self.view = self._shadow.module, self._shadow.view
        self._loader_idx = _lightning.evaluation_loader_idx(trainer)
        self._metrics = {**(metrics or {}), **_lightning.evaluation_metrics(self.view)}

    @classmethod
    def in_fp32(cls, trainer: Trainer, module: LightningModule, stage: Stage, *, upcast: bool = True) -> EvaluationPass:
        """Make a pass in true fp32; without `upcast`, make one in the context of `eval_precision="fp32"`."""
        device_type = trainer.strategy.root_device.type

        def context(_: LightningModule) -> AbstractContextManager[None]:
            return fp32_throughout(device_type) if upcast else full_precision(device_type)

        return cls(
            trainer, module, stage, hook_context=context, step_context=context, epoch_end_context=_nothing,
            upcast=upcast,
        )  # fmt: skip

    @classmethod
    def in_amp(
        cls,
        trainer: Trainer,
        module: LightningModule,
        stage: Stage,
        metrics: Mapping[str, Tensor] | None = None,
    ) -> EvaluationPass:
        """Make a pass in the contexts of the real evaluation."""
        plugin = trainer.precision_plugin
        in_step = plugin.test_step_context if stage == "test" else plugin.val_step_context
        ours = isinstance(plugin, AmpPrecision)  # this context also handles metrics, outputs and the epoch-end hook
        return cls(
            trainer,
            module,
            stage,
            hook_context=_nothing,
            step_context=partial(plugin.evaluation_context, step=f"{stage}_step") if ours else lambda _: in_step(),
            epoch_end_context=plugin.evaluation_context if ours else _nothing,
            metrics=metrics,
        )

    def start_afresh(self) -> None:
        """Reset the metrics of the batches so far, and run the hooks before the first batch."""
        forget_results(self.view)
        self._metrics.clear()
        with self.active():
            for module in self.module.modules():
                if is_metric(module):
                    module.reset()  # pyright: ignore[reportCallIssue]
        hook_context = self._hook_context(self.module)
        with self.active(), self._shadow.running(), hook_context, self._shadow.reduce.suspended():
            for hook in (f"on_{self._stage}_start", f"on_{self._stage}_epoch_start"):
                if is_overridden(hook, self.module):
                    self._shadow.call(hook)

    def step(
        self, batch: Any, batch_idx: int, loader_idx: int | None, watch: AbstractContextManager[Any] | None = None
    ) -> None:
        """Run the batch hooks and the step on a copy of a batch, and restore the random generators.

        Args:
            batch: The batch; unchanged.
            batch_idx: The index of the batch in its loader.
            loader_idx: Index of the batch's loader; `None` with one loader.
            watch: Entered around the step.

        """
        module, call, stage = self.module, self._shadow.call, self._stage
        with self.active(), self._shadow.running(), paired_random(self.device_type):
            if loader_idx != self._loader_idx:
                self._finish_loader()
                self._loader_idx = loader_idx
            batch = copy_batch(batch, upcast=self._upcast)
            args = (batch, batch_idx) if loader_idx is None else (batch, batch_idx, loader_idx)
            step_args = args
            if not is_param_in_hook_signature(getattr(module, f"{stage}_step"), "batch_idx", min_args=2):
                step_args = (batch, *args[2:])
            start_evaluation_batch(self.view, batch, loader_idx)
            try:
                # Values of single steps are not compared. If they were reduced and this rank ran out of memory before,
                # the other ranks would wait for it.
                with self._shadow.reduce.suspended():
                    with self._hook_context(module):
                        call(f"on_{stage}_batch_start", *args)
                    with self._step_context(module), watch or nullcontext():
                        outputs = call(f"{stage}_step", *step_args)
                    with self._hook_context(module):
                        call(f"on_{stage}_batch_end", outputs, *args)
            finally:
                finish_evaluation_batch(self.view)

    def active(self) -> AbstractContextManager[None]:
        """Return the context for code that changes the shadow between its steps. All ranks must enter it."""
        return self._shadow.active()

    def finish(self, random_state: RandomState | None) -> dict[str, Tensor]:
        """Run the epoch-end hook and return the epoch's metrics by name.

        `random_state` has the random generators before the epoch-end hook of the real module.
        """
        if self._shadow.exchange is None:  # averaged weights may have been swapped out before the hook
            with torch.inference_mode(False), torch.no_grad():
                for own, value in zip(self.module.parameters(), self._real_module.parameters(), strict=True):
                    own.copy_(value)
        in_order = paired_random(self.device_type, random_state)
        with self.active(), self._shadow.running(), in_order, self._hook_context(self.module):
            self._finish_loader()
            start_evaluation_epoch_end(self.view)
            with self._epoch_end_context(self.module):
                self._shadow.call(f"on_{self._stage}_epoch_end")
            self._metrics.update(finish_evaluation_epoch_end(self.view))
        return self._metrics

    def close(self) -> None:
        """Free the shadow."""
        self._shadow.close()

    def _finish_loader(self) -> None:
        self._metrics.update(finish_evaluation_loader(self.view))


def _nothing(_: LightningModule) -> AbstractContextManager[None]:
    return nullcontext()


def follow_ddp_buffers(trainer: Trainer, module: LightningModule) -> None:
    """Copy rank 0's buffers to the shadows of all ranks, as DDP does for the real module at its next forward.

    Otherwise the BatchNorm statistics of shadow and real module would differ on all other ranks. There is one broadcast
    per dtype.
    """
    ddp = trainer.strategy.model
    # DDP does not copy buffers after a forward without synchronised gradients, as in manual optimization.
    if not isinstance(ddp, DistributedDataParallel) or not ddp.will_sync_module_buffers():
        return
    by_dtype: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for name, buffer in module.named_buffers():
        if name not in ddp.parameters_to_ignore and buffer.numel():
            by_dtype.setdefault((buffer.dtype, buffer.device), []).append(buffer)
    for buffers in by_dtype.values():
        flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
        torch.distributed.broadcast(flat, group_src=0, group=ddp.process_group)
        with torch.no_grad():
            for buffer, values in zip(buffers, flat.split([b.numel() for b in buffers]), strict=True):
                buffer.copy_(values.view_as(buffer))
