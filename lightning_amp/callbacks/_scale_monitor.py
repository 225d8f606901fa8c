"""`ScaleMonitor`: log and keep the loss scale and the skipped steps."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from typing_extensions import final, override

from lightning_amp import _messages
from lightning_amp._arguments import is_number, require, require_count
from lightning_amp._compat import _lightning, _torch
from lightning_amp._compat._names import LightningModule, Trainer
from lightning_amp._files import location
from lightning_amp._text import exact
from lightning_amp.callbacks._observer import Observer, is_log_point, log_metrics
from lightning_amp.findings import StepRecord
from lightning_amp.precision import AmpPrecision
from lightning_amp.reports import SCALE_HISTORY_FILE, ScaleHistory
from lightning_amp.scaling import Subscription

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LOSS_SCALE = "amp/loss_scale"
SKIPPED_STEPS = "amp/skipped_steps"
SKIP_RATE = "amp/skip_rate"


@final
class ScaleMonitor(Observer):
    """Shows the loss scale and the skipped steps.

    .. code-block:: python

        monitor = ScaleMonitor()
        trainer = L.Trainer(plugins=[AmpPrecision("fp16")], callbacks=[monitor], max_epochs=1)
        trainer.fit(model, data)
        print(monitor.history.summary())  # 12 of 4,000 steps skipped, 11 in the first 20; scale 2**16 -> 2**10

    ==================== ===============================================================================
    key                  value, at every log point and, if it changed since, at the end of fit
    ==================== ===============================================================================
    `amp/loss_scale`     the scale that the next step will use; 1.0 without scaling
    `amp/skipped_steps`  optimizer steps skipped so far in this run
    `amp/skip_rate`      share of the steps attempted so far that were skipped; from 0 to 1
    ==================== ===============================================================================

    At the end of fit one line sums up: `12 of 4,000 steps skipped, 11 in the first 20; scale 2**16 -> 2**10`.

    With :class:`~lightning_amp.AmpPrecision` the monitor reads the plugin's records, which are exact, in every
    precision. With Lightning's own `MixedPrecision` or `FSDPPrecision` it reads their `GradScaler` after each batch,
    and counts each fall of the scale as a skip. It misses a skip that does not lower the scale. With any other plugin
    it logs one line and does nothing.

    Args:
        log_every_n_steps: Optimizer steps between two log points; `None` takes the Trainer's `log_every_n_steps`.
        warn_below: Warns once when the scale falls below this number, or below its start if that is less. `None` never
            warns. Below the default, 1.0, scaling makes gradients smaller instead of larger.
        dirpath: Folder for `scale_history.csv`, or its URL (`"s3://bucket/run"`, as Lightning's callbacks take it). The
            whole file is written with every checkpoint and at the end of fit. A resumed run continues it, and a killed
            run leaves the history up to its last checkpoint. `None` writes no file. If it cannot be written, the
            monitor warns once and training goes on.

    Attributes:
        history: All steps up to the last log point, or to the end of fit. It survives a resume, and continues in a
            second fit of the same Trainer. Another Trainer begins a new history.

    Raises:
        ValueError: If an argument is out of its range, or fsspec does not support the protocol of `dirpath`.
        ImportError: If the driver for `dirpath` is not installed.

    Cost: no wait for the device between two log points; a log point is one transfer. A million steps with a
    hundred changes take a hundred rows.
    """

    def __init__(
        self,
        log_every_n_steps: int | None = None,
        *,
        warn_below: float | None = 1.0,
        dirpath: str | os.PathLike[str] | None = None,
    ) -> None:
        require_count("log_every_n_steps", log_every_n_steps, none="or `None`")
        fine = warn_below is None or (is_number(warn_below, finite=False) and warn_below >= 0)
        require(fine, "warn_below", "a number of 0 or more", warn_below, none="or `None`")
        self.log_every_n_steps = log_every_n_steps
        self.warn_below = warn_below
        self.dirpath = None if dirpath is None else location(dirpath, "dirpath")
        self._plugin: AmpPrecision | None = None
        self._subscription: Subscription | None = None
        self._watch: _ScalerWatch | None = None
        self._steps_seen = 0
        super().__init__()

    @override
    def _forget(self) -> None:
        super()._forget()
        self.history = ScaleHistory()
        self._logged: dict[str, float] = {}

    def plot(self, path: str | os.PathLike[str] | None = None) -> Figure:
        """Draw the history, as `history.plot` does."""
        return self.history.plot(path)

    # -- hooks ---------------------------------------------------------------------------------------------------------

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        plugin = trainer.strategy.precision_plugin
        scaler = getattr(plugin, "scaler", None)
        self._steps_seen = trainer.global_step
        if isinstance(plugin, AmpPrecision):
            self._plugin, self._subscription = plugin, plugin.records.subscribe(self.history.extend)
        elif isinstance(scaler, torch.amp.GradScaler) and scaler.is_enabled():
            self._watch = _ScalerWatch(scaler, self.history)
        else:
            advice = "With `plugins=[AmpPrecision(...)]` it shows skipped steps in every precision"
            self._stand_aside(f"the plugin `{type(plugin).__name__}` has no loss scaler. {advice}")

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._plugin is None and self._watch is None:
            return
        before, self._steps_seen = self._steps_seen, trainer.global_step
        if self._steps_seen == before:
            return
        if self._watch is not None:
            self._watch.observe(self._steps_seen - before)
        if is_log_point(trainer, before, self.log_every_n_steps):
            self._report(trainer, is_log_point=True)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._plugin is None and self._watch is None:
            return
        self._report(trainer)
        self._save()
        _messages.info(f"ScaleMonitor: {self.history.summary()}.")

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        # An error in this hook must not hide the exception, and must not prevent the Trainer's teardown.
        with contextlib.suppress(Exception):
            self._read()
        self._save()
        super().on_exception(trainer, pl_module, exception)

    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._save()

    @override
    def _close(self) -> None:
        if self._subscription is not None:
            self._subscription.close()
        self._plugin = self._subscription = self._watch = None

    @override
    def state_dict(self) -> dict[str, Any]:
        if self._plugin is not None:
            self._plugin.flush()  # hooks may have stepped since the last batch
        self._read()
        return self.history.state_dict()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.history.load_state_dict(state_dict)
        if any(record.next_scale < (self.warn_below or 0.0) for record in self.history):
            self._is_news("scale")  # it was said before the resume

    # -- work ----------------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        if self._plugin is not None:
            self._plugin.records.flush()
        elif self._watch is not None:
            self._watch.read()

    def _report(self, trainer: Trainer, *, is_log_point: bool = False) -> None:
        self._read()
        last = self.history.last
        if last is None:
            return
        skipped, scale = self.history.num_skipped, last.next_scale
        values = {LOSS_SCALE: scale, SKIPPED_STEPS: float(skipped), SKIP_RATE: skipped / self.history.num_attempted}
        if is_log_point or values != self._logged:
            log_metrics(trainer, values)
        self._logged = values
        least = min(self.warn_below or 0.0, next(iter(self.history)).scale)  # a run may start below
        if scale < least and self._is_news("scale"):
            _messages.warn(
                f"The loss scale fell to {exact(scale)}, below {exact(least)} ({self.history.summary()})."
                " `OverflowLocator` finds the operation, and says whether fp32 overflows too. If it does not, use"
                " 'bf16', which has the range of fp32 and needs no loss scale."
            )

    def _save(self) -> None:
        # a fit that failed before its first step does not overwrite an earlier file
        if self.history.last is not None and _lightning.is_rank_zero():
            self._write(SCALE_HISTORY_FILE, self.history.to_csv)


@final
class _ScalerWatch:
    """Notes the scale of another plugin's scaler after each batch without waiting, and reads the notes in blocks."""

    def __init__(self, scaler: torch.amp.GradScaler, history: ScaleHistory) -> None:
        self._scaler, self._history = scaler, history
        self._last_scale = scaler.get_scale()
        self._pending: list[tuple[Tensor, int]] = []

    def observe(self, num_steps: int) -> None:
        self._pending.append((_torch.scale_tensor(self._scaler).clone(), num_steps))

    def read(self) -> None:
        pending, self._pending = self._pending, []
        scales = torch.stack([scale for scale, _ in pending]).tolist() if pending else ()
        for scale, (_, num_steps) in zip(scales, pending, strict=False):
            for left in reversed(range(num_steps)):  # each step of a batch may have lowered the scale
                before, index = self._last_scale, self._history.num_attempted
                after = max(before * self._scaler.get_backoff_factor(), scale) if left else scale
                reason = "gradient" if after < before else "none"
                self._history.extend([StepRecord(index, 0, before, after, after < before, reason, "fp16")])
                self._last_scale = after
