"""The result as text and as JSON."""

from __future__ import annotations

import json
import math
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest

from lightning_amp.tune import BatchSizeResult, BatchSizes, Measurement

POINTS = (Measurement(32, 0.5, 10.0), Measurement(1024, math.inf, math.nan))
FINE = BatchSizeResult(1000, 3.96, 12_345.6, 0.0057, POINTS, 4.0, "It fits.")
FAILED = BatchSizeResult(0, math.nan, math.nan, None, (), 4.0, "KeyError: a | b", "KeyError: a | b")
FOUND = BatchSizes({"fp32": FINE, "a | b": FAILED})


def test_it_is_a_mapping_in_order() -> None:
    assert list(FOUND) == ["fp32", "a | b"]
    assert FOUND["fp32"] is FINE
    assert len(FOUND) == 2
    assert repr(FOUND) == "BatchSizes('fp32': 1000, 'a | b': 0)"
    with pytest.raises(FrozenInstanceError):
        FINE.batch_size = 3  # type: ignore[misc]


def test_markdown() -> None:
    assert str(FOUND) == (
        "| precision | batch size | peak memory | samples/s | learning rate to try |\n"
        "| --- | --: | --: | --: | --: |\n"
        "| fp32 | 1,000 | 3.96 GiB | 12,300 | 0.0057 |\n"
        "| a \\| b | none |  |  |  |\n"
        "\n"
        "**fp32**: It fits.\n"
        "\n"
        "**a | b**: KeyError: a | b\n"
    )


def test_speeds_are_one_run_of_each() -> None:
    slow = replace(FINE, samples_per_s=FINE.samples_per_s / 3.8)
    text = str(BatchSizes({"broken": FAILED, "fp32": FINE, "bf16": slow}))
    ratios = "compared with fp32: bf16 3.8x as slow, one run of each."
    assert f"\n\nTime per sample, with each precision at its own batch size, {ratios}\n\n" in text


def test_json_has_no_nan(tmp_path: Path) -> None:
    FOUND.to_json(tmp_path / "found.json")
    data = json.loads((tmp_path / "found.json").read_text(), parse_constant=pytest.fail)
    assert data["fp32"]["batch_size"] == 1000
    assert data["fp32"]["measured"] == [
        {"batch_size": 32, "peak_gib": 0.5, "samples_per_s": 10.0},
        {"batch_size": 1024, "peak_gib": None, "samples_per_s": None},
    ]
    assert (data["a | b"]["error"], data["a | b"]["peak_gib"]) == ("KeyError: a | b", None)
