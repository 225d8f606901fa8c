"""Watch one training, and change nothing in it."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from typing_extensions import final, override

from lightning_amp._compat import _lightning
from lightning_amp._compat._names import Callback, LightningModule, PyTorchProfiler, Trainer, extract_batch_size
from lightning_amp.compare._checks import wrong_margin
from lightning_amp.compare._run import Margin
from lightning_amp.compare._stats import Direction
from lightning_amp.measure import MemoryOf, PeakMemory, StepTimer, is_settled
from lightning_amp.shadow import matmul_flops

_MOST_LOSSES = 500


@final
class Observer(Callback):
    """Notes the curves, the times and the memory of one run.

    Args:
        margins: The first validation must log their metrics.

    Raises:
        ValueError: By its hooks, if it does not.

    """

    def __init__(self, margins: Mapping[str, Margin]) -> None:
        self._margins = margins
        self._memory: PeakMemory | None = None
        self._losses: list[tuple[int, Any]] = []
        self._stride = 1
        self._batch: tuple[Any, int] | None = None
        self._steps_at_start = 0
        self._over = False
        self.device = torch.device("cpu")
        self.watch = StepTimer(self.device)
        self.curves: dict[str, list[tuple[int, float]]] = {}
        self.last_validation = 0
        self.directions: dict[str, Direction] = {}
        self.matmul_flops: dict[str, float] = {}
        self.peak_memory_bytes: int | None = None
        self.memory_of: MemoryOf | None = None

    # -- training ------------------------------------------------------------------------------------------------------

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.device = trainer.strategy.root_device
        self._steps_at_start = trainer.global_step
        profiled = isinstance(trainer.profiler, PyTorchProfiler)  # type: ignore[attr-defined]
        self._memory = PeakMemory(self.device, pl_module, profiled=profiled)
        self.watch = StepTimer(self.device)
        self._resume()

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._batch = batch, batch_idx

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert self._memory is not None
        watching = self.memory_of is None and self._memory.memory_of == "tensors"
        rows = num_rows(batch)
        self.watch.lap(None if rows is None else rows * trainer.world_size, watched=watching)
        if watching:
            skipped = getattr(trainer.precision_plugin, "num_skipped", 0)
            if is_settled(self.watch.num_laps, trainer.global_step - self._steps_at_start, skipped):
                self._close_memory()
                self.watch.resume()
        self._keep_loss(self.watch.num_laps, outputs)

    def _keep_loss(self, step: int, outputs: Any) -> None:
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if step % self._stride or not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            return
        # kept on the device, so that this step does not wait for the value
        self._losses.append((step, loss.detach().clone()))
        if len(self._losses) == _MOST_LOSSES:
            self._losses = self._losses[1::2]
            self._stride *= 2

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._pause()
        self._close_memory()
        if self._batch is not None:
            with contextlib.suppress(Exception):  # without it, the report has no FLOPs
                self.matmul_flops = matmul_flops(trainer, pl_module, *self._batch)
        self._batch, self._over = None, True

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._batch = None
        with contextlib.suppress(Exception):
            self._pause()
            self._close_memory()

    # -- validation ----------------------------------------------------------------------------------------------------

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._pause()

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking or self._over:
            return
        step = self.last_validation = self.watch.num_laps
        for name, value in _lightning.evaluation_metrics(trainer).items():
            if not name.startswith("amp/") and name not in ("step", "epoch") and value.numel() == 1:
                self.curves.setdefault(name, []).append((step, float(value)))
        self.directions.update(_lightning.metric_directions(trainer))
        if wrong := wrong_margin(self._margins, self.curves, self.directions):
            raise ValueError(wrong)
        self._margins = {}
        self._resume()

    # -- clock and memory ----------------------------------------------------------------------------------------------

    def _resume(self) -> None:
        self.watch.resume()
        if self._memory is not None:
            self._memory.resume()

    def _pause(self) -> None:
        self.watch.pause()
        if self._memory is not None:
            self._memory.pause()

    def _close_memory(self) -> None:
        if self._memory is not None and self.memory_of is None:
            self.peak_memory_bytes = self._memory.close()
            self.memory_of = self._memory.memory_of

    def losses(self) -> list[tuple[int, float]]:
        """Return the training losses, a few hundred at most. This waits for the device."""
        return [(step, float(loss)) for step, loss in self._losses]


def num_rows(batch: Any) -> int | None:
    """Return the number of rows of a batch; `None` if it is unknown."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return extract_batch_size(batch)
        except Exception:  # a batch may have any structure
            return None
