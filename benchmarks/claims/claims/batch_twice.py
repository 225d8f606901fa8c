"""Whether a batch twice as large fits."""

from __future__ import annotations

import lightning as L
import torch
from torch.utils.data import DataLoader

from benchmarks.claims._claim import Claim, Outcome, Setting, decided
from benchmarks.claims._models import GPT, text
from benchmarks.claims._sources import NVIDIA
from benchmarks.claims._training import Task
from lightning_amp import find_batch_size


class Data(L.LightningDataModule):
    """Rows of text, in batches of `batch_size`."""

    batch_size = 32

    def train_dataloader(self) -> DataLoader[torch.Tensor]:
        rows = text(64, 33, 0).repeat(256, 1)
        return DataLoader(rows, self.batch_size)  # pyright: ignore[reportArgumentType]


def run(setting: Setting) -> Outcome:
    """Find the largest batch in fp32 and bf16 within a limit."""
    kwargs = {"accelerator": setting.device_type, "devices": 1}
    limit = 0.02 if setting.tiny else 0.05
    found = find_batch_size(
        lambda: Task(GPT(16, 2, 1)), Data, ("fp32", "bf16"), memory_limit_gib=limit, trainer_kwargs=kwargs
    )
    fp32, bf16 = (found[name].batch_size for name in ("fp32", "bf16"))
    if not fp32 or not bf16:
        raise RuntimeError(found["fp32"].error or found["bf16"].error)
    return Outcome(decided(bf16 / fp32 >= 1.9), f"{fp32} rows and {bf16}: {bf16 / fp32:.2f}x")


CLAIM = Claim(
    "A batch twice as large fits",
    NVIDIA,
    "`find_batch_size` for a GPT within 0.05 GiB, fp32 and bf16; threshold 1.9.",
    run,
)
