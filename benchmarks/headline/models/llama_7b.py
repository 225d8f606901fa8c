"""A model of the shape of LLaMA 7B.

With AdamW its weights, gradients and states take 100 GiB, so activation checkpointing is on, in every precision.
"""

from __future__ import annotations

from benchmarks.headline.models._model import Claim, Model, Size, Workload, library, loss_of_transformers
from benchmarks.headline.models._text import tokens


def make(size: Size, tiny: bool) -> Workload:
    """Make the model; tiny: two layers of width 64."""
    transformers = library("transformers")
    config = transformers.LlamaConfig(
        vocab_size=512 if tiny else 32000,
        hidden_size=64 if tiny else 4096,
        intermediate_size=192 if tiny else 11008,
        num_hidden_layers=2 if tiny else 32,
        num_attention_heads=4 if tiny else 32,
        use_cache=False,
    )
    net = transformers.LlamaForCausalLM(config)
    # the second name is the older one
    enable = getattr(net, "activation_checkpointing_enable", None) or net.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    batch, source = tokens(size, config.vocab_size), f"transformers {transformers.__version__}"
    return Workload(net, loss_of_transformers, batch, list(net.model.layers), source)


MODEL = Model(
    name="llama_7b",
    title="LLaMA-like, 7B",
    make=make,
    sizes=(Size(2, 2048),),
    tiny=Size(2, 32),
    unit=("sequences", "tokens"),
    why_sizes="there is no common batch size; this one fits in addition to 100 GiB of weights and states",
    optimizer="AdamW",
    num_parameters=6_738_415_616,
    claim=Claim(2.4, "42 GB instead of 75 GB"),
    compiled=("bf16", "fp8"),
    eager_s=28.0,
    compiled_s=60.0,
)
