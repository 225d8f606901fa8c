"""Planted faults of validation: `MetricComparison` names batch, cause and module, and its tried remedy cures the fault.

It reports nothing about a healthy run, and the run is bit-identical with and without it.
"""

from __future__ import annotations

import gc
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
    comparison, (said,) = validate(module, rows, fault.precision, tolerance=fault.tolerance)
    assert all(name in said for name in fault.names)
    if fault.in_fp32_too:
        assert comparison.report is None
        assert "no precision helps" in said
        assert "fp32_modules" not in said
        return
    report = comparison.report
    assert report is not None
    assert str(report) in said
    assert fault.module in (None, report.module), said
    (argument, value), works = next(iter(fault.cure.items())), [one.setting for one in report.tried if one.works]
    assert works[0] == f"`{argument}={value!r}`"
    assert f"fix: {works[0]} (tried: works)" in said
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


def test_memory_does_not_grow_with_the_number_of_batches() -> None:
    class Counts(MetricComparison):  # type: ignore[misc]
        def on_validation_batch_end(self, *args: Any) -> None:
            super().on_validation_batch_end(*args)
            if args[4] % 10 == 9:
                alive.append(sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects()))

    alive = list[int]()
    module = Case()
    loader = DataLoader(rows_for(module, BATCH_SIZE * 40), batch_size=BATCH_SIZE)
    trainer = quiet_trainer(plugins=AmpPrecision("bf16"), callbacks=[Counts()])
    for _ in range(2):
        trainer.validate(module, loader, verbose=False)
    assert len(alive) == 8
    assert max(alive[2:4]) <= alive[1] + 5
    assert max(alive[6:]) <= alive[1] + 10


@pytest.mark.needs("whole autocast")
@pytest.mark.filterwarnings("ignore:`MetricComparison`")
@pytest.mark.parametrize("by_module", [False, True])
@pytest.mark.parametrize("case", [entries(Evaluated)["a constant in the step"], *cases(Evaluated, "healthy")])
@pytest.mark.few(7)
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
