"""The callback that measures a fit: memory, then time, then the host's waits."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import lightning as L
import torch
from typing_extensions import final, override

from benchmarks.headline._waits import SyncWarnings
from lightning_amp._containers import tensors_in
from lightning_amp.measure import PeakMemory, StepTimer, num_bytes

_MOST_SETTLING = 40
"""Steps after which a loss scale counts as settled."""
_QUIET_STEPS = 3
"""Number of steps without a skip before the timing begins."""


@final
class Lengths(NamedTuple):
    """The number of steps of a run.

    Attributes:
        warm_up: Least number of steps before the first timed one.
        timed: Largest number of timed steps.
        timed_s: Approximate seconds of all timed steps, if that is fewer steps.
        least: Least number of timed steps, however long they take.
        watched: Steps after these in which waits of the host are counted.

    """

    warm_up: int = 6
    timed: int = 36
    timed_s: float = 5.0
    least: int = 5
    watched: int = 3


TINY = Lengths(warm_up=3, timed=5, timed_s=1.0, least=2, watched=1)


@final
class Measure(L.Callback):
    """Measures a fit, and ends it.

    It waits for the device in the warm-up only. Waits are counted after the timed steps, because counting takes time.

    Args:
        device: The device.
        batch_size: Samples of a step.
        lengths: The number of steps.

    Attributes:
        step_s: Seconds of each timed step.
        memory: Bytes by part, and the peak, which is missing if it could not be measured.
        memory_of: What the peak counts: `"device"` or `"tensors"`.
        waits: Waits of the host per step; `None` if unknown.
        num_timed: Timed steps. The first starts the clock, so `step_s` has one less.
        num_skipped: Number of skipped steps among them.
        loss: The loss of the last step.

    """

    def __init__(self, device: torch.device, batch_size: int, lengths: Lengths) -> None:
        self._where, self._batch_size, self._lengths = device, batch_size, lengths
        self._on_cuda = device.type == "cuda"
        self._timer = StepTimer(device)
        self._phase = "warm-up"
        self._count = self._quiet = 0
        self._settling = StepTimer(device)
        self._seen = _Skips()
        self._sync_warnings = SyncWarnings()
        self._peak: PeakMemory | None = None
        self._peak_bytes: int | None = None
        self.step_s: list[float] = []
        self.memory: dict[str, int] = {}
        self.memory_of = ""
        self.waits: float | None = None
        self.num_timed = 0
        self.num_skipped = 0
        self.loss = math.nan

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._peak = PeakMemory(self._where, pl_module)
        self.memory_of = str(self._peak.memory_of)
        self._peak.resume()

    @override
    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._phase == "warm-up":
            self._settling.resume()

    @override
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        trainer.should_stop = False
        self._count += 1
        if self._phase == "warm-up":
            self._warm_up(trainer, pl_module)
        elif self._phase == "timed":
            self._timer.lap(self._batch_size)
            if self._count == self.num_timed:
                self._end_timing(trainer)
        elif self._count == self._lengths.watched:
            self._end_watching()
            self.loss = float(outputs["loss"])
            trainer.should_stop = True

    @override
    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._end_watching()

    # -- phases --------------------------------------------------------------------------------------------------------

    def _warm_up(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self._settling.lap()
        self._settling.pause()
        self._quiet = 0 if self._seen.since(trainer) else self._quiet + 1
        settled = self._count >= self._lengths.warm_up and self._quiet >= _QUIET_STEPS
        if not settled and self._count < max(_MOST_SETTLING, self._lengths.warm_up):
            return
        assert self._peak is not None
        self.memory = held(trainer, module)
        if self._on_cuda:
            self._peak.resume()  # measure from here on, without one-time costs of the first steps
        else:
            self._peak_bytes = self._peak.close()  # a profiler measures it, which takes time
        (took_s,) = self._settling.step_s([self._count - 1])
        steps = int(self._lengths.timed_s / max(took_s, 1e-6))
        self.num_timed = max(self._lengths.least, min(self._lengths.timed, steps))
        self._begin("timed")
        self._timer.resume()

    def _begin(self, phase: str) -> None:
        self._phase, self._count = phase, 0

    def _end_timing(self, trainer: L.Trainer) -> None:
        assert self._peak is not None
        self._timer.pause()
        self.step_s = self._timer.step_s()
        self.num_skipped = self._seen.since(trainer)
        if self._on_cuda:
            self._peak_bytes = self._peak.close()
        if self._peak_bytes is not None:
            self.memory["peak"] = self._peak_bytes
        if self._on_cuda:
            self._sync_warnings.start()
        self._begin("watched")

    def _end_watching(self) -> None:
        waits = self._sync_warnings.stop()
        if waits is not None:
            self.waits = waits / self._lengths.watched


@final
class _Skips:
    """Counts skipped steps: ours by the plugin's count, Lightning's by how often its scale was halved.

    Reading either waits for the device.
    """

    def __init__(self) -> None:
        self._skipped = 0
        self._scale = 0.0

    def since(self, trainer: L.Trainer) -> int:
        """Return the number of steps skipped since the last call; 0 at the first scale."""
        plugin: Any = trainer.precision_plugin
        number = 0
        if hasattr(plugin, "num_skipped"):
            number = plugin.num_skipped - self._skipped
            self._skipped = plugin.num_skipped
        elif getattr(plugin, "scaler", None) is not None:
            scale = float(plugin.scaler.get_scale())
            before = self._scale or 2.0**16
            number = max(0, round(math.log2(before / scale)))
            self._scale = scale
        return number


def held(trainer: L.Trainer, module: L.LightningModule) -> dict[str, int]:
    """Return the bytes of weights and buffers, gradients, and optimizer states, after a step."""
    states = [state for optimizer in trainer.optimizers for state in optimizer.state.values()]
    return {
        "weights": num_bytes([*module.parameters(), *module.buffers()]),
        "gradients": num_bytes(p.grad for p in module.parameters() if p.grad is not None),
        "states": num_bytes(tensor for _, tensor in tensors_in(states)),
    }
