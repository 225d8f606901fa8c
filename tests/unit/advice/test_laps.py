"""Steps that are timed."""

from __future__ import annotations

import torch
from support import Toy, batches

from lightning_amp import AmpPrecision, DynamicLossScaler
from lightning_amp.advice._laps import Laps
from lightning_amp.shadow import private_trainer, run_private_fit, unnoticed

CPU = torch.device("cpu")


def test_laps_leave_out_what_is_not_settled() -> None:
    laps = Laps(CPU, 3, num_before=2)
    with unnoticed(CPU):
        trainer = private_trainer(CPU, AmpPrecision("bf16"), [laps], {})
        run_private_fit(trainer, Toy(), train_dataloaders=batches(4))
    assert len(laps.step_s) == 3
    assert trainer.global_step == 5


def test_steps_that_are_skipped_are_not_timed() -> None:
    laps = Laps(CPU, 2, num_before=1)
    plugin = AmpPrecision("fp16", scaler=DynamicLossScaler(init_scale=2.0**24))
    with unnoticed(CPU):
        trainer = private_trainer(CPU, plugin, [laps], {})
        run_private_fit(trainer, Toy(), train_dataloaders=batches(4))
    assert plugin.num_skipped > 0
    assert plugin.num_steps == 3  # one that settles, and two
    assert len(laps.step_s) == 2
