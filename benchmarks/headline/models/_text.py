"""Shared parts of the models of text."""

from __future__ import annotations

import torch

from benchmarks.headline.models._model import Batch, Size


def tokens(size: Size, vocabulary: int) -> Batch:
    """Return random tokens without padding, all of which are to be predicted."""
    ids = torch.randint(vocabulary, (size.batch, size.length))
    return {"input_ids": ids, "labels": ids}
