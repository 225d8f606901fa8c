"""Recurrent cells and layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from projects import Setup, project
from projects.learner import Learner


class GRUCellLoop(Learner):
    """The loop of every tutorial about recurrent cells."""

    def __init__(self, hidden: int = 32) -> None:
        super().__init__()
        self.cell = nn.GRUCell(4, hidden)
        self.head = nn.Linear(hidden, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        state = batch.new_zeros(batch.shape[0], self.cell.hidden_size)
        outputs: list[Tensor] = []
        for x in batch.unbind(1):
            state = self.cell(x, state)
            outputs.append(self.head(state))
        return nn.functional.mse_loss(torch.stack(outputs, 1).float(), batch.cumsum(1).mean(2, keepdim=True))


@project("recurrent")
def gru_cell_512() -> Setup:
    """A GRU cell that a Python loop calls 512 times: gradients of 512 uses are summed."""
    return Setup(
        GRUCellLoop(), DataLoader(torch.randn(12, 512, 4) / 4, batch_size=4), trainer={"gradient_clip_val": 1.0}
    )
