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
    if fault.in_fp32_too:
        assert comparison.report is None
        assert all(name in said for name in fault.names)
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


class Policy(Case):
    """Compares log-probabilities with the log-probabilities of an old policy, computed in fp32."""

    def __init__(self) -> None:
        super().__init__(head=LogProbabilities())

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.head(self.inp(batch["x"]))


class LogProbabilities(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = torch.nn.Linear(16, 8)
        torch.nn.init.constant_(self.out.bias, 100.0)  # which a softmax takes out again, and half precision does not

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.out(hidden).log_softmax(-1).float()[:, :1]


@pytest.mark.needs("whole autocast")
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_head_whose_log_probabilities_differ_is_named(precision: str) -> None:
    torch.manual_seed(0)
    module = Policy()
    rows = rows_for(module)
    comparison, (said,) = validate(module, rows, precision, tolerance=1e-5)
    assert comparison.report is not None
    assert comparison.report.module.startswith("head")
    assert f"fix: `fp32_modules=['{comparison.report.module}']` (tried: works)" in said


def test_an_overflow_to_minus_infinity_is_no_mask() -> None:
    class Negative(Case):
        def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            return torch.nn.functional.softplus(-self.out(self.inp(1e3 * batch["x"].abs() + 1e3)))

    torch.manual_seed(0)
    module = Negative()
    torch.nn.init.constant_(module.inp.weight, 1.0)
    torch.nn.init.constant_(module.out.weight, -1.0)
    comparison, (said,) = validate(module, rows_for(module), "fp16")
    assert comparison.report is not None
    assert comparison.report.module == "out"
    assert "is not finite in fp16, although its inputs are" in said


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
