# pyright: reportMissingImports=false
"""PEFT: adapters on a frozen model."""

from __future__ import annotations

import torch

from projects import Setup, project
from projects.families.huggingface import LLAMA, FromConfig, of_transformers, text


@project("PEFT", needs=("transformers.PreTrainedModel", "peft"))
def lora_on_bf16() -> Setup:
    """LoRA on every linear layer of a LLaMA that was loaded in bfloat16."""
    from peft import LoraConfig, get_peft_model

    # as `from_pretrained(..., dtype=torch.bfloat16)` gives it; PEFT makes float32 adapters
    model = of_transformers("LlamaForCausalLM", LLAMA).to(torch.bfloat16)
    config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights="gaussian", task_type="CAUSAL_LM")
    model = get_peft_model(model, config)
    return Setup(FromConfig(model, lr=1e-2), text(), text(), predict=text(), trainer={"gradient_clip_val": 1.0})
