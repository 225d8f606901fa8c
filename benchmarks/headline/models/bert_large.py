"""BERT-large with the head of its masked language model, whose loss counts every token."""

from __future__ import annotations

from benchmarks.headline.models._model import Claim, Model, Size, Workload, library, loss_of_transformers
from benchmarks.headline.models._text import tokens


def make(size: Size, tiny: bool) -> Workload:
    """Make the model; tiny: three layers of width 64."""
    transformers = library("transformers")
    width, layers, heads = (64, 3, 4) if tiny else (1024, 24, 16)
    config = transformers.BertConfig(
        vocab_size=512 if tiny else 30522,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * width,
    )
    net = transformers.BertForMaskedLM(config)
    batch, source = tokens(size, config.vocab_size), f"transformers {transformers.__version__}"
    return Workload(net, loss_of_transformers, batch, list(net.bert.encoder.layer), source)


MODEL = Model(
    name="bert_large",
    title="BERT-large",
    make=make,
    sizes=(Size(16, 512), Size(64, 128)),
    tiny=Size(2, 32),
    unit=("sequences", "tokens"),
    why_sizes="BERT is pre-trained in two phases with these lengths; both batches have the same number of tokens",
    optimizer="AdamW",
    num_parameters=335_174_458,
    claim=Claim(1.8, "45 % less memory"),
    compiled=("tf32", "lightning_bf16", "bf16", "fp8"),
)
