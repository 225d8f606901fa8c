"""Keep the records of a plugin from one fit of a Trainer to the next, and find the entries of other plugins."""

from __future__ import annotations

from typing import Any

import torch
from typing_extensions import final, override

from lightning_amp import _messages
from lightning_amp._last_trainer import LastTrainer
from lightning_amp.scaling import Ledger

STOCK_KEY = "MixedPrecision"
"""Stock Lightning keeps its scaler under this key.

Our scaler is saved there too, so that a run can continue in stock Lightning.
"""

STOCK_FSDP_KEY = "FSDPPrecision"
"""The same for `FSDPStrategy`."""

_KEYS = ("AmpPrecision", "FSDPAmpPrecision", STOCK_KEY, STOCK_FSDP_KEY, "native_amp_scaling_state")


@final
class TrainerLedger(Ledger):
    """The records of all steps of a plugin in one Trainer."""

    _last_trainer: LastTrainer | None = None

    def begin(self, trainer: Any, scaler: torch.amp.GradScaler | None) -> bool:
        """Begin a fit, and return whether it continues the last fit, in the same Trainer."""
        self._last_trainer = self._last_trainer or LastTrainer()
        goes_on = self._last_trainer.goes_on(trainer)
        self.renew(scaler, goes_on=goes_on)
        return goes_on

    def knows(self, trainer: Any) -> bool:
        """Return whether the last fit was one of this Trainer."""
        return self._last_trainer is not None and self._last_trainer.knows(trainer)

    @override
    def load(self, state: dict[str, Any], scaler: torch.amp.GradScaler | None, name: str) -> list[str]:
        sentences = super().load(state, scaler, name)
        for sentence in sentences:
            _messages.info(sentence)
        return sentences


def find_entry(checkpoint: dict[str, Any]) -> str | None:
    """Return the key of the first entry that holds a scaler's state, from any plugin."""
    return next((key for key in _KEYS if checkpoint.get(key)), None)
