"""The plan's runs and their order; each model has the parameters of the published model of its name."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from benchmarks.headline._arms import ARMS, peak_flops
from benchmarks.headline._plan import plan
from benchmarks.headline.models import MODELS

RUNS = plan(list(MODELS.values()))


def test_all_models_come_first_in_all_precisions() -> None:
    first = RUNS[: next(i for i, run in enumerate(RUNS) if run.compiled)]
    assert list(dict.fromkeys(run.model for run in first)) == list(MODELS)
    for name in MODELS:
        assert [run.arm for run in first if run.model == name][:6] == list(ARMS)[:6]


def test_no_run_is_there_twice_and_those_of_a_table_stand_together() -> None:
    assert len(set(RUNS)) == len(RUNS)
    changes = [after.case for before, after in pairwise(RUNS) if before.case != after.case]
    assert len(changes) == len(set(changes))


def test_batches_are_doubled_and_fp8_is_compiled_or_cannot() -> None:
    for model in MODELS.values():
        sizes = {run.size for run in RUNS if run.model == model.name}
        assert {size for usual in model.sizes for size in (usual, usual.doubled())} == sizes
        (fp8,) = [run for run in RUNS if run.model == model.name and run.arm == "fp8"]
        assert fp8.compiled != bool(model.no_fp8)
        assert bool(fp8.estimated_s()) == fp8.compiled


def test_it_takes_some_calls_of_ten_minutes() -> None:
    assert sum(run.estimated_s() for run in RUNS) < 40 * 60


def test_tiny_runs_all_arms_of_all_models() -> None:
    runs = plan(list(MODELS.values()), tiny=True)
    assert {(run.model, run.arm) for run in runs} >= {(name, arm) for name in MODELS for arm in ARMS}


def test_the_peak_is_that_of_the_format() -> None:
    assert peak_flops("NVIDIA H200 (sm_90)", ARMS["bf16"]) == pytest.approx(989.4e12)
    assert peak_flops("NVIDIA H200 (sm_90)", ARMS["fp32"]) == pytest.approx(66.9e12)
    assert peak_flops("NVIDIA H200 NVL (sm_90)", ARMS["tf32"]) == pytest.approx(417.5e12)
    assert peak_flops("NVIDIA A100-SXM4-80GB (sm_80)", ARMS["fp8"]) is None
    assert peak_flops("AMD EPYC", ARMS["bf16"]) is None


@pytest.mark.parametrize("name", MODELS)
def test_the_models_have_the_parameters_that_the_page_says(name: str) -> None:
    pytest.importorskip("transformers")
    model = MODELS[name]
    with torch.device("meta"):
        made = model.make(model.sizes[0], False)
    assert sum(parameter.numel() for parameter in made.net.parameters()) == model.num_parameters
    rows: Any = next(iter(made.batch.values()))
    assert rows.shape[0] == model.sizes[0].batch
    assert len(made.blocks) == {"resnet50": 1, "bert_large": 24, "gpt2": 12, "llama_1b": 16, "llama_7b": 32}.get(
        name, 0
    )
