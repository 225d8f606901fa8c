"""Projects with a planted fault: `doctor` names each fault, its cure removes it, and healthy projects have none."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from support import Toy, batches
from support.doctor_facts import machine, machine_with
from support.planned_race import PlannedClock, planned_race
from zoo import slow
from zoo.slow import HEALTHY, SLOW

from lightning_amp import doctor
from lightning_amp.advice import _doctor, _race, _watch
from lightning_amp.advice._step import AS_IT_IS, BACKWARD, FORWARD, IN_FP32, OPTIMIZER
from lightning_amp.advice.findings import _products
from lightning_amp.advice.findings._products import fp32_products
from lightning_amp.measure import _step_timer

pytestmark = pytest.mark.usefixtures("quick")

SEVERE = {"data-bound", "autocast-off", "large-logits", "emulated-precision"}
"""Codes that are a warning or an error on a machine of any speed."""


def codes(report: Any) -> dict[str, str]:
    return {finding.code: finding.severity for finding in report.findings}


def cases(names: Iterable[str]) -> list[Any]:
    """Mark the projects that take ten times as long as the others."""
    large = {
        "attention with dropout", "a large vocabulary", "layers with odd widths",
        "depthwise convolutions, channels first",
        "a transformer", "convolutions, channels last", "a language model with a small vocabulary",
    }  # fmt: skip
    return [pytest.param(name, marks=pytest.mark.slow) if name in large else name for name in names]


@pytest.mark.parametrize("name", cases(SLOW))
@pytest.mark.few(4)
def test_a_planted_fault_is_named_and_its_cure_removes_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, clock, planned_ms = SLOW[name], PlannedClock(), 3.0
    if case.code == "model-too-small":  # this code depends on times
        monkeypatch.setattr(_products, "slowest_product", lambda step: "")
        monkeypatch.setattr(_doctor, "race", planned_race(lambda data: {AS_IT_IS: 1.0, IN_FP32: 0.9}))
    elif name == "fp16 on a CPU":  # only a note unless the race shows that it is slower
        monkeypatch.setattr(_doctor, "race", planned_race(lambda data: {AS_IT_IS: planned_ms, IN_FP32: 1.0}))
    elif name == "a slow data set":  # in the cured project it sleeps in workers, which have real clocks
        for module in (slow, _watch, _step_timer):
            monkeypatch.setattr(module, "time", clock)
    if case.memory_gib:
        small = machine(memory_gib=case.memory_gib / slow.SIZES["divisor"] ** 2)
        monkeypatch.setattr(_doctor, "examine", lambda device, short: small)
    report = doctor(**case.arguments())
    found = codes(report)
    assert case.code in found
    if case.code in SEVERE:
        assert found[case.code] in ("warning", "error")
    planned_ms = 0.5
    cured = doctor(**case.arguments(cured=True))
    if case.code == "data-bound":  # loading still takes some time on a slow machine
        assert cured.step.parts["data"] < 0.7 * report.step.parts["data"]
    elif case.code == "large-logits":
        assert cured.step.memory.logits < report.step.memory.logits / 3
    else:
        assert case.code not in codes(cured)


@pytest.mark.parametrize("name", cases(HEALTHY))
@pytest.mark.few(3)
def test_a_healthy_project_has_no_problem(name: str, request: pytest.FixtureRequest) -> None:
    if name == "an LSTM":
        request.getfixturevalue("own_lstm")
    report = doctor(**HEALTHY[name].arguments())
    assert [finding for finding in report.findings if finding.is_problem] == []
    assert "nothing-to-do" in [finding.code for finding in report.findings]


class Orthogonal(torch.optim.SGD):
    """Multiply matrices in each step, as Muon and Shampoo do, in any precision."""

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


class OwnAdam(torch.optim.Adam):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def test_what_an_optimizer_reads_is_no_wait() -> None:
    """Adam reads its counts, which are on the host; the user's line is a caller of it."""
    report = doctor(lambda: WithRows(lambda params: OwnAdam(params, 1e-3, foreach=False)), precision="bf16")
    assert "host-waits" not in codes(report)


def test_products_of_an_optimizer_do_not_count_as_products_of_the_module() -> None:
    found = []
    for make in (Orthogonal, torch.optim.SGD):
        step = doctor(
            lambda make=make: WithRows(lambda params: make(params, lr=0.1)),  # type: ignore[misc]
            precision="bf16", device="cpu",
        ).step  # fmt: skip
        assert step is not None
        found.append((step.recorded.flops, step.recorded.module_flops, fp32_products(step)))
        own = [o for o in step.recorded.operations if o.part == OPTIMIZER and o.flops]
        assert bool(own) == (make is Orthogonal)
        assert {o.part for o in step.recorded.of_the_module if o.flops} == {FORWARD, BACKWARD}
    assert found[0] == found[1]


def test_the_race_does_not_accumulate_and_a_factory_draws_the_same_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    races: list[dict[str, Any]] = []
    real = _doctor.race

    def noted(contestants: Any, track: Any, **settings: Any) -> Any:
        races.append(dict(track.trainer_kwargs))
        return real(contestants, track, **settings)

    monkeypatch.setattr(_doctor, "race", noted)
    drawn: list[int] = []

    def make() -> WithRows:
        drawn.append(int(torch.randint(1, 10**9, ())))
        return WithRows()

    doctor(make, precision="bf16", trainer_kwargs={"accumulate_grad_batches": 2}, device="cpu")
    assert [kwargs["accumulate_grad_batches"] for kwargs in races] == [1]
    assert len(drawn) >= 2
    assert len(set(drawn)) == 1


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> PlannedClock:
    clock = PlannedClock()
    for module in (_step_timer, _race, _watch):
        monkeypatch.setattr(module, "time", clock)
    return clock


def test_a_step_of_a_minute_is_run_three_times_and_reported(
    clock: PlannedClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_doctor, "examine", lambda device, short: machine_with(bf16=0.02))
    num_slow = 0

    class Slow(WithRows):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            nonlocal num_slow
            is_slow = torch.is_autocast_enabled("cpu")
            num_slow += is_slow
            clock.sleep(61.0 if is_slow else 0.61)
            return super().training_step(batch, batch_idx)

    report = doctor(Slow, precision="bf16", device="cpu")
    assert num_slow == 4  # one may be slow because it is the first, one is timed, one is recorded, one is raced
    assert clock.now_s < 4 * 61.0 + 10 * 0.61
    page = str(report)
    assert "A step in bf16 takes 61 s without its data, and 610 ms in fp32 (100.0x as slow, one run of each)" in page
    assert "| all | 61 s | mean of 1 step |" in page
    assert [f.code for f in report.findings if f.is_problem] == ["emulated-precision"]
    assert report.findings[0].action == 'Use `AmpPrecision("fp32")`.'


class Lbfgs(WithRows):
    def __init__(self) -> None:
        super().__init__(lambda params: torch.optim.LBFGS(params, lr=0.1, max_iter=2, history_size=50))


def test_states_that_grow_with_each_step_are_compared_at_equal_history(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_watch, "_TIMED", (8, 8))
    step = doctor(Lbfgs, precision="bf16", device="cpu").step
    assert step is not None
    assert step.fp32_memory is not None
    assert step.fp32_memory.states == step.memory.states > 0


def test_a_slow_first_step_is_not_timed(clock: PlannedClock) -> None:
    class Compiles(WithRows):
        num_steps = 0

        def on_train_start(self) -> None:
            clock.sleep(20.0)  # an import, on a slow disk

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            clock.sleep(0.05 if self.num_steps else 40.0)
            self.num_steps += 1
            return super().training_step(batch, batch_idx)

    step = doctor(Compiles, precision="bf16", device="cpu").step
    assert step is not None
    assert step.num_timed == 3
    assert sum(step.parts.values()) < 0.1
