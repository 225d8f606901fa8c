"""Train a small GAN on handwritten digits: manual optimization, two optimizers, gradient clipping, any precision.

python examples/gan.py --precision fp16

The training loop is Lightning's documented recipe. Under `AmpPrecision` it works in fp16 as in fp32. Each backward is
scaled, `clip_gradients` sees true gradients, and the loss scale moves once per batch for both optimizers.
"""

from __future__ import annotations

import argparse
import logging
import warnings
from typing import Any

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

PIXELS, LATENT = 64, 16


class DigitGAN(L.LightningModule):
    """Learns to draw 8 x 8 digits."""

    def __init__(self, width: int = 128, lr: float = 2e-3) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.lr = lr
        self.generator = nn.Sequential(
            nn.Linear(LATENT, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, PIXELS), nn.Tanh()
        )
        self.critic = nn.Sequential(
            nn.Linear(PIXELS, width), nn.LeakyReLU(0.2), nn.Linear(width, width), nn.LeakyReLU(0.2), nn.Linear(width, 1)
        )

    def training_step(self, real: Tensor, batch_idx: int) -> None:
        generator, critic = self.optimizers()
        fake = self.generator(torch.randn(len(real), LATENT, device=self.device))

        critic.zero_grad()
        loss = F.softplus(-self.critic(real)).mean() + F.softplus(self.critic(fake.detach())).mean()
        self.manual_backward(loss)
        self.clip_gradients(critic, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
        critic.step()

        generator.zero_grad()
        loss = F.softplus(-self.critic(fake)).mean()
        self.manual_backward(loss)
        self.clip_gradients(generator, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
        generator.step()

    def configure_optimizers(self) -> Any:
        nets = (self.generator, self.critic)
        return [torch.optim.Adam(net.parameters(), lr=self.lr, betas=(0.5, 0.99)) for net in nets]

    @torch.no_grad()
    def distance(self, real: Tensor) -> float:
        """Return the RMS distance between the mean generated image and the mean digit, for pixels in [-1, 1]."""
        self.eval()
        noise = torch.randn(1024, LATENT, generator=torch.Generator().manual_seed(0))
        return float((self.generator(noise).mean(0) - real.mean(0)).square().mean().sqrt())


def main() -> None:
    """Parse arguments, train, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--precision", default="auto", help="fp32, bf16, fp16 or auto")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--fast", action="store_true", help="a few epochs, all precisions")
    parser.add_argument("--out", help="folder for the scale history; default: none is written")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)

    digits = torch.tensor(load_digits().data, dtype=torch.float32) / 8 - 1
    for precision in ("fp32", "bf16", "fp16") if args.fast else (args.precision,):
        L.seed_everything(0, verbose=False)
        model, monitor, plugin = DigitGAN(), ScaleMonitor(dirpath=args.out), AmpPrecision(precision)
        before = model.distance(digits)
        model.train()
        trainer = L.Trainer(
            plugins=[plugin], callbacks=[monitor], max_epochs=4 if args.fast else args.epochs, accelerator="auto",
            devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(model, DataLoader(digits, batch_size=64, shuffle=True, drop_last=True))
        after = model.distance(digits)
        print(f"{plugin.precision:<10}  distance {before:.3f} -> {after:.3f}   {monitor.history.summary()}")


if __name__ == "__main__":
    main()
