"""Write the files of `OverflowLocator`: each report as JSON, and its step, for `lightning_amp.tracing.replay`."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from typing_extensions import final

from lightning_amp import _messages
from lightning_amp._files import child, write_atomically
from lightning_amp.reports import OverflowReport
from lightning_amp.shadow import KeptBatch, gather_on_zero
from lightning_amp.tracing import make_bundle


@final
class ReportFiles:
    """Writes the files on rank 0. If that fails, it warns once, and training goes on."""

    def __init__(self, dirpath: str | Path, save_bundles: bool) -> None:
        self.dirpath, self._save_bundles = dirpath, save_bundles
        self._warned = False

    def save(
        self, trainer: Trainer, module: LightningModule, reports: Sequence[OverflowReport], step: KeptBatch | None
    ) -> None:
        """Write the reports of all ranks on one skipped step.

        All ranks must call this, because each sends its batch.
        """
        bundles: list[bytes | None] = []
        if self._save_bundles:
            mine = next((r for r in reports if r.rank == trainer.global_rank), None)
            packed = None if mine is None or step is None else self._packed(trainer, module, mine, step)
            bundles = gather_on_zero(trainer, packed)
        if trainer.global_rank != 0:
            return
        try:
            for report in reports:
                stem = child(self.dirpath, f"overflow_step{report.record.index:05d}_rank{report.rank}")
                write_atomically(f"{stem}.json", lambda file, report=report: file.write(report.to_json()))
                packed = bundles[report.rank] if bundles else None
                if packed is not None:
                    bundle = _unpacked(packed, module)
                    write_atomically(f"{stem}.pt", lambda file, bundle=bundle: torch.save(bundle, file), mode="binary")
        except Exception as error:  # such as a full disk
            self._warn(error)

    def _packed(
        self, trainer: Trainer, module: LightningModule, report: OverflowReport, step: KeptBatch
    ) -> bytes | None:
        """Pack a bundle without the parameters, which rank 0 has."""
        parameters = dict(module.named_parameters())
        file = io.BytesIO()
        try:
            bundle = make_bundle(
                module_state={name: value for name, value in module.state_dict().items() if name not in parameters},
                batch=step.batch,
                batch_idx=step.batch_idx,
                random_state=step.random_state,
                scale=report.record.scale,
                loss_divisor=float(trainer.accumulate_grad_batches) if module.automatic_optimization else 1.0,
                report=report.as_dict(),
            )
            torch.save(bundle, file)
        except Exception as error:  # such as a batch that cannot be pickled
            self._warn(error)
            return None
        return file.getvalue()

    def _warn(self, error: Exception) -> None:
        if not self._warned:
            self._warned = True
            text = f"`OverflowLocator` could not write to `{self.dirpath}`: {error}. Training is not affected."
            _messages.warn_on_this_rank(text)


def _unpacked(packed: bytes, module: LightningModule) -> dict[str, Any]:
    """Complete a bundle by the parameters of this rank, which are the same on all ranks."""
    bundle = torch.load(io.BytesIO(packed), weights_only=False)
    state = {name: value for name, value in module.state_dict().items() if name not in bundle["module_state"]}
    state = {name: value.detach().cpu() for name, value in state.items()}
    return {**bundle, "module_state": {**state, **bundle["module_state"]}}
