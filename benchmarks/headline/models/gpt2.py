"""GPT-2, the one of 124 M parameters."""

from __future__ import annotations

from benchmarks.headline.models._model import Claim, Model, Size, Workload, library, loss_of_transformers
from benchmarks.headline.models._text import tokens


def make(size: Size, tiny: bool) -> Workload:
    """Make the model; tiny: two layers of width 64."""
    transformers = library("transformers")
    small = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 512} if tiny else {}
    config = transformers.GPT2Config(use_cache=False, **small)
    net = transformers.GPT2LMHeadModel(config)
    batch, source = tokens(size, config.vocab_size), f"transformers {transformers.__version__}"
    return Workload(net, loss_of_transformers, batch, list(net.transformer.h), source)


MODEL = Model(
    name="gpt2",
    title="GPT-2",
    make=make,
    sizes=(Size(12, 1024),),
    tiny=Size(2, 32),
    unit=("sequences", "tokens"),
    why_sizes="nanoGPT uses 12 sequences per GPU",
    optimizer="AdamW",
    num_parameters=124_439_808,
    claim=Claim(1.4, "35 % less memory"),
    no_fp8="its layers are `Conv1D` of transformers, and fp8 is for `nn.Linear`",
    compiled=("tf32", "lightning_bf16", "bf16"),
)
