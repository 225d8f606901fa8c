"""The outputs of each module against fp32, added up over the batches of an evaluation."""

from __future__ import annotations

import math

import torch
from lightning.pytorch import Trainer
from torch import Tensor
from typing_extensions import final

from lightning_amp.findings import ModuleRow
from lightning_amp.numerics import fidelity
from lightning_amp.shadow._output_comparison import OutputComparison
from lightning_amp.shadow._ranks import gather


@final
class OutputTotals:
    """Sums by module, on the device."""

    def __init__(self) -> None:
        self._kinds: dict[str, str] = {}
        self._calls: dict[str, int] = {}
        self._values: dict[str, int] = {}
        self._sums: dict[str, Tensor] = {}

    def add(self, outputs: OutputComparison) -> None:
        """Add the calls of one batch."""
        for call, _ in outputs.calls:
            if call.sums is None:
                continue
            name = call.name
            self._kinds[name] = call.kind
            self._calls[name] = self._calls.get(name, 0) + 1
            self._values[name] = self._values.get(name, 0) + call.num_values
            added = call.sums.sum(0)
            self._sums[name] = self._sums[name] + added if name in self._sums else added

    def rows(self, trainer: Trainer) -> list[ModuleRow]:
        """Return a row for each module, over all ranks. All must call. Waits for the device."""
        names = list(self._sums)
        sums = torch.stack([self._sums[name] for name in names]).cpu() if names else torch.zeros(0, 6)
        own = [(n, self._kinds[n], self._calls[n], self._values[n], row) for n, row in zip(names, sums, strict=True)]
        total: dict[str, tuple[str, int, int, Tensor]] = {}
        for name, kind, calls, values, row in [one for rank in gather(trainer, own) for one in rank]:
            before = total.get(name, (kind, 0, 0, torch.zeros_like(row)))
            total[name] = kind, before[1] + calls, before[2] + values, before[3] + row
        return [_row(trainer, name, kind, calls, values, row) for name, (kind, calls, values, row) in total.items()]


def _row(trainer: Trainer, name: str, kind: str, calls: int, values: int, sums: Tensor) -> ModuleRow:
    sqnr_db, cosine = (float(value) for value in fidelity(sums[:3]))
    varying = float(fidelity(sums[3:])[0])
    rms = math.sqrt(float(sums[0]) / max(values, 1))
    return ModuleRow(trainer.current_epoch, trainer.global_step, name, kind, calls, sqnr_db, varying, cosine, rms)
