# pyright: reportMissingImports=false
"""PEFT: adapters on a frozen model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from projects import Setup, project
from projects.families.huggingface import ENDS, SMALL, VOCABULARY, FromConfig, text


def adapters(**settings: Any) -> Any:
    return project("PEFT", needs=("transformers.PreTrainedModel", "peft"), **settings)


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SMALL, num_key_value_heads=4, max_position_embeddings=64, **ENDS))


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_positions=32, n_embd=32, n_layer=2, n_head=4))


def bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(BertConfig(**SMALL))


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    return T5ForConditionalGeneration(config)


def adapted(model: nn.Module, config: Any, labels: str = "words", half: bool = False, **trainer: Any) -> Setup:
    from peft import get_peft_model

    if half:  # as `from_pretrained(..., dtype=torch.bfloat16)` gives it; PEFT makes float32 adapters
        model = model.to(torch.bfloat16)
    model = get_peft_model(model, config)
    return Setup(FromConfig(model, lr=1e-2), text(labels), text(labels), predict=text(labels), trainer=trainer)


def add(name: str, what: str, make: Callable[[], Setup], **settings: Any) -> None:
    adapters(name=name, what=what, **settings)(make)


def _lora() -> Setup:
    from peft import LoraConfig

    return adapted(llama(), LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"]))


def _lora_half() -> Setup:
    from peft import LoraConfig

    config = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear", init_lora_weights="gaussian")
    return adapted(llama(), config, half=True, gradient_clip_val=1.0)


def _lora_conv1d() -> Setup:
    from peft import LoraConfig

    config = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["c_attn"], fan_in_fan_out=True, lora_dropout=0.1)
    return adapted(gpt2(), config)


def _dora() -> Setup:
    from peft import LoraConfig

    config = LoraConfig(task_type="CAUSAL_LM", r=4, use_dora=True, target_modules=["q_proj", "v_proj"])
    return adapted(llama(), config)


def _lora_with_head() -> Setup:
    from peft import LoraConfig

    config = LoraConfig(task_type="SEQ_CLS", r=4, target_modules=["query", "value"], modules_to_save=["classifier"])
    return adapted(bert(), config, "class")


def _ia3() -> Setup:
    from peft import IA3Config

    return adapted(t5(), IA3Config(task_type="SEQ_2_SEQ_LM"))


def _prefix() -> Setup:
    from peft import PrefixTuningConfig

    return adapted(llama(), PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))


def _prompt() -> Setup:
    from peft import PromptTuningConfig

    return adapted(gpt2(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))


def _adalora() -> Setup:
    from peft import AdaLoraConfig

    config = AdaLoraConfig(
        task_type="CAUSAL_LM",
        init_r=6,
        target_r=3,
        total_step=8,
        tinit=1,
        tfinal=2,
        target_modules=["q_proj", "v_proj"],
    )
    setup = adapted(llama(), config)

    class Allocating(FromConfig):
        def on_train_batch_end(self, *args: Any) -> None:
            self.model.base_model.update_and_allocate(self.global_step)

    module = Allocating(setup.module.model, lr=1e-2)
    return Setup(module, setup.train, setup.val)


add("lora", "LoRA on the queries and values of a LLaMA.", _lora, quick=True)
add("lora_on_bf16", "LoRA on every linear layer of a LLaMA that was loaded in bfloat16.", _lora_half)
add("lora_conv1d", "LoRA with dropout on GPT-2's `Conv1D`.", _lora_conv1d)
add("dora", "DoRA: a magnitude per row, computed from the adapted weight.", _dora)
add("lora_with_head", "LoRA on BERT; the classifier is trained as a copy (`modules_to_save`).", _lora_with_head)
add("ia3", "IA3 on T5: learned factors.", _ia3)
add("prefix_tuning", "Prefix tuning: learned keys and values.", _prefix)
add("prompt_tuning", "Prompt tuning: learned embeddings before the text.", _prompt)
add("adalora", "AdaLoRA: ranks are given and taken after each step, by the gradients' importance.", _adalora)
