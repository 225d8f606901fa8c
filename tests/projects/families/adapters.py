# pyright: reportMissingImports=false
"""PEFT: adapters on a frozen model."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from projects import Setup, project
from projects.families.huggingface import GPT2, LLAMA, SMALL, T5, FromConfig, of_transformers, text


def adapters(**settings: Any) -> Any:
    return project("PEFT", needs=("transformers.PreTrainedModel", "peft"), **settings)


def adapted(model: nn.Module, config: Any, labels: str = "words", half: bool = False, **trainer: Any) -> Setup:
    from peft import get_peft_model

    if half:  # as `from_pretrained(..., dtype=torch.bfloat16)` gives it; PEFT makes float32 adapters
        model = model.to(torch.bfloat16)
    model = get_peft_model(model, config)
    return Setup(FromConfig(model, lr=1e-2), text(labels), text(labels), predict=text(labels), trainer=trainer)


MODELS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {**LLAMA, "num_key_value_heads": 4},
    "GPT2LMHeadModel": {**GPT2, "n_positions": 32},
    "BertForSequenceClassification": SMALL,
    "T5ForConditionalGeneration": T5,
}


def config_of(kind: str, **settings: Any) -> Any:
    import peft

    return getattr(peft, f"{kind}Config")(**settings)


def add(
    name: str,
    what: str,
    model: str,
    kind: str,
    settings: dict[str, Any],
    task: str = "CAUSAL_LM",
    *,
    quick: bool = False,
    **more: Any,
) -> None:
    """Add an adapter of a kind, as in "Lora", on one of `MODELS`."""

    @adapters(name=name, what=what, quick=quick)
    def make() -> Setup:
        return adapted(of_transformers(model, MODELS[model]), config_of(kind, task_type=task, **settings), **more)


LLAMAS, QUERIES = "LlamaForCausalLM", {"r": 4, "target_modules": ["q_proj", "v_proj"]}
add(
    "lora", "LoRA on the queries and values of a LLaMA.", LLAMAS, "Lora", {**QUERIES, "lora_alpha": 8}, quick=True
)  # fmt: skip
add(
    "lora_on_bf16", "LoRA on every linear layer of a LLaMA that was loaded in bfloat16.", LLAMAS, "Lora",
    {"r": 4, "target_modules": "all-linear", "init_lora_weights": "gaussian"}, half=True, gradient_clip_val=1.0,
)  # fmt: skip
add(
    "lora_conv1d", "LoRA with dropout on GPT-2's `Conv1D`.", "GPT2LMHeadModel", "Lora",
    {"r": 4, "target_modules": ["c_attn"], "fan_in_fan_out": True, "lora_dropout": 0.1},
)  # fmt: skip
add(
    "dora", "DoRA: a magnitude per row, computed from the adapted weight.", LLAMAS, "Lora",
    {**QUERIES, "use_dora": True},
)  # fmt: skip
add(
    "lora_with_head", "LoRA on BERT; the classifier is trained as a copy (`modules_to_save`).",
    "BertForSequenceClassification", "Lora",
    {"r": 4, "target_modules": ["query", "value"], "modules_to_save": ["classifier"]}, "SEQ_CLS", labels="class",
)  # fmt: skip
add("ia3", "IA3 on T5: learned factors.", "T5ForConditionalGeneration", "IA3", {}, "SEQ_2_SEQ_LM")
add("prefix_tuning", "Prefix tuning: learned keys and values.", LLAMAS, "PrefixTuning", {"num_virtual_tokens": 4})
add(
    "prompt_tuning", "Prompt tuning: learned embeddings before the text.", "GPT2LMHeadModel", "PromptTuning",
    {"num_virtual_tokens": 4},
)  # fmt: skip


@adapters()
def adalora() -> Setup:
    """AdaLoRA: each step redistributes the ranks by the importance of the gradients."""
    config = config_of(
        "AdaLora", task_type="CAUSAL_LM", init_r=6, target_r=3, total_step=8, tinit=1, tfinal=2,
        target_modules=["q_proj", "v_proj"],
    )  # fmt: skip
    setup = adapted(of_transformers(LLAMAS, MODELS[LLAMAS]), config)

    class Allocating(FromConfig):
        def on_train_batch_end(self, *args: Any) -> None:
            self.model.base_model.update_and_allocate(self.global_step)

    return Setup(Allocating(setup.module.model, lr=1e-2), setup.train, setup.val)
