"""Planted faults of validation: `MetricComparison` names batch, cause and module, and its tried remedy cures the fault.

It reports nothing about a healthy run, and the run is bit-identical with and without it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import quiet_trainer
from torch.utils.data import DataLoader
from zoo.evaluation import BATCH_SIZE, Case, Evaluated, rows_for, validate
from zoo.registry import cases, entries

from lightning_amp import AmpPrecision, MetricComparison

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers")


@pytest.mark.needs("whole autocast")
@pytest.mark.parametrize("fault", cases(Evaluated, "ill"))
def test_each_fault_is_named_and_cured(fault: Evaluated) -> None:
    module, rows = fault.planted()
    comparison, said = validate(module, rows, fault.precision)
    assert len(said) == 1
    report = comparison.report
    assert report is not None
    assert str(report) in said[0]
    assert (report.cause, report.module, report.batch_idx) == (fault.cause, fault.module, fault.batch_idx), said[0]
    assert report.in_fp32_too == fault.in_fp32_too
    assert all(any(name in found for found in report.names) for name in fault.names)
    if fault.operation:
        assert report.operation == fault.operation
        assert "evaluation.py" in report.place
    if fault.in_fp32_too:
        assert report.tried == ()
        assert "no precision can help" in said[0]
        assert "fp32_modules" not in said[0]
    if fault.cure:
        (argument, value), (works,) = next(iter(fault.cure.items())), [one for one in report.tried if one.works]
        assert works.setting == f"{argument}={value!r}"
        assert f"`{works.setting}` works" in said[0]
        cured, said = validate(module, rows, fault.precision, **fault.cure)
        assert (said, cured.report) == ([], None)
        (sick,), (healthy,) = comparison.table.last, cured.table.last
        assert not abs(healthy.diff) > 0.25 * abs(sick.diff)


@pytest.mark.needs("whole autocast")
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("case", cases(Evaluated, "healthy"))
@pytest.mark.usefixtures("own_lstm")
def test_healthy_runs_are_silent(case: Evaluated, precision: str) -> None:
    for seed in range(3):
        torch.manual_seed(seed)
        module = case.make()
        comparison, said = validate(module, rows_for(module, 30, seed), precision)
        assert (said, comparison.report) == ([], None)


def test_a_constant_in_the_step_is_not_in_fp32() -> None:
    module, rows = entries(Evaluated)["a constant in the step"].planted()
    comparison, said = validate(module, rows, "fp32")
    assert said == []
    assert [row.diff for row in comparison.table] == [0.0]


def test_the_loader_is_named() -> None:
    torch.manual_seed(0)
    module = Case()
    good, bad = rows_for(module), rows_for(module)
    bad[BATCH_SIZE]["y"][:] = float("nan")
    comparison, said = validate(module, [good, bad], "bf16")
    assert comparison.report is not None
    assert (comparison.report.loader_idx, comparison.report.batch_idx) == (1, 1)
    assert "first seen: batch 1 of loader 1" in said[0]


@pytest.mark.needs("whole autocast")
@pytest.mark.filterwarnings("ignore:`MetricComparison`")
@pytest.mark.parametrize("by_module", [False, True])
@pytest.mark.parametrize("case", [entries(Evaluated)["a constant in the step"], *cases(Evaluated, "healthy")])
def test_validation_is_bit_identical(case: Evaluated, by_module: bool) -> None:
    def outcome(look: bool) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        module = case.make()
        rows = rows_for(module)
        if look:
            validate(module, rows, "bf16", by_module=by_module)
        torch.manual_seed(1)
        callbacks: list[Any] = [MetricComparison(by_module=by_module)] if look else []
        trainer = quiet_trainer(plugins=AmpPrecision("bf16"), callbacks=callbacks)
        loader = DataLoader(rows, batch_size=BATCH_SIZE)
        trainer.fit(module, loader, loader)
        metrics = {name: value for name, value in trainer.callback_metrics.items() if not name.startswith("amp/")}
        return {**module.state_dict(), **metrics, "random": torch.rand(3)}

    without, looked = outcome(False), outcome(True)
    assert without.keys() == looked.keys()
    assert [name for name in without if not torch.equal(without[name], looked[name])] == []
