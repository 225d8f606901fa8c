"""Planted projects: each reason is named, the cure takes it away, and healthy ones are left in peace.

`python -m tests.benchmarks.doctor_projects` runs the same with the times that `doctor` takes by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import Toy, batches, slow_projects
from support.planned_race import PlannedClock, planned_race
from support.slow_projects import HEALTHY, SLOW

from lightning_amp import doctor
from lightning_amp.advice import AS_IT_IS, IN_FP32
from lightning_amp.profiling import _analysis, _clock, _examine_step
from lightning_amp.profiling._clock import BACKWARD, FORWARD, OPTIMIZER

pytestmark = pytest.mark.usefixtures("quick")

SEVERE = {"data-bound", "autocast-off", "float64", "large-logits", "emulated-precision"}
"""Codes whose cases are a warning, whatever the clock says."""


def codes(report: Any) -> dict[str, str]:
    return {finding.code: finding.severity for finding in report.findings}


@pytest.mark.parametrize("name", SLOW)
def test_a_planted_reason_is_named_and_its_cure_takes_it_away(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, clock = SLOW[name], PlannedClock()
    if case.code == "model-too-small":  # which is about times
        monkeypatch.setattr(_examine_step, "race", planned_race(lambda data: {AS_IT_IS: 1.0, IN_FP32: 0.9}))
    elif name == "a data set that sleeps":  # in the cure its workers do, which have clocks of their own
        for module in (slow_projects, _clock):
            monkeypatch.setattr(module, "time", clock)
    report = doctor(**case.arguments())
    found = codes(report)
    assert case.code in found
    if case.code in SEVERE:
        assert found[case.code] in ("warning", "error")
    cured = doctor(**case.arguments(cured=True))
    if case.code == "data-bound":  # of what remains the machine has a part
        assert cured.step.parts["data"] < 0.7 * report.step.parts["data"]
    elif case.code == "large-logits":
        assert cured.step.memory.logits < report.step.memory.logits / 3
    else:
        assert case.code not in codes(cured)


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_project_is_left_in_peace(name: str) -> None:
    report = doctor(**HEALTHY[name].arguments())
    assert [finding for finding in report.findings if finding.is_problem] == []
    assert "nothing-to-do" in [finding.code for finding in report.findings]


class Orthogonal(torch.optim.SGD):
    """Multiplies matrices, as Muon and Shampoo do, whatever the precision."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            if parameter.dim() == 2:
                parameter.add_(parameter @ parameter.T @ parameter, alpha=-1e-3)
        return loss


class WithRows(Toy):
    def train_dataloader(self) -> Any:
        return batches(4)


def test_products_of_the_optimizer_are_not_those_of_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    parts: dict[str, set[str]] = {}
    recorded: list[Any] = []

    def noted(name: str) -> Callable[..., Any]:
        real = getattr(_analysis, name)

        def call(*arguments: Any) -> Any:
            groups = [group for group in arguments if isinstance(group, list)]
            parts.setdefault(name, set()).update(o.part for group in groups for o in group if o.flops)
            return real(*arguments)

        return call

    for name in ("flops_by_dtype", "flops_by_module", "product_s", "slower_products", "reasons", "casts"):
        monkeypatch.setattr(_analysis, name, noted(name))
    waits = _analysis.waits
    monkeypatch.setattr(_analysis, "waits", lambda recorder: recorded.append(recorder) or waits(recorder))
    flops = []
    for make in (Orthogonal, torch.optim.SGD):
        report = doctor(
            lambda make=make: WithRows(lambda params: make(params, lr=0.1)),  # type: ignore[misc]
            precision="bf16", device="cpu",
        )  # fmt: skip
        flops.append((report.step.flops, report.step.module_flops))
    assert any(o.part == OPTIMIZER and o.flops for o in recorded[0].operations)
    assert flops[0] == flops[1]
    assert list(parts.values()) == [{FORWARD, BACKWARD}] * 6


def test_the_race_does_not_accumulate_and_a_factory_draws_the_same_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    races: list[dict[str, Any]] = []
    real = _examine_step.race

    def noted(contestants: Any, device: Any, kwargs: Any, data: Any) -> Any:
        races.append(dict(kwargs))
        return real(contestants, device, kwargs, data)

    monkeypatch.setattr(_examine_step, "race", noted)
    drawn: list[int] = []

    def make() -> WithRows:
        drawn.append(int(torch.randint(1, 10**9, ())))
        return WithRows()

    doctor(make, precision="bf16", trainer_kwargs={"accumulate_grad_batches": 2}, device="cpu")
    assert [kwargs["accumulate_grad_batches"] for kwargs in races] == [1]
    assert len(drawn) >= 2
    assert len(set(drawn)) == 1
