"""The callback that watches an arm, and changes nothing."""

from __future__ import annotations

import contextlib
import os
import signal
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.profilers import PyTorchProfiler
from lightning.pytorch.utilities.data import extract_batch_size
from typing_extensions import final, override

from lightning_amp._compat import _lightning
from lightning_amp.measure import PeakMemory, StepTimer, is_settled
from lightning_amp.shadow import matmul_flops

_MOST_POINTS = 500


@final
class Observer(Callback):
    """Keeps the curves, the times and the memory of one run.

    Args:
        report: Is told how far training is: a share from 0 to 1, or `None` if nobody knows, and a text. Seldom.

    """

    def __init__(self, report: Callable[[float | None, str], None]) -> None:
        self._report = report
        self._parent = os.getppid()
        self._reported_s = 0.0
        self._watch: StepTimer | None = None
        self._memory: PeakMemory | None = None
        self._losses: list[tuple[int, Any]] = []
        self._stride = 1
        self._batch: tuple[Any, int] | None = None
        self._steps_at_start = 0
        self._over = False
        self.curves: dict[str, list[tuple[int, float]]] = {}
        self.last_validation = 0
        self.directions: dict[str, str] = {}
        self.first_batch_s: float | None = None
        self.device = torch.device("cpu")
        self.matmul_flops: dict[str, float] = {}
        self.peak_memory_bytes: int | None = None
        self.memory_of: str | None = None

    # -- training ------------------------------------------------------------------------------------------------------

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.device = trainer.strategy.root_device
        self.first_batch_s = time.time()
        self._steps_at_start = trainer.global_step
        profiled = isinstance(trainer.profiler, PyTorchProfiler)  # type: ignore[attr-defined]
        self._memory = PeakMemory.on(self.device, pl_module, profiled=profiled)
        self._memory.resume()
        self._watch = StepTimer(self.device)
        self._watch.resume()

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if os.getppid() != self._parent:  # who asked for this arm is gone
            _end_process_group()
        self._batch = batch, batch_idx

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        watch, memory = self._watch, self._memory
        assert watch is not None
        assert memory is not None
        watching = self.memory_of is None and memory.memory_of == "tensors"
        rows = num_rows(batch)
        watch.lap(None if rows is None else rows * trainer.world_size, watched=watching)
        if watching:
            skipped = getattr(trainer.precision_plugin, "num_skipped", 0)
            if is_settled(watch.num_laps, trainer.global_step - self._steps_at_start, skipped):
                self._close_memory()
                watch.resume()
        self._keep_loss(watch.num_laps, outputs)
        if time.monotonic() - self._reported_s > 0.2:
            self._reported_s = time.monotonic()
            self._report(*_progress(trainer, watch.num_laps))

    def _keep_loss(self, step: int, outputs: Any) -> None:
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if step % self._stride or not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            return
        self._losses.append((step, loss.detach().clone()))  # read later: it stays on the device
        if len(self._losses) >= 2 * _MOST_POINTS:
            self._losses = self._losses[1::2]
            self._stride *= 2

    def _close_memory(self) -> None:
        if self._memory is not None and self.memory_of is None:
            self.peak_memory_bytes = self._memory.close()
            self.memory_of = self._memory.memory_of

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._pause()
        self._close_memory()
        if self._batch is not None:
            with contextlib.suppress(Exception):  # a figure less
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
        step = self.last_validation = 0 if self._watch is None else self._watch.num_laps
        for name, value in _lightning.evaluation_metrics(trainer).items():
            if not name.startswith("amp/") and name not in ("step", "epoch") and value.numel() == 1:
                self.curves.setdefault(name, []).append((step, float(value)))
        self.directions.update(_lightning.metric_directions(trainer))
        if self._watch is not None:
            self._watch.resume()
        if self._memory is not None:
            self._memory.resume()

    def _pause(self) -> None:
        if self._watch is not None:
            self._watch.pause()
        if self._memory is not None:
            self._memory.pause()

    # -- afterwards ----------------------------------------------------------------------------------------------------

    @property
    def watch(self) -> StepTimer:
        """Return the times of the steps."""
        return self._watch or StepTimer(self.device)

    def losses(self) -> list[tuple[int, float]]:
        """Return the losses of training, at most some hundreds. Waits for the device."""
        thin = max(1, -(-len(self._losses) // _MOST_POINTS))
        return [(step, float(loss)) for step, loss in self._losses[::thin]]


def num_rows(batch: Any) -> int | None:
    """Return the rows of a batch; `None` if nobody knows."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return extract_batch_size(batch)
        except Exception:  # it is the user's own structure
            return None


def _progress(trainer: Trainer, num_laps: int) -> tuple[float | None, str]:
    """Return the share of training that is done, and where it is."""
    batches, epochs, steps = trainer.num_training_batches, trainer.max_epochs, trainer.max_steps
    shares: list[float] = []
    if steps > 0:
        shares.append(trainer.global_step / steps)
    text = f"epoch {trainer.current_epoch + 1}"
    if epochs is not None and epochs > 0:
        text += f"/{epochs}"
        if batches not in (0, float("inf")):
            shares.append(num_laps / (epochs * batches))
    return (min(1.0, max(shares)) if shares else None), text


def _end_process_group() -> None:
    """End this process and those that it started: its results are of no use to anybody."""
    if hasattr(os, "killpg") and os.getpgid(0) == os.getpid():
        os.killpg(0, signal.SIGKILL)
    raise SystemExit("the process that asked for this arm is gone")
