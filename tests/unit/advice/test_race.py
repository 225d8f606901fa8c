"""The race of variants of a step, and the changes that are tried."""

from __future__ import annotations

import math
import random
from collections import Counter
from statistics import median
from typing import Any

import pytest
import torch
from support import Toy, batches
from support.doctor_facts import machine, step
from support.planned_race import PlannedClock
from torch import nn

from lightning_amp import AmpPrecision, DynamicLossScaler
from lightning_amp.advice import DoctorReport, _race
from lightning_amp.advice._race import Contestant, Laps, Track, race
from lightning_amp.advice._step import OptimizerFacts, Variant
from lightning_amp.advice._watch import can_fuse, fuse
from lightning_amp.shadow import Batches, private_trainer, run_private_fit, unnoticed

CPU = torch.device("cpu")
TRACK = Track(CPU, {"accelerator": "cpu"}, Batches(list(batches(2))))


def contestant(label: str, module: Any = None, **settings: Any) -> Contestant:
    return Contestant(label, lambda: (module or Toy(), AmpPrecision("fp32")), **settings)


def test_one_that_fails_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fails(Toy):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise RuntimeError("no kernel\nfor this")

    class Full(Toy):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(_race, "_ROUNDS", (2, 2, 2))
    found = race([contestant("a", Fails()), contestant("b"), contestant("c", Full())], TRACK)
    assert [(v.label, len(v.step_s), v.error) for v in found] == [
        ("a", 0, "RuntimeError: no kernel"),
        ("b", 2, ""),
        ("c", 0, "there was not enough memory"),
    ]


@pytest.mark.parametrize(
    ("round_s", "known_s", "turns"),
    [
        (0.01, 0.0, "abcde edcba " * 4 + "abcde"),
        (1.0, 0.0, "abcde edcba abcde"),  # nine rounds would take too long
        (10.0, 0.0, "abcde"),  # a second round would, too
        (2.0, 2.0, "abc cba abc"),  # of long steps, fewer variants run one lap
    ],
)
def test_the_budget_decides_how_many_rounds(
    round_s: float, known_s: float, turns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, ran = [0.0], list[Any]()

    def turn(self: Contestant, track: Any, laps: int) -> None:
        now[0] += round_s
        ran.append((self.label, laps))

    monkeypatch.setattr(Contestant, "round", turn)
    monkeypatch.setattr(_race.time, "perf_counter", lambda: now[0])
    found = race([contestant(label) for label in "abcde"], TRACK, known_s=known_s)
    assert [variant.label for variant in found] == [*"abcde"]
    assert ran == [(label, 1 if known_s else _race._LAPS) for label in turns.replace(" ", "")]


@pytest.mark.parametrize(("noise", "rounds"), [(0.01, 9), (0.9, 18)])
def test_more_rounds_are_run_while_a_claim_is_open(noise: float, rounds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def turn(self: Contestant, *arguments: Any) -> None:
        number = len(self.step_s)
        self.step_s.append(1.0 if str(self.label) == "a" else 1.2 * (1 + noise * (-1) ** number))

    monkeypatch.setattr(Contestant, "round", turn)
    monkeypatch.setattr(_race.time, "perf_counter", lambda: 0.0)
    found = race([contestant("a"), contestant("b")], TRACK)
    assert [len(variant.step_s) for variant in found] == [rounds, rounds]


@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
def test_an_optimizer_that_is_made_fused_steps_as_one_that_was(make: Any) -> None:
    def weights(fused: bool) -> Any:
        torch.manual_seed(0)
        module = Toy(lambda params: make(params, lr=0.1, **({} if fused else {"fused": True})))
        configured: Any = module.configure_optimizers()
        schedule = torch.optim.lr_scheduler.StepLR(configured, 1, gamma=0.5)
        if fused:
            fuse(configured)
        for _ in range(3):
            module.loss(torch.ones(2, 8)).backward()
            configured.step()
            schedule.step()
        assert configured.param_groups[0]["fused"]
        assert configured.param_groups[0]["lr"] == pytest.approx(0.0125)
        return module.state_dict()

    torch.testing.assert_close(weights(True), weights(False), rtol=0, atol=0)


def test_which_optimizers_can_be_fused(device: torch.device) -> None:
    own = [nn.Parameter(torch.ones(2, device=device))]
    assert can_fuse(torch.optim.AdamW(own))
    assert not can_fuse(torch.optim.AdamW(own, fused=True))
    assert not can_fuse(torch.optim.AdamW(own, foreach=True))  # somebody chose that
    assert not can_fuse(torch.optim.RMSprop(own))
    assert can_fuse(torch.optim.Adagrad(own)) == (device.type == "cpu")
    assert not can_fuse(type("Mine", (torch.optim.AdamW,), {})(own))


def test_a_contestant_turns_on_fused() -> None:
    class Notes(Toy):
        fused: Any = None

        def on_train_end(self) -> None:
            self.fused = [group["fused"] for group in self.trainer.optimizers[0].param_groups]

    plain, fused = Notes(), Notes()
    contestant("as it is", plain).round(TRACK, 1)
    contestant("fused=True", fused).round(TRACK, 1)
    assert not any(plain.fused)
    assert fused.fused == [True]


# -- the steps that are timed ------------------------------------------------------------------------------------------


def test_laps_leave_out_what_is_not_settled() -> None:
    laps = Laps(CPU, 3, num_before=2)
    with unnoticed(CPU):
        trainer = private_trainer(CPU, AmpPrecision("bf16"), [laps], {})
        run_private_fit(trainer, Toy(), train_dataloaders=batches(4))
    assert len(laps.step_s) == 3
    assert trainer.global_step == 5


def test_steps_that_are_skipped_are_not_timed() -> None:
    laps = Laps(CPU, 2, num_before=1)
    plugin = AmpPrecision("fp16", scaler=DynamicLossScaler(init_scale=2.0**24))
    with unnoticed(CPU):
        trainer = private_trainer(CPU, plugin, [laps], {})
        run_private_fit(trainer, Toy(), train_dataloaders=batches(4))
    assert plugin.num_skipped > 0
    assert plugin.num_steps == 3  # one that settles, and two
    assert len(laps.step_s) == 2


# -- error rates -------------------------------------------------------------------------------------------------------


class Noisy:
    """A contestant whose steps take a planned time with 20 % of noise."""

    def __init__(self, label: str, mean_s: float, rng: random.Random, clock: PlannedClock) -> None:
        self.label, self.mean_s, self.rng, self.clock = label, mean_s, rng, clock
        self.step_s: list[float] = []

    def round(self, track: Any, laps: int) -> None:
        times = [self.mean_s * math.exp(self.rng.gauss(0.0, 0.2)) for _ in range(laps)]
        self.clock.sleep(sum(times))
        self.step_s.append(median(times))

    def result(self) -> Variant:
        return Variant(self.label, tuple(self.step_s))  # type: ignore[arg-type]


def claims(true_ratio: float, number: int, budget_s: float, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Race two contestants many times. Count the claims about `fused=True`, its warnings, and the rounds."""
    rng, clock = random.Random(0), PlannedClock()
    monkeypatch.setattr(_race, "time", clock)
    monkeypatch.setattr(_race, "_BUDGET_S", budget_s)
    found = Counter[str]()
    plain = (OptimizerFacts("AdamW", True, 1000),)
    for _ in range(number):
        pair: Any = [Noisy("as it is", 1.0, rng, clock), Noisy("fused=True", 1 / true_ratio, rng, clock)]
        variants = race(pair, TRACK)
        facts = step(parts={"forward": 0.5, "optimizer": 0.5}, optimizers=plain, variants=variants)
        result = facts.gain("fused=True")
        assert result is not None
        found[result.claim] += 1
        (finding,) = (f for f in DoctorReport(machine(), facts).findings if f.code == "optimizer-not-fused")
        found["warning"] += finding.severity == "warning"
        found["gains nothing"] += finding.action.startswith("Leave it")
        found["rounds"] += len(variants[0].step_s)
    return found


@pytest.mark.parametrize(("budget_s", "rounds"), [(12.0, 3), (45.0, 5), (75.0, 9), (1e9, 18)])
@pytest.mark.few(2)
def test_a_pair_without_a_difference_is_called_different_in_one_per_cent(
    budget_s: float, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = 1000
    found = claims(1.0, number, budget_s, monkeypatch)
    assert rounds - 1 <= found["rounds"] / number <= rounds
    assert found["faster"] + found["slower"] <= 0.015 * number  # 1 %, and what 1,000 draws allow
    assert found["warning"] <= 0.01 * number


def test_a_true_gain_is_found_and_is_not_called_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert claims(1.2, 200, 1e9, monkeypatch)["warning"] >= 0.9 * 200
    at_once = claims(1.5, 200, 75.0, monkeypatch)
    assert at_once["warning"] >= 0.95 * 200
    assert at_once["rounds"] <= 9 * 200
    assert claims(1.15, 300, 1e9, monkeypatch)["gains nothing"] <= 0.01 * 300
