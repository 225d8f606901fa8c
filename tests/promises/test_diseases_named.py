"""Planted faults: each is named completely, with a cure that works, and the cured modules cause no report."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from support import quiet_trainer
from zoo.faults import Fault
from zoo.registry import cases

from lightning_amp import OverflowLocator
from lightning_amp.reports import Overflow

pytestmark = pytest.mark.cpu


def run(fault: Fault, cured: bool) -> tuple[OverflowLocator, Any]:
    torch.manual_seed(0)
    locator, plugin = OverflowLocator(max_reports=3), fault.plugin(cured)
    trainer = quiet_trainer(accelerator="cpu", max_epochs=2, plugins=[plugin], callbacks=[locator])
    trainer.fit(fault.make(cured), fault.loader(cured))
    return locator, plugin


def wrong(fault: Fault, report: Overflow) -> list[str]:
    """Compare a report with the planted fault."""
    operation, advice = report.operation, str(report).partition("\n  fix: ")[2]
    name, code = ("", "") if operation is None else (operation.name, operation.code)
    checks = {
        f"cause {report.cause}": fault.cause in ("", report.cause),
        f"operation {name}": fault.operation in ("", name),
        f"line {code}": fault.line in code,
        f"module {report.module}": fault.module in (None, report.module),
        f"in fp32 {report.in_fp32}": report.in_fp32 == fault.in_fp32 or report.fitting_scale is not None,
        f"words: {report}": fault.says in str(report) and not any(word in advice for word in fault.never),
        f"remedies {report.remedies}": any(works and one.startswith(fault.remedy) for one, works in report.remedies)
        or not fault.remedy,
    }
    return [text for text, is_right in checks.items() if not is_right]


@pytest.mark.filterwarnings("ignore:.*Before the first step")
@pytest.mark.filterwarnings("ignore:std\\(\\)")  # a change of one value
@pytest.mark.parametrize("fault", cases(Fault))
@pytest.mark.few(18)
def test_a_fault_is_named_and_its_cure_works(fault: Fault, caplog: pytest.LogCaptureFixture) -> None:
    locator, plugin = run(fault, cured=False)
    assert (plugin.num_skipped == 0) == fault.is_taken
    named = wrong(fault, locator.reports[0])
    printed = caplog.text.count(" was taken" if fault.is_taken else " skipped (batch")
    with caplog.at_level(logging.WARNING):
        caplog.clear()
        cured, _ = run(fault, cured=True)
    is_quiet = not cured.reports and "OverflowLocator" not in caplog.text and "  fix: " not in caplog.text
    assert named == []
    assert is_quiet
    assert len({report.key for report in locator.reports}) == printed == 1, (
        "one fault has one cause, which is said once"
    )
