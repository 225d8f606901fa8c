"""Train a variational autoencoder on handwritten digits, in one precision after the other, from the same seed.

python examples/vae.py                          fp32, bf16 and fp16
python examples/vae.py --precision fp16         one of them

The module differs from fp32 only by one `.float()` after the encoder. The divergence of the code is a small difference
of numbers near one, of which half precision keeps two or three digits. `exp(12)` overflows in fp16. Without that
`.float()` the loss is up to 0.3 nats per image worse (four seeds).

fp16 skips two or three steps while its scale settles.
"""

from __future__ import annotations

import argparse
import logging
import warnings
from pathlib import Path

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_amp import AmpPrecision, ScaleMonitor

try:
    from sklearn.datasets import load_digits
except ModuleNotFoundError as error:
    raise SystemExit(f"This example needs scikit-learn ({error}). Run: pip install '.[examples]'") from error

PIXELS, LATENT = 64, 8


class DigitVAE(L.LightningModule):
    """Learns a code of eight numbers for 8 x 8 digits, by the evidence lower bound; pixels are in [0, 1]."""

    def __init__(self, width: int = 128, lr: float = 2e-3, warmup_epochs: int = 10) -> None:
        super().__init__()
        self.lr, self.warmup_epochs = lr, warmup_epochs
        self.encoder = nn.Sequential(
            nn.Linear(PIXELS, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2 * LATENT)
        )
        self.decoder = nn.Sequential(
            nn.Linear(LATENT, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, PIXELS)
        )

    def losses(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return the two parts of the bound, of the reconstruction and of the code, in nats per image."""
        mean, log_var = self.encoder(images).float().chunk(2, dim=-1)
        code = mean + torch.randn_like(mean) * (0.5 * log_var).exp()
        logits = self.decoder(code)
        reconstruction = F.binary_cross_entropy_with_logits(logits, images, reduction="none").sum(-1).mean()
        kl = 0.5 * (mean.square() + log_var.exp() - 1 - log_var).sum(-1).mean()
        return reconstruction, kl

    def training_step(self, images: Tensor, batch_idx: int) -> Tensor:
        reconstruction, kl = self.losses(images)
        return reconstruction + min(1.0, self.current_epoch / self.warmup_epochs) * kl

    def validation_step(self, images: Tensor, batch_idx: int) -> None:
        reconstruction, kl = self.losses(images)
        self.log_dict({"val_loss": reconstruction + kl, "val_kl": kl})

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def train(precision: str, out: Path | None, epochs: int) -> str:
    """Train once from seed 0, and return a line of results."""
    L.seed_everything(0, verbose=False)
    pixels = torch.tensor(load_digits().data > 7, dtype=torch.float32)[torch.randperm(1797)]
    loader, val = DataLoader(pixels[:1437], batch_size=64, shuffle=True), DataLoader(pixels[1437:], batch_size=360)

    model, plugin = DigitVAE(), AmpPrecision(precision)
    monitor = ScaleMonitor(dirpath=out and out / precision)
    trainer = L.Trainer(
        plugins=[plugin], callbacks=[monitor], max_epochs=epochs, devices=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    (before,) = trainer.validate(model, val, verbose=False)
    trainer.fit(model, loader, val)
    after = trainer.callback_metrics
    return (
        f"{plugin.precision:<10}  nats per image {before['val_loss']:.2f} -> {after['val_loss']:.2f}"
        f" (code {after['val_kl']:.2f})   {monitor.history.summary()}"
    )


def main() -> None:
    """Parse arguments, train, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", nargs="+", default=["fp32", "bf16", "fp16"], help="fp32, bf16, fp16 or auto")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--fast", action="store_true", help="a few epochs")
    parser.add_argument("--out", type=Path, help="folder for the scale histories; default: none is written")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", message=".*does not have many workers.*|.*LeafSpec.*")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    for precision in args.precision:
        print(train(precision, args.out, epochs=3 if args.fast else args.epochs), flush=True)


if __name__ == "__main__":
    main()
