"""Train in two gloo processes, one of which kills itself in mid-epoch. `test_killed.py` runs this script."""

from __future__ import annotations

import os
import signal
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
from lightning.fabric.strategies.launchers import subprocess_script
from lightning.pytorch.strategies import DDPStrategy
from support import batches, quiet_trainer
from support.promises import fused_adamw
from support.resuming import Averaging, Checkpoints, Net, Overflow, ours, plugin_for

TIMEOUT_S = 120


class Die(L.Callback):
    def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_rank == 1 and trainer.global_step == 14:
            (Path(sys.argv[1]) / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    subprocess_script._ChildProcessObserver._run = lambda self: True  # it kills the survivor if it looks first
    folder = Path(sys.argv[1])
    callbacks = [Averaging(), Overflow([3, 12]), *ours(folder / "ours")]
    trainer = quiet_trainer(
        strategy=DDPStrategy(process_group_backend="gloo", timeout=timedelta(seconds=TIMEOUT_S)), devices=2,
        plugins=[plugin_for("fp16")], num_sanity_val_steps=0, max_epochs=2, use_distributed_sampler=False,
        callbacks=[*callbacks, Die(), Checkpoints(folder / "checkpoints", filename="{step}",
                                                  every_n_train_steps=5, save_top_k=-1)],
        enable_checkpointing=True,
    )  # fmt: skip
    module = Net(fused_adamw)
    try:
        trainer.fit(module, batches(16), batches(3, seed=7))
    finally:  # only the surviving rank gets here
        (folder / "survivor").write_text(f"{trainer.global_rank} {trainer.global_step} {type(callbacks[0]).__name__}")


if __name__ == "__main__":
    main()
