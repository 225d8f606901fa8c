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


def text(labels: str, **more: Any) -> DataLoader[Any]:
    """Texts, with labels of the kind that the head wants."""

    def make() -> dict[str, Tensor]:
        words = tokens()
        ids, mask = words["input_ids"], words["attention_mask"]
        words["labels"] = {
            "class": lambda: ids[:1].squeeze() % 2,
            "value": lambda: ids.float().mean() / VOCABULARY,
            "words": lambda: ids.masked_fill(mask == 0, -100),
            "tags": lambda: (ids % 3).masked_fill(mask == 0, -100),
        }[labels]()
        return words

    return dataset(make, **more)


def hugging_face(**settings: Any) -> Any:
    # A name behind which the models are: it is missing, too, where torchao is there and does not fit torch.
    return project("Hugging Face", needs=("transformers.PreTrainedModel",), **settings)


def setup(model: nn.Module, make_data: Callable[[], DataLoader[Any]], predict: bool = True, **trainer: Any) -> Setup:
    data = make_data()
    return Setup(FromConfig(model), data, make_data(), predict=data if predict else None, trainer=trainer)


def of_transformers(model: str, config: dict[str, Any]) -> Any:
    """Make a model, as in "BertForMaskedLM", with a configuration."""
    import transformers

    kind = getattr(transformers, model.partition("For")[0].partition("LMHead")[0] + "Config")
    return getattr(transformers, model)(kind(**config))


def add(
    name: str,
    what: str,
    model: str,
    config: dict[str, Any],
    labels: str,
    *,
    quick: bool = False,
    predict: bool = True,
    checkpointing: dict[str, Any] | None = None,
    **trainer: Any,
) -> None:
    """Add a model with a small configuration, and texts with labels of a kind."""

    @hugging_face(name=name, what=what, quick=quick)
    def make() -> Setup:
        made = of_transformers(model, config)
        if checkpointing is not None:
            made.gradient_checkpointing_enable(checkpointing)
        return setup(made, lambda: text(labels), predict, **trainer)


GPT2: dict[str, Any] = {"vocab_size": VOCABULARY, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 4}
LLAMA: dict[str, Any] = {**SMALL, "num_key_value_heads": 2, "max_position_embeddings": 64, **ENDS}
T5: dict[str, Any] = {
    "vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4,
    "decoder_start_token_id": 0,
}  # fmt: skip
SEQ2SEQ: dict[str, Any] = {
    "vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "decoder_start_token_id": 1, **ENDS,
}  # fmt: skip

for _attention in ("eager", "sdpa"):
    add(
        f"bert_{_attention}", f"BERT for classification, {_attention} attention, warm-up, clipping.",
        "BertForSequenceClassification", {**SMALL, "attn_implementation": _attention}, "class", gradient_clip_val=1.0,
    )  # fmt: skip
    add(
        f"gpt2_{_attention}", f"GPT-2, tied embeddings, `Conv1D` layers, {_attention} attention, accumulation.",
        "GPT2LMHeadModel", {**GPT2, "attn_implementation": _attention}, "words", quick=_attention == "sdpa",
        accumulate_grad_batches=2,
    )  # fmt: skip
add(
    "bert_masked_words", "BERT for masked words: the head shares its weight with the embedding.",
    "BertForMaskedLM", SMALL, "words",
)  # fmt: skip
add(
    "distilbert_tags", "DistilBERT for token classification.", "DistilBertForTokenClassification",
    {"vocab_size": VOCABULARY, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64, "num_labels": 3}, "tags",
)  # fmt: skip
add(
    "roberta_regression", "RoBERTa for regression: the squared error is in half precision.",
    "RobertaForSequenceClassification",
    {**SMALL, "num_labels": 1, "problem_type": "regression", **ENDS, "max_position_embeddings": 32}, "value",
)  # fmt: skip
add(
    "albert_shared_layers", "ALBERT: one layer is used twelve times.", "AlbertForSequenceClassification",
    {**SMALL, "num_hidden_layers": 12, "embedding_size": 16}, "class", quick=True,
)  # fmt: skip
add(
    "electra_checkpointing",
    "ELECTRA with gradient checkpointing: the forward of each layer runs again in the backward.",
    "ElectraForSequenceClassification", {**SMALL, "embedding_size": 16}, "class", checkpointing={},
)  # fmt: skip
add(
    "t5_translation",
    "T5: relative positions, shared embeddings, RMS norm, a feed-forward layer that reads the dtype of its weight.",
    "T5ForConditionalGeneration", T5, "words",
)  # fmt: skip
add(
    "bart_summary", "BART: encoder and decoder, learned positions, a head tied to the embedding.",
    "BartForConditionalGeneration", {**SEQ2SEQ, "max_position_embeddings": 32}, "words",
)  # fmt: skip
add(
    "llama", "LLaMA-like: rotary positions, grouped queries, RMS norm, SwiGLU.", "LlamaForCausalLM", LLAMA, "words",
    quick=True, gradient_clip_val=1.0,
)  # fmt: skip
add(
    "llama_checkpointing_clip_value",
    "LLaMA-like with gradient checkpointing (not reentrant) and clipping by value.", "LlamaForCausalLM", LLAMA,
    "words", checkpointing={"use_reentrant": False}, gradient_clip_val=0.1, gradient_clip_algorithm="value",
)  # fmt: skip
add(
    "mixture_of_experts",
    "Mixtral-like: a router chooses experts for each token; rounding may send a token to another expert.",
    "MixtralForCausalLM",
    {**SMALL, "num_key_value_heads": 2, "num_local_experts": 4, "output_router_logits": True, **ENDS}, "words",
    predict=False,
)  # fmt: skip


@hugging_face()
def mamba() -> Setup:
    """Mamba: a selective scan in Python, with states in float32."""
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, state_size=4, **ENDS)

    def words() -> DataLoader[Any]:
        return dataset(lambda: {k: v for k, v in text_of("words").items() if k != "attention_mask"})

    return setup(MambaForCausalLM(config), words, predict=False)


def text_of(labels: str) -> dict[str, Tensor]:
    return text(labels, count=1).dataset[0]


@hugging_face()
def vit() -> Setup:
    """A vision transformer: a convolution cuts the patches."""
    from transformers import ViTConfig, ViTForImageClassification

    vision = {k: v for k, v in SMALL.items() if k != "vocab_size"}
    config = ViTConfig(**vision, image_size=16, patch_size=8, num_labels=3)

    def images() -> DataLoader[Any]:
        return dataset(lambda: {"pixel_values": torch.randn(3, 16, 16), "labels": torch.randint(3, ())})

    return setup(ViTForImageClassification(config), images)


@hugging_face()
def clip_contrastive() -> Setup:
    """CLIP: a contrastive loss between images and texts, with a learned temperature."""
    from transformers import CLIPConfig, CLIPModel

    tower = {k: v for k, v in SMALL.items() if k != "vocab_size"}
    config = CLIPConfig(
        text_config={**SMALL, "max_position_embeddings": 16, **ENDS},
        vision_config={**tower, "image_size": 16, "patch_size": 8},
        projection_dim=16,
    )

    class Contrastive(FromConfig):
        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            return self.model(**batch, return_loss=True).loss

        def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
            self.log("val_loss", self.model(**batch, return_loss=True).loss)

    def pairs() -> DataLoader[Any]:
        return dataset(lambda: {**tokens(), "pixel_values": torch.randn(3, 16, 16)})

    return Setup(Contrastive(CLIPModel(config)), pairs(), pairs())


@hugging_face()
def wav2vec2_ctc() -> Setup:
    """Wav2Vec2 with a CTC loss: convolutions on the waveform, weight norm, a mask from numpy's random numbers."""
    from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

    config = Wav2Vec2Config(
        **{**SMALL, "vocab_size": 16},
        conv_dim=(16, 16),
        conv_stride=(4, 2),
        conv_kernel=(8, 4),
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=4,
        mask_time_length=4,
        pad_token_id=0,
        ctc_zero_infinity=True,
    )

    def speech() -> DataLoader[Any]:
        return dataset(lambda: {"input_values": torch.randn(320), "labels": torch.randint(1, 16, (4,))}, 16)

    return setup(Wav2Vec2ForCTC(config), speech, predict=False)


@hugging_face()
def whisper() -> Setup:
    """Whisper: from spectrograms to words, with fixed sinusoidal positions."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        **SEQ2SEQ, num_mel_bins=8, max_source_positions=16, max_target_positions=16,
        suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip

    def speech() -> DataLoader[Any]:
        return dataset(lambda: {"input_features": torch.randn(8, 32), "labels": torch.randint(3, VOCABULARY, (8,))}, 16)

    return setup(WhisperForConditionalGeneration(config), speech, predict=False)


@hugging_face()
def distillation() -> Setup:
    """A frozen BERT teaches a smaller one: KL divergence at a temperature, plus a loss on the labels."""
    from transformers import BertConfig, BertForSequenceClassification

    class Distil(FromConfig):
        def __init__(self) -> None:
            super().__init__(BertForSequenceClassification(BertConfig(**{**SMALL, "num_hidden_layers": 1})))
            self.teacher = BertForSequenceClassification(BertConfig(**SMALL)).eval().requires_grad_(False)

        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            with torch.no_grad():
                target = self.teacher(**batch).logits
            output = self.model(**batch)
            student = nn.functional.log_softmax(output.logits / 2, dim=-1)
            soft = nn.functional.kl_div(student, (target / 2).softmax(-1), reduction="batchmean")
            return 4 * soft + output.loss

    return Setup(Distil(), text("class"), text("class"))


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


@hugging_face()
def loaded_in_bf16_frozen() -> Setup:
    """A GPT-2 that was loaded in bfloat16 and frozen, with a head of its own in float32."""
    from transformers import GPT2Config, GPT2Model

    config = GPT2Config(**GPT2)

    class Probe(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = GPT2Model(config).to(torch.bfloat16).eval().requires_grad_(False)
            self.head = nn.Linear(32, 2)

        def loss(self, batch: dict[str, Tensor]) -> Tensor:
            with torch.no_grad():
                features = self.backbone(batch["input_ids"], attention_mask=batch["attention_mask"])[0]
            return nn.functional.cross_entropy(self.head(features.float().mean(1)), batch["labels"])

        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            return self.loss(batch)

        def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
            self.log("val_loss", self.loss(batch))

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.head.parameters(), lr=1e-2)

    return Setup(Probe(), text("class"), text("class"))
