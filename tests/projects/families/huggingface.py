# pyright: reportMissingImports=false
"""Hugging Face models from their configurations, in the LightningModule that everybody writes around them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from projects import Setup, project

VOCABULARY = 64
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
ENDS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


class FromConfig(L.LightningModule):
    """The loss is the model's own; AdamW with linear warm-up, as in the examples."""

    def __init__(self, model: nn.Module, lr: float = 1e-3, warmup: bool = True) -> None:
        super().__init__()
        self.model = model
        self.lr = lr
        self.warmup = warmup

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        output = self.model(**batch)
        self.log("train_loss", output.loss)
        return output.loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.model(**batch).loss)

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        output = self.model(**batch)
        return getattr(output, "logits", output[0])

    def configure_optimizers(self) -> Any:
        no_decay = [p for p in self.parameters() if p.requires_grad and p.ndim < 2]
        decay = [p for p in self.parameters() if p.requires_grad and p.ndim >= 2]
        groups = [{"params": decay, "weight_decay": 0.01}, {"params": no_decay, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW([g for g in groups if g["params"]], lr=self.lr)
        if not self.warmup:
            return optimizer
        from transformers import get_linear_schedule_with_warmup

        schedule = get_linear_schedule_with_warmup(optimizer, 2, 8)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def tokens(length: int = 12) -> dict[str, Tensor]:
    """A text of random words with padding at its end."""
    ids = torch.randint(3, VOCABULARY, (length,))
    mask = torch.ones(length, dtype=torch.long)
    mask[length - int(torch.randint(0, 4, ())) :] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def dataset(make: Callable[[], dict[str, Tensor]], count: int = 24, batch_size: int = 4) -> DataLoader[Any]:
    return DataLoader([make() for _ in range(count)], batch_size=batch_size)


def text() -> DataLoader[Any]:
    """Texts whose labels are their own words."""

    def make() -> dict[str, Tensor]:
        words = tokens()
        return {**words, "labels": words["input_ids"].masked_fill(words["attention_mask"] == 0, -100)}

    return dataset(make)


def hugging_face(**settings: Any) -> Any:
    # A name behind which the models are: it is missing, too, where torchao is there and does not fit torch.
    return project("Hugging Face", needs=("transformers.PreTrainedModel",), **settings)


def of_transformers(model: str, config: dict[str, Any]) -> Any:
    """Make a model, as in "BertForMaskedLM", with a configuration."""
    import transformers

    kind = getattr(transformers, model.partition("For")[0].partition("LMHead")[0] + "Config")
    return getattr(transformers, model)(kind(**config))


GPT2: dict[str, Any] = {"vocab_size": VOCABULARY, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 4}
LLAMA: dict[str, Any] = {**SMALL, "num_key_value_heads": 4, "max_position_embeddings": 64, **ENDS}
T5: dict[str, Any] = {
    "vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4,
    "decoder_start_token_id": 0,
}  # fmt: skip


@hugging_face(quick=True)
def gpt2_sdpa() -> Setup:
    """GPT-2, tied embeddings, `Conv1D` layers, sdpa attention, accumulation."""
    model = of_transformers("GPT2LMHeadModel", {**GPT2, "attn_implementation": "sdpa"})
    return Setup(FromConfig(model), text(), text(), predict=text(), trainer={"accumulate_grad_batches": 2})


@hugging_face()
def t5_translation() -> Setup:
    """T5: relative positions, shared embeddings, RMS norm, a feed-forward layer that reads the dtype of its weight."""
    model = of_transformers("T5ForConditionalGeneration", T5)
    return Setup(FromConfig(model), text(), text(), predict=text())


@hugging_face()
def preference_pairs() -> Setup:
    """Direct preference optimisation: log-probabilities of two answers under a policy and a frozen reference."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(**GPT2)

    class DPO(FromConfig):
        def __init__(self) -> None:
            super().__init__(GPT2LMHeadModel(config), warmup=False)
            self.reference = GPT2LMHeadModel(config).requires_grad_(False)

        def logps(self, model: nn.Module, ids: Tensor) -> Tensor:
            logits = model(input_ids=ids).logits[:, :-1]
            return logits.log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2).sum(1)

        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            good, bad = batch["chosen"], batch["rejected"]
            with torch.no_grad():
                reference = self.logps(self.reference, good) - self.logps(self.reference, bad)
            margin = self.logps(self.model, good) - self.logps(self.model, bad) - reference
            self.log("margin", margin.mean())
            return -nn.functional.logsigmoid(0.1 * margin).mean()

        def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
            self.log("val_logps", self.logps(self.model, batch["chosen"]).mean())

    def pairs() -> DataLoader[Any]:
        return dataset(lambda: {k: torch.randint(3, VOCABULARY, (12,)) for k in ("chosen", "rejected")})

    return Setup(DPO(), pairs(), pairs())
