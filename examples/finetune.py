"""Fine-tune a Hugging Face model, or LoRA adapters, to classify passages of Python's documentation by chapter.

python examples/finetune.py                         fp32, bf16 and fp16, from the same seed
python examples/finetune.py --precision fp16        one of them
python examples/finetune.py --lora                  a frozen body in half precision, adapters in float32

`make_model` names the line for a pretrained model. Trained weights must be float32: load them in float32, or pass
`upcast_parameters=True` to the plugin, as this script does for LoRA. Frozen weights may be in half precision, but in
the one of the run. On a CPU, bfloat16 weights in an fp16 run end in the error "mixed dtype". The attention is "eager"
because torch's fused one has no fast backward in fp16 on a CPU.
"""

from __future__ import annotations

import argparse
import logging
import re
import warnings
from collections import Counter
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy

from lightning_amp import AmpPrecision, ScaleMonitor

try:
    from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup
except ModuleNotFoundError as error:
    raise SystemExit(f"This example needs transformers ({error}). Run: pip install '.[examples]'") from error

CHAPTERS = ("compound", "types", "string-methods", "debugger", "formatstrings", "import")
PAD, START, UNKNOWN = 0, 1, 2
WORDS, LENGTH, PAGE = 1000, 32, 200  # known words, longest passage, and page, all in words


def passages(step: int, held_out: bool) -> list[dict[str, Tensor]]:
    """Return padded word numbers with their masks, as a tokenizer does. Every fifth page is held out."""
    counts = Counter(word for text in topics.values() for word in re.findall(r"\w+", text.lower()))
    number = {word: UNKNOWN + 1 + i for i, (word, _) in enumerate(counts.most_common(WORDS - UNKNOWN - 1))}
    data: list[dict[str, Tensor]] = []
    for label, name in enumerate(CHAPTERS):
        words = [number.get(word, UNKNOWN) for word in re.findall(r"\w+", topics[name].lower())]
        for at in range(0, len(words) - LENGTH, step):
            if (at // PAGE % 5 == 4) is held_out and at % PAGE <= PAGE - LENGTH:
                ids = torch.tensor([START, *words[at : at + int(torch.randint(LENGTH // 2, LENGTH, ()))]])
                ids = F.pad(ids, (0, LENGTH - len(ids)), value=PAD)
                data.append({"input_ids": ids, "attention_mask": (ids != PAD).long(), "labels": torch.tensor(label)})
    return data


class Classifier(L.LightningModule):
    """A body with a low learning rate, a head with a high one, and a schedule with warm-up, step by step."""

    def __init__(self, model: nn.Module, lr: float = 1e-3, head_lr: float = 5e-3) -> None:
        super().__init__()
        self.lr, self.head_lr = lr, head_lr
        self.model = model
        self.val_acc = MulticlassAccuracy(num_classes=len(CHAPTERS), average="micro")

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.model(**batch).loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        output = self.model(**batch)
        self.val_acc(output.logits, batch["labels"])
        self.log_dict({"val_loss": output.loss, "val_acc": self.val_acc})

    def configure_optimizers(self) -> Any:
        trained = {name: p for name, p in self.named_parameters() if p.requires_grad}
        head = [p for name, p in trained.items() if "classifier" in name]
        body = [p for name, p in trained.items() if "classifier" not in name]
        groups = [{"params": body, "lr": self.lr}, {"params": head, "lr": self.head_lr}]
        optimizer = torch.optim.AdamW(groups, weight_decay=0.01, fused=True)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = get_linear_schedule_with_warmup(optimizer, steps // 10, steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def make_model() -> nn.Module:
    """Make a small untrained model, so that nothing has to be downloaded.

    For a pretrained model, with its tokenizer, write
    `BertForSequenceClassification.from_pretrained("bert-base-uncased", num_labels=6, dtype=torch.float32)`.
    """
    config = BertConfig(
        vocab_size=WORDS, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128,
        max_position_embeddings=LENGTH, num_labels=len(CHAPTERS), attn_implementation="eager",
    )  # fmt: skip
    return BertForSequenceClassification(config)


def add_adapters(model: nn.Module, precision: str) -> nn.Module:
    """Freeze the body in the precision of the run, and add adapters and a trainable copy of the head."""
    try:
        from peft import LoraConfig, get_peft_model
    except ModuleNotFoundError as error:
        raise SystemExit(f"`--lora` needs peft ({error}). Run: pip install '.[examples]'") from error

    body = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    # For a pretrained body, "query" and "value" are enough; this untrained one needs adapters on its words, too.
    layers = ["word_embeddings", "query", "key", "value", "dense"]
    return get_peft_model(model.to(body), LoraConfig(task_type="SEQ_CLS", r=8, target_modules=layers))


def train(precision: str, out: Path | None, epochs: int, step: int, lora: bool) -> str:
    """Train once from seed 0, and return a line of results."""
    L.seed_everything(0, verbose=False)
    data = DataLoader(passages(step, held_out=False), batch_size=32, shuffle=True)
    val = DataLoader(passages(step, held_out=True), batch_size=64)

    model = make_model()
    if lora:
        model = add_adapters(model, precision)
    module = Classifier(model, lr=5e-3 if lora else 1e-3)
    # peft makes the adapters float32; `upcast_parameters` does it for the head, which is trained as well.
    plugin = AmpPrecision(precision, upcast_parameters=lora)
    monitor = ScaleMonitor(dirpath=out and out / precision)
    trainer = L.Trainer(
        plugins=[plugin], callbacks=[monitor], max_epochs=epochs, gradient_clip_val=1.0, devices=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    (before,) = trainer.validate(module, val, verbose=False)
    trainer.fit(module, data, val)
    after = trainer.callback_metrics
    return (
        f"{plugin.precision:<10}  accuracy {before['val_acc']:.3f} -> {after['val_acc']:.3f}   loss"
        f" {before['val_loss']:.3f} -> {after['val_loss']:.3f}   {monitor.history.summary()}"
    )


def main() -> None:
    """Parse arguments, train, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", nargs="+", default=["fp32", "bf16", "fp16"], choices=["fp32", "bf16", "fp16"])
    parser.add_argument("--lora", action="store_true", help="train adapters on a frozen body in half precision")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--fast", action="store_true", help="one epoch on fewer passages")
    parser.add_argument("--out", type=Path, help="folder for the scale histories; default: none is written")
    args = parser.parse_args()
    warnings.filterwarnings(
        "ignore", message=".*does not have many workers.*|.*LeafSpec.*|.*is_gradient_checkpointing.*"
    )
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    step, epochs = (32, 1) if args.fast else (8, args.epochs)
    for precision in args.precision:
        print(train(precision, args.out, epochs, step, args.lora), flush=True)


if __name__ == "__main__":
    main()
