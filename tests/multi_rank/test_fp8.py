"""Emulated fp8 on two gloo ranks: DDP, FSDP2 and tensor parallel train the same layers as one process does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.fp8 import needs_torchao, sqnr_db
from support.launch import launch

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parent / "fp8_scenarios.py"
NEAR = {"ddp": 60, "fsdp": 60, "fsdp_bf16": 54, "tensor_parallel": 60}
"""In dB. fp8 in one process has some 53 dB to bf16; where weights are gathered in bf16, both round more."""


@needs_torchao
def test_trains_as_one_process_in_fp8(tmp_path: Path) -> None:
    """One test, because one launch serves all of it."""
    ranks: list[dict[str, Any]] = launch(SCRIPT, 2, tmp_path)
    single, half = ranks[0]["alone"]["fp8"], ranks[0]["alone"]["bf16"]
    assert list(single["layers"].values()) == ["the first linear layer", *[None] * 4, "the last linear layer"]
    for name, near in NEAR.items():
        here, there = (rank[name] for rank in ranks)
        assert torch.equal(here["parameters"], there["parameters"])
        assert (
            sqnr_db(here["parameters"], single["parameters"]) > near > sqnr_db(here["parameters"], half["parameters"])
        )
        assert here["layers"] == there["layers"] == single["layers"]
        assert here["counts"] == (6, 0)
        assert here["keys"] == half["keys"]
    assert ranks[0]["fsdp"]["types"] == ranks[0]["fsdp_without_fp8"]["types"]
    assert single["types"] == half["types"]
