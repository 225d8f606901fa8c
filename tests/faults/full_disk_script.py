"""Train while no file may grow beyond a limit, as on a full disk. `test_files.py` runs this script."""

from __future__ import annotations

import resource
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
from support.resuming import assert_equal, everything, plugin_for, train

from lightning_amp import OverflowLocator, ScaleMonitor

LIMIT = 100


class NoSpace(L.Callback):
    """Limit files from the fifth step on. There are no checkpoints of Lightning's, which would fail too."""

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step == 5:
            resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, resource.RLIM_INFINITY))


class Save(L.Callback):
    """Two checkpoints that write nothing, so that `ScaleMonitor` writes."""

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step in (4, 12):
            trainer.strategy.checkpoint_io.save_checkpoint = lambda *args, **kwargs: None
            trainer.save_checkpoint("nowhere")


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    settings: dict[str, Any] = {"gradient": [3, 12], "nan": [6, 7]}
    expected = everything(train(plugin_for("fp16"), 20, **settings))
    callbacks = [ScaleMonitor(dirpath=folder), OverflowLocator(dirpath=folder), Save(), NoSpace()]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = everything(train(plugin_for("fp16"), 20, callbacks=callbacks, **settings))
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    for name in ("ScaleMonitor", "OverflowLocator"):
        text = f"`{name}` could not write to `{folder}`: [Errno 27] File too large"
        number = len([w for w in caught if str(w.message).startswith(text)])
        print(f"{name}: {number} warning{'s' if number != 1 else ''}")
    assert_equal({name: found[name] for name in expected}, expected)
    files = {path.name: path.stat().st_size for path in folder.iterdir()}
    # written completely before the disk was full
    assert set(files) == {"scale_history.csv", "overflow_step00003_rank0.json"}, files
    assert min(files.values()) > LIMIT, files
    print("bit-identical")


if __name__ == "__main__":
    main()
