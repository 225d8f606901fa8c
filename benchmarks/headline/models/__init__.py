"""The models, one file each, in the order of their runs: the most important first."""

from __future__ import annotations

from benchmarks.headline.models import bert_large, efficientnet_b7, gpt2, llama_1b, llama_7b, resnet50
from benchmarks.headline.models._model import Batch, Claim, Model, Size, Workload

MODELS: dict[str, Model] = {
    model.name: model
    for model in (
        resnet50.MODEL,
        bert_large.MODEL,
        gpt2.MODEL,
        llama_1b.MODEL,
        llama_7b.MODEL,
        efficientnet_b7.MODEL,
    )
}

__all__ = ["MODELS", "Batch", "Claim", "Model", "Size", "Workload"]
