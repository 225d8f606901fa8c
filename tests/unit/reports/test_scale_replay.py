"""`ScaleHistory.replay`: real runs, ranges, and their texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import Poison, Toy, batches, fit
from support.scale_runs import fallen_back, scale_run
from torch import Tensor, nn

from lightning_amp import AmpPrecision, DynamicLossScaler, ScaleMonitor, StepRecord
from lightning_amp.reports import PolicyReplay, ScaleHistory

POLICIES: list[dict[str, Any]] = [
    {"init_scale": 64.0, "growth_interval": 3},
    {"init_scale": 64.0, "growth_interval": 2, "hysteresis": 2, "max_scale": 128.0},
    {"init_scale": 64.0, "growth_interval": 4, "backoff_factor": 0.25, "growth_factor": 4.0, "min_scale": 2.0},
]


class Adversarial(L.LightningModule):
    """Two optimizers in manual optimization, with one step each in every batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.one, self.other = nn.Linear(8, 1), nn.Linear(8, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        for net, optimizer in zip((self.one, self.other), self.optimizers(), strict=True):
            optimizer.zero_grad()
            self.manual_backward(net(batch).float().square().mean())
            optimizer.step()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(net.parameters(), lr=0.01) for net in (self.one, self.other)]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("module", [Toy, Adversarial])
def test_the_policy_of_a_fit_gives_the_record_of_its_file(
    module: type[L.LightningModule], policy: dict[str, Any], tmp_path: Path
) -> None:
    plugin = AmpPrecision("fp16", scaler=DynamicLossScaler(**policy))
    poison = Poison(gradient=[1, 2, 9, 14, 15, 16], loss=[5])
    fit(module, plugin, batches(20), callbacks=[poison, ScaleMonitor(dirpath=tmp_path)])
    history = ScaleHistory.from_csv(tmp_path / "scale_history.csv")
    assert history.num_skipped >= 7
    assert len({record.scale for record in history}) > 2
    replay = history.replay(**policy)
    assert replay.equals_record
    assert replay.decided_fraction == (1.0, 1.0)
    assert replay.num_skipped == (history.num_skipped, history.num_skipped)
    assert not history.replay(**policy | {"growth_interval": 1}).equals_record


def test_a_range_where_the_record_does_not_decide() -> None:
    history = scale_run("OOO...", init_scale=64.0)
    replay = history.replay(init_scale=8.0)
    assert replay.num_skipped == (0, 3)
    assert replay.decided_fraction == (0.5, 0.5)
    assert [record.scale for record in replay.pessimistic if record.skipped] == [8.0, 4.0, 2.0]
    assert replay.summary() == "0 to 3 of 6 steps skipped, 3 in the record, which decides 50 % of the steps"
    assert not replay.equals_record
    assert replay.recorded is history


@given(
    pattern=st.text(alphabet=".....OL", min_size=1, max_size=60),
    exponent=st.integers(0, 16),
    interval=st.integers(1, 9),
    hysteresis=st.integers(1, 2),
)
@settings(max_examples=60, deadline=None)
def test_the_optimistic_run_skips_nothing_that_the_others_do_not(
    pattern: str, exponent: int, interval: int, hysteresis: int
) -> None:
    history = scale_run(pattern, init_scale=64.0, growth_interval=3, max_consecutive_skips=100)
    replay = history.replay(
        init_scale=2.0**exponent, growth_interval=interval, hysteresis=hysteresis, max_consecutive_skips=100
    )
    skips = [
        {record.index for record in run if record.skipped}
        for run in (replay.optimistic, replay.recorded, replay.pessimistic)
    ]
    assert skips[0] <= skips[1] <= skips[2]
    assert replay.num_skipped == (len(skips[0]), len(skips[2]))


@pytest.mark.parametrize(
    ("first", "text"),
    [(1024.0, "; the run might stop at step 2, after 3 skips in a row"), (2.0**20, "the run would stop at step 2,")],
)
def test_a_run_that_stops(first: float, text: str) -> None:
    history = scale_run("OOOO....", init_scale=2.0**16)
    replay = history.replay(init_scale=first, max_consecutive_skips=3)
    assert text in replay.summary()
    assert replay.stopped_at[1] == 2
    assert (replay.stopped_at[0] is None) == (first == 1024.0)


def test_the_first_scale_is_that_of_the_record() -> None:
    replay = scale_run("..O..", init_scale=32.0).replay(growth_interval=7)
    assert replay.policy["init_scale"] == 32.0
    assert replay.policy["growth_interval"] == 7
    assert DynamicLossScaler(**replay.policy).get_scale() == 32.0


def test_there_is_nothing_to_replay() -> None:
    with pytest.raises(ValueError, match="no optimizer step was recorded"):
        ScaleHistory().replay(growth_interval=2)
    unscaled = ScaleHistory()
    unscaled.extend(StepRecord(i, 0, 1.0, 1.0, skipped=i == 3, reason="loss") for i in range(5))
    with pytest.raises(ValueError, match="every step was taken at scale 1, as in bf16"):
        unscaled.replay(growth_interval=2)
    with pytest.raises(ValueError, match=r"got 'growth'"):
        scale_run("..").replay(growth=2)


def test_the_limits_are_stated() -> None:
    assert "the weights and all later gradients differ" in PolicyReplay.LIMITS
    assert "The record has no information about scales above its own" in PolicyReplay.LIMITS


def test_only_the_part_before_a_fallback_is_replayed() -> None:
    replay = fallen_back().replay(init_scale=8.0, max_consecutive_skips=6)
    assert replay.equals_record
    assert replay.recorded.num_attempted == replay.optimistic.num_attempted == 6
    assert replay.stopped_at == (5, 5)
