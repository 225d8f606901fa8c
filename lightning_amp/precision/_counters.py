"""What the plugin says about its steps to whoever asks."""

from __future__ import annotations

from lightning_amp.scaling import RecordLog, StepRecord


class Counters:
    """Read-only views of the plugin's log."""

    _log: RecordLog

    @property
    def last_step(self) -> StepRecord | None:
        """The last attempted optimizer step. Waits for the device."""
        self._log.flush()
        return self._log.last

    @property
    def num_steps(self) -> int:
        """Optimizer steps that were applied in this run: in all fits of one Trainer. Waits for the device."""
        self._log.flush()
        return self._log.num_steps

    @property
    def num_skipped(self) -> int:
        """Optimizer steps that were skipped in this run: in all fits of one Trainer. Waits for the device."""
        self._log.flush()
        return self._log.num_skipped

    @property
    def records(self) -> RecordLog:
        """The log that callbacks listen to."""
        return self._log
