"""A base class of many projects."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch


class Learner(L.LightningModule):
    """Learns by Adam, for projects whose optimizer does not matter."""

    lr: float = 1e-3

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=self.lr)
