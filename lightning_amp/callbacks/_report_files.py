"""The files of `OverflowLocator`: a report as JSON, and the step it is about, to run it again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from typing_extensions import final

from lightning_amp import _messages
from lightning_amp._files import write_atomically
from lightning_amp._urls import child
from lightning_amp.reports import OverflowReport
from lightning_amp.shadow import Finding, gather_on_zero, packed_step, unpacked_step


@final
class ReportFiles:
    """Writes them, on rank 0; if that does not work it says so once, and training goes on.

    Args:
        dirpath: Folder or URL.
        save_bundles: Whether to save the step, too.

    """

    def __init__(self, dirpath: str | Path, save_bundles: bool) -> None:
        self._dirpath, self._save_bundles = dirpath, save_bundles
        self._warned = False

    def save(
        self, trainer: Trainer, module: LightningModule, reports: Sequence[OverflowReport], finding: Finding
    ) -> None:
        """Write the reports of one skipped step. All ranks must call: what one alone has is sent.

        Args:
            trainer: The trainer.
            module: What it trains.
            reports: Of all ranks.
            finding: Of this one.

        """
        bundles: list[bytes | None] = []
        if self._save_bundles:
            mine = next((r for r in reports if r.rank == trainer.global_rank), None)
            bundles = gather_on_zero(trainer, None if mine is None else self._packed(trainer, module, mine, finding))
        if trainer.global_rank != 0:
            return
        try:
            for report in reports:
                stem = child(self._dirpath, f"overflow_step{report.record.index:05d}_rank{report.rank}")
                write_atomically(f"{stem}.json", lambda file, report=report: file.write(report.to_json()))
                packed = bundles[report.rank] if bundles else None
                if packed is not None:
                    bundle = unpacked_step(packed, module)
                    write_atomically(f"{stem}.pt", lambda file, bundle=bundle: torch.save(bundle, file), mode="binary")
        except Exception as error:  # a full disk
            self._warn(error)

    def _packed(
        self, trainer: Trainer, module: LightningModule, report: OverflowReport, finding: Finding
    ) -> bytes | None:
        if finding.step is None:
            return None
        try:
            return packed_step(trainer, module, finding.step, report.record.scale, report.as_dict())
        except Exception as error:  # a batch that cannot be pickled
            self._warn(error)
            return None

    def _warn(self, error: Exception) -> None:
        if not self._warned:
            self._warned = True
            text = f"`OverflowLocator` could not write to `{self._dirpath}`: {error}. Training is not affected."
            _messages.warn_on_this_rank(text)
