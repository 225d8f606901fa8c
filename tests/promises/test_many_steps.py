"""Many optimizer steps in one `training_step`: several epochs over a rollout, a critic that steps five times."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from support import (
    DEVICE,
    Manual,
    WithoutAutocast,
    assert_same,
    batches,
    fit,
    scaled_fp32,
    stock,
)
from torch import Tensor, nn

from lightning_amp import AmpPrecision, ScaleMonitor


class ManySteps(Manual):
    """Chosen steps (numbered over the whole run) overflow; with `leave_out` they are left out instead."""

    def __init__(self, steps: int, overflows: Any = (), *, leave_out: bool = False, size: float = 1.0) -> None:
        super().__init__(lambda params: torch.optim.SGD(params, lr=1e-5))
        self.steps, self.overflows, self.leave_out, self.size = steps, set(overflows), leave_out, size
        self.number = -1

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()
        for _ in range(self.steps):
            self.number += 1
            bad = self.number in self.overflows
            if bad and self.leave_out:
                continue
            optimizer.zero_grad()
            self.manual_backward(
                nn.functional.mse_loss(self.net(batch).float(), self.size * batch.sum(1, keepdim=True))
            )
            if bad:
                next(self.parameters()).grad[0, 0] = torch.inf
            optimizer.step()


@pytest.mark.usefixtures("where_flags_live")
def test_the_scale_falls_for_the_steps_that_follow() -> None:
    plugin, monitor = scaled_fp32(init_scale=1024.0, growth_interval=3), ScaleMonitor(log_every_n_steps=1)
    ours = fit(lambda: ManySteps(5, [0, 1, 7]), plugin, batches(4), callbacks=[monitor])
    skips = [(r.scale, r.next_scale) for r in monitor.history if r.skipped]
    assert skips == [(1024.0, 512.0), (512.0, 256.0), (256.0, 128.0)]
    # growth counts once per batch: batches 0, 1, 2 and 3 end clean, and 1 starts the count again
    assert plugin.scaler.get_scale() == 256.0
    assert (plugin.num_steps, plugin.num_skipped) == (17, 3)
    assert_same(ours, fit(lambda: ManySteps(5, [0, 1, 7], leave_out=True), None, batches(4)))


@pytest.mark.usefixtures("where_flags_live")
@pytest.mark.parametrize("theirs", [False, True])
def test_a_scale_that_is_too_large_costs_a_few_steps_and_not_the_run(theirs: bool) -> None:
    """Start from the default scale, with targets in the hundreds, so that gradients overflow fp16 at first."""
    scaler = torch.amp.GradScaler(DEVICE) if theirs else None
    plugin = AmpPrecision("fp16", scaler=scaler)
    fit(lambda: ManySteps(80, size=300.0), plugin, batches(2))
    assert 3 < plugin.num_skipped < 20
    assert plugin.num_steps + plugin.num_skipped == 160
    stocks = stock("fp16")
    fit(lambda: ManySteps(80, size=300.0), stocks, batches(2))
    assert plugin.scaler.get_scale() == stocks.scaler.get_scale()


class TwoOptimizers(ManySteps):
    def configure_optimizers(self) -> Any:
        first, second = (torch.optim.SGD([p], lr=0.05) for p in (self.net[0].weight, self.net[2].weight))
        return first, second

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            for parameter in self.parameters():
                if batch_idx == 1 and parameter.grad is not None:
                    parameter.grad[0] = torch.inf
            optimizer.step()


@pytest.mark.usefixtures("where_flags_live")
def test_two_optimizers_that_step_once_each_still_lower_it_once() -> None:
    plugin, monitor = scaled_fp32(init_scale=1024.0), ScaleMonitor(log_every_n_steps=1)
    fit(lambda: TwoOptimizers(1), plugin, batches(3), callbacks=[monitor])
    skips = [(r.scale, r.next_scale) for r in monitor.history if r.skipped]
    assert skips == [(1024.0, 512.0)] * 2


class Critic(ManySteps):
    """Only the first of three optimizers steps often; the second steps once, the third in every fourth batch."""

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD([p], lr=1e-5) for p in list(self.net.parameters())[:3]]

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        critic, generator, other = self.optimizers()
        chosen = [critic] * self.steps + [generator] + [other] * (batch_idx % 4 == 0)
        for optimizer in chosen:
            self.zero_grad()
            target = (self.size if optimizer is critic else 1.0) * batch.sum(1, keepdim=True)
            self.manual_backward(nn.functional.mse_loss(self.net(batch).float(), target))
            optimizer.step()


def test_a_critic_among_other_optimizers_loses_few_steps() -> None:
    """Beyond the skips that the scale needs, at most one step per batch is skipped, whatever other optimizers there
    are.
    """
    plugin, stocks = AmpPrecision("fp16"), stock("fp16")
    fit(lambda: Critic(5, size=300.0), plugin, batches(4))
    fit(lambda: Critic(5, size=300.0), stocks, batches(4))
    assert stocks.scaler.get_scale() < 2.0**9  # the scale started too high
    assert plugin.scaler.get_scale() == stocks.scaler.get_scale()
    needed = round(math.log2(2.0**16 / plugin.scaler.get_scale()))
    assert needed <= plugin.num_skipped <= needed + 4


@pytest.mark.usefixtures("where_flags_live")
def test_records_go_from_scale_to_scale() -> None:
    """With one optimizer, a step uses the scale that the record before it ends with, growth included."""
    monitor = ScaleMonitor(log_every_n_steps=1)
    fit(lambda: ManySteps(5), scaled_fp32(init_scale=16.0, growth_interval=2), batches(6), callbacks=[monitor])
    records = list(monitor.history)
    assert [a.next_scale for a in records[:-1]] == [b.scale for b in records[1:]]
    assert records[-1].next_scale == 128.0


class StepsBefore(ManySteps):
    """Each batch begins with the step that the batch before has prepared."""

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()
        if batch_idx:
            optimizer.step()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        if batch_idx in self.overflows:
            next(self.parameters()).grad[0, 0] = torch.inf

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=True)


@pytest.mark.usefixtures("where_flags_live")
@pytest.mark.parametrize(("overflows", "expected"), [([], 2.0**17), ([2], 2.0**15), ([2, 3], 2.0**13)])
def test_a_loop_that_steps_before_its_backward_lets_the_scale_grow(overflows: list[int], expected: float) -> None:
    """Seven steps: each doubles the scale or halves it, at the place where the outcome is known."""
    plugin = scaled_fp32(init_scale=1024.0, growth_interval=1)
    fit(lambda: StepsBefore(1, overflows), plugin)
    assert plugin.num_skipped == len(overflows)
    assert plugin.scaler.get_scale() == expected


@pytest.mark.usefixtures("where_flags_live")
def test_torchs_scaler_forgets_no_overflow() -> None:
    plugin = WithoutAutocast("fp16", scaler=torch.amp.GradScaler(DEVICE, init_scale=1024.0))
    fit(lambda: ManySteps(5, [1]), plugin, batches(1))
    assert plugin.scaler.get_scale() == 512.0
