"""What the models of text share."""

from __future__ import annotations

import torch

from benchmarks.headline.models._model import Batch, Size


def tokens(size: Size, vocabulary: int) -> Batch:
    """Return random tokens, all of them to be predicted, no padding."""
    ids = torch.randint(vocabulary, (size.batch, size.length))
    return {"input_ids": ids, "labels": ids}
