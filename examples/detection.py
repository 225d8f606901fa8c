"""Find handwritten digits in larger pictures: boxes and classes, several losses, a manual loop with accumulation.

python examples/detection.py                    fp32, bf16 and fp16, from the same seed
python examples/detection.py --precision fp16   one of them

Under `AmpPrecision` the loop works in fp16 as in fp32: gradients of two batches are accumulated, clipped by their true
norm, and applied together. Every tenth batch has no object, and therefore no loss of boxes and classes.
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
from torch.utils.data import DataLoader, Dataset
from torchmetrics import Metric

from lightning_amp import AmpPrecision, ScaleMonitor

try:
    from sklearn.datasets import load_digits
except ModuleNotFoundError as error:
    raise SystemExit(f"This example needs scikit-learn ({error}). Run: pip install '.[examples]'") from error

CELL, GRID = 8, 3  # pixels of a cell, and cells of a picture from side to side
BATCH_SIZE = 32
Objects = dict[str, Tensor]  # in one picture: "boxes" [objects, 4] (left, top, right, bottom) and "labels" [objects]


def draw(digits: Tensor, labels: Tensor, count: int) -> tuple[Tensor, Objects]:
    """Put `count` digits into one picture, each near the middle of another cell."""
    chosen, cells = torch.randint(len(digits), (count,)), torch.randperm(GRID**2)[:count]
    picture, boxes = torch.zeros(GRID * CELL, GRID * CELL), torch.zeros(count, 4)
    for digit, cell, box in zip(digits[chosen], cells, boxes, strict=True):
        corner = torch.stack([cell // GRID, cell % GRID]) * CELL + torch.randint(-2, 3, (2,))
        top, left = corner.clamp(0, (GRID - 1) * CELL).tolist()
        picture[top : top + CELL, left : left + CELL] += digit
        rows, columns = digit.nonzero().T
        box[:] = torch.tensor([left + columns.min(), top + rows.min(), left + columns.max() + 1, top + rows.max() + 1])
    return picture.clamp(max=1), {"boxes": boxes, "labels": labels[chosen]}


class Pictures(Dataset):
    """Pictures with `counts` digits, drawn anew at each access."""

    def __init__(self, digits: Tensor, labels: Tensor, counts: list[int]) -> None:
        self.digits, self.labels, self.counts = digits, labels, counts

    def __len__(self) -> int:
        return len(self.counts)

    def __getitem__(self, index: int) -> tuple[Tensor, Objects]:
        if index >= len(self):
            raise IndexError(index)
        return draw(self.digits, self.labels, self.counts[index])


def collate(batch: list[tuple[Tensor, Objects]]) -> tuple[Tensor, list[Objects]]:
    pictures, objects = zip(*batch, strict=True)
    return torch.stack(pictures), list(objects)


class F1(Metric):
    """F1 of the boxes: a box is right if a true box has its class and overlaps it by half."""

    right: Tensor
    boxes: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("right", torch.tensor(0), dist_reduce_fx="sum")
        self.add_state("boxes", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, found: list[Objects], true: list[Objects]) -> None:
        for ours, theirs in zip(found, true, strict=True):
            a, b = ours["boxes"][:, None], theirs["boxes"]
            common = (torch.minimum(a[..., 2:], b[:, 2:]) - torch.maximum(a[..., :2], b[:, :2])).clamp(min=0).prod(-1)
            union = (a[..., 2:] - a[..., :2]).prod(-1) + (b[:, 2:] - b[:, :2]).prod(-1) - common
            pairs = (common >= 0.5 * union) & (ours["labels"][:, None] == theirs["labels"])
            self.right = self.right + pairs.any(0).sum() + pairs.any(1).sum()
            self.boxes = self.boxes + sum(pairs.shape)

    def compute(self) -> Tensor:
        return self.right / self.boxes.clamp(min=1)


class Detector(L.LightningModule):
    """Predicts for each cell whether the middle of a digit is in it, and the box and class of that digit."""

    def __init__(self, width: int = 192, lr: float = 2e-3, accumulate: int = 2) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.lr, self.accumulate = lr, accumulate
        self.windows = nn.Unfold(2 * CELL, stride=CELL, padding=CELL // 2)  # each cell and half of its neighbours
        self.net = nn.Sequential(
            nn.Linear((2 * CELL) ** 2, width), nn.LayerNorm(width), nn.ReLU(),
            nn.Linear(width, width), nn.LayerNorm(width), nn.ReLU(), nn.Linear(width, 1 + 4 + 10),
        )  # fmt: skip
        rows, columns = torch.meshgrid(*[CELL * (torch.arange(GRID) + 0.5)] * 2, indexing="ij")
        self.register_buffer("middles", torch.stack([columns, rows] * 2, dim=-1).flatten(0, 1))  # [cells, 4]
        self.val_f1 = F1()

    def forward(self, pictures: Tensor) -> tuple[Tensor, ...]:
        """Logits [batch, cells], boxes around the cells' middles [batch, cells, 4], logits [batch, cells, 10]."""
        found, boxes, classes = self.net(self.windows(pictures[:, None]).mT).split([1, 4, 10], dim=-1)
        return found[..., 0], boxes * CELL + self.middles, classes

    def losses(self, pictures: Tensor, objects: list[Objects]) -> dict[str, Tensor]:
        """Return the mean loss over all cells, and the mean losses over the objects, of which there may be none."""
        found, boxes, classes = self(pictures)
        image = torch.cat([torch.full_like(each["labels"], i) for i, each in enumerate(objects)])
        true, labels = torch.cat([each["boxes"] for each in objects]), torch.cat([each["labels"] for each in objects])
        column, row = ((true[:, :2] + true[:, 2:]) / 2 // CELL).long().T
        at = image, row * GRID + column
        is_middle = torch.zeros_like(found)
        is_middle[at] = 1
        count = max(1, len(labels))  # the mean over no objects would be NaN
        return {
            "found": F.binary_cross_entropy_with_logits(found, is_middle),
            "boxes": F.l1_loss(boxes[at], true, reduction="sum") / count / CELL,
            "classes": F.cross_entropy(classes[at], labels, reduction="sum") / count,
        }

    def training_step(self, batch: tuple[Tensor, list[Objects]], batch_idx: int) -> None:
        optimizer = self.optimizers()
        losses = self.losses(*batch)
        self.manual_backward(sum(losses.values()) / self.accumulate)
        if (batch_idx + 1) % self.accumulate == 0:
            self.clip_gradients(optimizer, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()

    def validation_step(self, batch: tuple[Tensor, list[Objects]], batch_idx: int) -> None:
        pictures, objects = batch
        self.val_f1(self.predict_step(pictures), objects)
        self.log("val_f1", self.val_f1, batch_size=len(objects))

    def predict_step(self, pictures: Tensor, batch_idx: int = 0) -> list[Objects]:
        found, boxes, classes = self(pictures)
        return [{"boxes": boxes[i, at], "labels": classes[i, at].argmax(-1)} for i, at in enumerate(found > 0)]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def train(precision: str, out: Path | None, epochs: int, pictures: int) -> str:
    """Train once from seed 0, and return a line of results."""
    L.seed_everything(0, verbose=False)
    digits, labels = torch.tensor(load_digits().images, dtype=torch.float32) / 16, torch.tensor(load_digits().target)
    # As in real data, some batches have no object: here every tenth.
    counts = [0 if i // BATCH_SIZE % 10 == 9 else int(torch.randint(1, 4, ())) for i in range(pictures)]
    data = Pictures(digits[:1400], labels[:1400], counts)
    val = list(Pictures(digits[1400:], labels[1400:], counts[:320]))
    train_loader, val_loader = (DataLoader(each, BATCH_SIZE, collate_fn=collate) for each in (data, val))

    model, plugin = Detector(), AmpPrecision(precision)
    monitor = ScaleMonitor(dirpath=out and out / precision)
    trainer = L.Trainer(
        plugins=[plugin], callbacks=[monitor], max_epochs=epochs, devices=1, logger=False, num_sanity_val_steps=0,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    (before,) = trainer.validate(model, val_loader, verbose=False)
    trainer.fit(model, train_loader, val_loader)
    after = trainer.callback_metrics
    return (
        f"{plugin.precision:<10}  F1 of the boxes {before['val_f1']:.3f} -> {after['val_f1']:.3f}"
        f"   {monitor.history.summary()}"
    )


def main() -> None:
    """Parse arguments, train, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", nargs="+", default=["fp32", "bf16", "fp16"], help="fp32, bf16, fp16 or auto")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--fast", action="store_true", help="a few epochs on few pictures")
    parser.add_argument("--out", type=Path, help="folder for the scale histories; default: none is written")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", message=".*does not have many workers.*|.*LeafSpec.*")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    epochs, pictures = (3, 512) if args.fast else (args.epochs, 2560)
    for precision in args.precision:
        print(train(precision, args.out, epochs, pictures), flush=True)


if __name__ == "__main__":
    main()
