"""Train a recurrent network on Python's own documentation, character by character, by truncated backpropagation.

python examples/lstm.py                         fp32, bf16 and fp16, from the same seed
python examples/lstm.py --precision fp16        one of them

The state is passed from one window to the next, the gradient is not. A recurrent model needs no extra code.
A step uses the cell's weights 32 times; the plugin casts them only once, and sums their gradients in float32. Clipping
sees true gradients, also with a fused optimizer.

`nn.LSTM` can replace the cell and its loop. On a CPU without instructions for fp16, torch has no such layer in fp16
("could not create a primitive descriptor"): there, `AmpPrecision("fp16", fp32_modules=[nn.LSTM])` trains.
"""

from __future__ import annotations

import argparse
import logging
import warnings
from pathlib import Path
from pydoc_data.topics import topics

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_amp import AmpPrecision, ScaleMonitor

CHARACTERS = 128  # ASCII
STREAMS = 16  # parts of the text that are read in parallel
WINDOW = 32  # characters over which gradients flow back


class CharacterLSTM(L.LightningModule):
    """Predicts the next character."""

    def __init__(self, width: int = 128, lr: float = 1e-2) -> None:
        super().__init__()
        self.lr = lr
        self.embed = nn.Embedding(CHARACTERS, 32)
        self.cell = nn.LSTMCell(32, width)
        self.head = nn.Linear(width, CHARACTERS)

    def forward(self, text: Tensor, state: tuple[Tensor, Tensor] | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        outputs = []
        for character in self.embed(text).unbind(1):
            state = self.cell(character, state)
            outputs.append(state[0])
        return self.head(torch.stack(outputs, dim=1)), state

    def loss(self, windows: Tensor, batch_idx: int) -> Tensor:
        """Return the mean loss over the characters, in nats."""
        state = None if batch_idx == 0 else tuple(tensor.detach() for tensor in self.state)
        logits, self.state = self(windows[:, :-1], state)
        return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.loss(batch, batch_idx)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch, batch_idx))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr, fused=True)


def windows(text: Tensor) -> DataLoader:
    """Iterate over batches: the next window of every stream, [streams, window + 1]; windows overlap by a character."""
    streams = text[: len(text) // STREAMS * STREAMS].view(STREAMS, -1)
    return DataLoader(streams.unfold(1, WINDOW + 1, WINDOW).unbind(1), batch_size=None)


def train(precision: str, out: Path | None, steps: int) -> str:
    """Train once from seed 0, and return a line of results."""
    text = "\n\n".join(topics[name] for name in sorted(topics)).encode("ascii", errors="ignore")
    characters = torch.tensor(list(text))
    train_text, val_text = characters.split(len(characters) * 9 // 10)[:2]

    L.seed_everything(0, verbose=False)
    model, plugin = CharacterLSTM(), AmpPrecision(precision)
    monitor = ScaleMonitor(dirpath=out and out / precision)
    trainer = L.Trainer(
        plugins=[plugin], callbacks=[monitor], max_epochs=1, limit_train_batches=steps, limit_val_batches=steps // 10,
        gradient_clip_val=1.0, devices=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    (before,) = trainer.validate(model, windows(val_text), verbose=False)
    trainer.fit(model, windows(train_text), windows(val_text))
    after = trainer.callback_metrics
    return (
        f"{plugin.precision:<10}  nats per character {before['val_loss']:.3f} -> {after['val_loss']:.3f}"
        f"   {monitor.history.summary()}"
    )


def main() -> None:
    """Parse arguments, train, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", nargs="+", default=["fp32", "bf16", "fp16"], help="fp32, bf16, fp16 or auto")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--fast", action="store_true", help="a few steps")
    parser.add_argument("--out", type=Path, help="folder for the scale histories; default: none is written")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", message=".*does not have many workers.*|.*LeafSpec.*")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    for precision in args.precision:
        print(train(precision, args.out, steps=20 if args.fast else args.steps), flush=True)


if __name__ == "__main__":
    main()
