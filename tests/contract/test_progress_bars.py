"""Reports stand on lines of their own beside a bar of tqdm; the test reads what the terminal shows."""

from __future__ import annotations

import os
import re
import select
import struct
from pathlib import Path

import pytest
from support import warm

fcntl = pytest.importorskip("fcntl")
pty = pytest.importorskip("pty")
termios = pytest.importorskip("termios")

HERE = Path(__file__).parents[1]
GLUED = re.compile(rf"(its?/s|\]).*({re.escape(str(HERE.parent / 'lightning_amp'))}/|lightning_amp: )")
"""Return whether a line of ours, or a warning about our code, stands behind a bar.

Lightning's own warnings do stand there, and their text may name any folder.
"""
WIDTH = 250
SCRIPT = """
import lightning as L
import torch
from support import Poison, Toy, batches
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning_amp import *

class Both(Toy):
    def __init__(self):
        super().__init__()
        self.idle = torch.nn.Linear(8, 8)

    def training_step(self, batch, batch_idx):
        if batch_idx == 2:
            return (self.net(batch) ** 2).mean()  # float16: the scaler says something
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))

plugin = AmpPrecision("fp16", fp32_modules=["idle"])
callbacks = [
    TQDMProgressBar(), ScaleMonitor(warn_below=2.0**30), OverflowLocator(max_reports=1), GradientMonitor(3),
    MetricComparison(tolerance=0.0), Poison(gradient=[5]),
]
trainer = L.Trainer(
    accelerator="cpu", max_epochs=2, plugins=[plugin], callbacks=callbacks, logger=False, log_every_n_steps=2,
    enable_checkpointing=False, enable_model_summary=False,
)
trainer.fit(Both(), batches(8), batches(2))
print("the end")
"""
REPORTS = [
    "Step 5 skipped (batch 5)",
    "ScaleMonitor: ",
    "GradientMonitor, step",
    "MetricComparison, epoch",
    "The loss scale fell",
    "The loss is float16",
    "`fp32_modules` has no effect",
]


def in_terminal(*command: str | Path) -> str:
    """Run a script in a terminal and return its output, standard error included."""
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 50, WIDTH, 0, 0))
    environment = {"TERM": "xterm", "COLUMNS": str(WIDTH), "PYTHONPATH": f"{HERE.parent}{os.pathsep}{HERE}"}
    terminal = Path(os.ttyname(its))
    process = warm.start(*command, out=terminal, err=terminal, env={**os.environ, **environment})
    written, code = b"", None
    while code is None or select.select([ours], [], [], 0.0)[0]:
        code = process.poll()
        if select.select([ours], [], [], 0.05)[0]:
            written += os.read(ours, 65536)
    os.close(its)
    os.close(ours)
    assert code == 0, written.decode()
    return written.decode()


def shown(written: str) -> list[str]:
    """Return the terminal's lines after carriage returns and erase sequences have taken effect."""
    screen, row, column = [""], 0, 0
    for token in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|[\r\n]|[^\x1b\r\n]+", written):
        if token == "\n":
            row += 1
            screen += [""] * (row + 1 - len(screen))
        elif token == "\r":
            column = 0
        elif token.startswith("\x1b"):
            if token.endswith("K"):
                screen[row] = "" if token == "\x1b[2K" else screen[row][:column]
            elif token.endswith("A"):
                row -= int(token[2:-1] or 1)
        else:
            line = screen[row].ljust(column)
            screen[row] = line[:column] + token + line[column + len(token) :]
            column += len(token)
    return [line.rstrip() for line in screen]


def test_reports_are_not_glued_to_a_bar(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    lines = shown(in_terminal(script))
    text = "\n".join(lines)
    for report in REPORTS:
        where = [line for line in lines if report in line]
        assert where, (report, text)
        assert not [line for line in where if re.search(r"\d+/\d+|it/s", line[: line.index(report)])], text
    assert not [line for line in lines if GLUED.search(line)], text
    assert lines[-2:] == ["the end", ""]
