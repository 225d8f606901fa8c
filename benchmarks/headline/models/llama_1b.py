"""A model of the shape of Llama 3.2 1B, but with as many heads for keys as for queries.

For fewer heads torch has no fast attention in fp32, so fp32 would look worse than it has to.
"""

from __future__ import annotations

from benchmarks.headline.models._model import Model, Size, Workload, library, loss_of_transformers
from benchmarks.headline.models._text import tokens


def make(size: Size, tiny: bool) -> Workload:
    """Make the model; tiny: two layers of width 64."""
    transformers = library("transformers")
    config = transformers.LlamaConfig(
        vocab_size=512 if tiny else 128256,
        hidden_size=64 if tiny else 2048,
        intermediate_size=256 if tiny else 8192,
        num_hidden_layers=2 if tiny else 16,
        num_attention_heads=4 if tiny else 32,
        tie_word_embeddings=True,
        use_cache=False,
    )
    net = transformers.LlamaForCausalLM(config)
    batch, source = tokens(size, config.vocab_size), f"transformers {transformers.__version__}"
    return Workload(net, loss_of_transformers, batch, list(net.model.layers), source)


MODEL = Model(
    name="llama_1b",
    title="LLaMA-like, 1B",
    make=make,
    sizes=(Size(4, 2048),),
    tiny=Size(2, 32),
    unit=("sequences", "tokens"),
    why_sizes="there is no common batch size; 8,192 tokens fill the GPU",
    optimizer="AdamW",
    num_parameters=1_336_477_696,
    compiled=("tf32", "lightning_bf16", "bf16", "fp8"),
    eager_s=18.0,
)
