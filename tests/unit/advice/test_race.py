"""The race of variants of a step, and the changes that are tried."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from support import Toy, batches
from torch import nn

from lightning_amp import AmpPrecision, DynamicLossScaler
from lightning_amp.advice import _race
from lightning_amp.advice._changes import can_fuse, fuse_optimizers, has_convolutions, joined
from lightning_amp.advice._race import Batches, Contestant, Laps, Track, giving, race
from lightning_amp.shadow import private_trainer, run_private_fit, unnoticed

CPU = torch.device("cpu")
TRACK = Track(CPU, {"accelerator": "cpu"})


def contestant(label: str, module: Any = None, **settings: Any) -> Contestant:
    return Contestant(label, lambda: (module or Toy(), AmpPrecision("fp32")), Batches(list(batches(2))), **settings)


def test_contestants_are_timed_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[str] = []
    real = Contestant.round

    def noted(self: Contestant, *args: Any) -> None:
        turns.append(self.label)
        real(self, *args)

    monkeypatch.setattr(Contestant, "round", noted)
    monkeypatch.setattr(_race, "_ROUNDS", (3, 3, 3))
    found = race([contestant("a"), contestant("b")], TRACK)
    assert turns == ["a", "b", "b", "a", "a", "b"]
    assert [(v.label, len(v.step_s), v.error) for v in found] == [("a", 3, ""), ("b", 3, "")]


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


def test_the_budget_ends_a_race(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_race, "_ROUNDS", (1, 9, 18))
    monkeypatch.setattr(_race, "_BUDGET_S", 0.0)
    told: list[str] = []
    assert len(race([contestant("a")], TRACK, say=told.append)[0].step_s) == 1
    assert told == ["round 1 of 9 at most, 1 variant"]


@pytest.mark.parametrize(
    ("round_s", "turns"),
    [
        (0.01, "abcde edcba " * 4 + "abcde"),
        (1.0, "abcde edcba abcde"),  # nine rounds would take too long
        (10.0, "abcde cba abc"),  # three rounds of all contestants would take too long as well
    ],
)
def test_where_steps_are_long_there_are_three_rounds_of_fewer(
    round_s: float, turns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, ran, laps = [0.0], list[str](), list[int]()

    def turn(self: Contestant, *arguments: Any) -> None:
        now[0] += round_s
        ran.append(self.label)
        laps.append(arguments[-1])

    monkeypatch.setattr(Contestant, "round", turn)
    monkeypatch.setattr(_race.time, "perf_counter", lambda: now[0])
    assert [variant.label for variant in race([contestant(label) for label in "abcde"], TRACK)] == [*"abcde"]
    assert "".join(ran) == turns.replace(" ", "")
    assert set(laps[:5]) == {4}
    assert set(laps[5:]) == ({1} if round_s == 10.0 else {4})


@pytest.mark.parametrize(("noise", "rounds"), [(0.01, 9), (0.9, 18)])
def test_more_rounds_are_run_while_a_claim_is_open(noise: float, rounds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def turn(self: Contestant, *arguments: Any) -> None:
        number = len(self.step_s)
        self.step_s.append(1.0 if str(self.label) == "a" else 1.2 * (1 + noise * (-1) ** number))

    monkeypatch.setattr(Contestant, "round", turn)
    monkeypatch.setattr(_race.time, "perf_counter", lambda: 0.0)
    found = race([contestant("a"), contestant("b")], TRACK)
    assert [len(variant.step_s) for variant in found] == [rounds, rounds]


def test_a_step_that_takes_the_budget_is_not_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def turn(self: Contestant, *arguments: Any) -> None:
        ran.append(self.label)
        self.step_s.append(0.6)

    monkeypatch.setattr(Contestant, "round", turn)
    found = race([contestant(label) for label in "abc"], TRACK, known_s=61.0)
    assert ran == ["b"]
    assert [(v.label, v.step_s) for v in found] == [("a", (61.0,)), ("b", (0.6,)), ("c", ())]
    assert found[2].error == "left out, since a step takes 61 s"
    ran.clear()
    monkeypatch.setattr(_race, "_ROUNDS", (3, 3, 3))
    race([contestant(label) for label in "abcde"], TRACK, known_s=1.0)
    assert "".join(ran) == "abc" + "cba" + "abc"  # of shorter steps, the first three


def test_batches_are_copies_without_end() -> None:
    own = torch.ones(2)
    given = iter(Batches([own]))
    first, second = next(given), next(given)
    first.zero_()
    assert own.sum() == second.sum() == 2
    assert len(Batches([own])) > 1000


def test_a_data_module_gives_the_batches_and_is_as_before() -> None:
    class Data(L.LightningDataModule):
        def setup(self, stage: str) -> None:
            raise AssertionError("it was set up before")

        def train_dataloader(self) -> Any:
            raise AssertionError

    data = Data()
    before = dict(vars(data))
    with giving(data, Batches([torch.ones(2)])) as source:
        source["data"].setup("fit")
        assert torch.equal(next(iter(source["data"].train_dataloader())), torch.ones(2))
    assert vars(data) == before
    with giving(None, Batches([torch.ones(2)])) as source:
        assert torch.equal(next(iter(source["train_dataloaders"])), torch.ones(2))


@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
def test_an_optimizer_that_is_made_fused_steps_as_one_that_was(make: Any) -> None:
    def weights(fuse: bool) -> Any:
        torch.manual_seed(0)
        module = Toy(lambda params: make(params, lr=0.1, **({} if fuse else {"fused": True})))
        configured: Any = (fuse_optimizers(module) if fuse else module).configure_optimizers()
        schedule = torch.optim.lr_scheduler.StepLR(configured, 1, gamma=0.5)
        for _ in range(3):
            module.loss(torch.ones(2, 8)).backward()
            configured.step()
            schedule.step()
        assert configured.param_groups[0]["fused"]
        assert configured.param_groups[0]["lr"] == pytest.approx(0.0125)
        return module.state_dict()

    torch.testing.assert_close(weights(True), weights(False), rtol=0, atol=0)


def test_which_optimizers_can_be_fused() -> None:
    own = [nn.Parameter(torch.ones(2))]
    assert can_fuse(torch.optim.AdamW(own))
    assert not can_fuse(torch.optim.AdamW(own, fused=True))
    assert not can_fuse(torch.optim.AdamW(own, foreach=True))  # somebody chose that
    assert not can_fuse(torch.optim.RMSprop(own))
    assert not can_fuse(type("Mine", (torch.optim.AdamW,), {})(own))


def test_optimizers_are_found_in_whatever_is_configured() -> None:
    for shape in (
        lambda o, s: o,
        lambda o, s: ([o], [s]),
        lambda o, s: {"optimizer": o, "lr_scheduler": s},
        lambda o, s: ({"optimizer": o},),
    ):
        module = Toy()
        optimizer = torch.optim.Adam(module.parameters())
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        vars(module)["configure_optimizers"] = lambda shape=shape, o=optimizer, s=schedule: shape(o, s)
        fuse_optimizers(module).configure_optimizers()
        assert optimizer.param_groups[0]["fused"]


def test_batches_are_joined() -> None:
    def batch() -> Any:
        return {"x": torch.ones(2, 3), "y": [torch.zeros(2), (torch.zeros(2, 1),)]}

    (found,) = joined([batch(), batch()], 4) or [None]
    assert found["x"].shape == (8, 3)
    assert found["y"][1][0].shape == (8, 1)
    assert joined([], 4) is None
    assert joined([torch.tensor(1.0)], 4) is None
    assert joined([(torch.ones(2), "names")], 4) is None
    assert joined([torch.ones(2, 3), torch.ones(2, 4)], 2) is None


def test_modules_with_convolutions_over_images() -> None:
    assert has_convolutions(nn.Sequential(nn.Conv2d(2, 4, 3)))
    assert not has_convolutions(Toy())


def test_optimizers_can_be_fused_wherever_torch_has_a_kernel(device: torch.device) -> None:
    parameters = [torch.nn.Parameter(torch.ones(2, device=device))]
    assert can_fuse(torch.optim.AdamW(parameters))
    assert not can_fuse(torch.optim.AdamW(parameters, fused=True))
    assert can_fuse(torch.optim.Adagrad(parameters)) == (device.type == "cpu")


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
