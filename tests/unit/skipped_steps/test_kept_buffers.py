"""Buffers return to their values at the last attempted step if the next step is skipped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support import FEATURES, CountReads, Toy, WithoutAutocast, fit
from torch import nn
from torch.utils.data import DataLoader

from lightning_amp.scaling import Skip, StepResult
from lightning_amp.skipped_steps import KeptBuffers, matching_places, norm_places

NAN = float("nan")


@pytest.mark.parametrize(("value", "stays"), [(8.0, True), (NAN, False)])
def test_a_step_without_a_backward_is_kept_if_it_is_finite(value: float, stays: bool) -> None:
    """SWA's BatchNorm pass has no step, so no flag says whether it was finite."""
    module = nn.Sequential(nn.BatchNorm1d(2, momentum=0.5))
    module.register_buffer("queue", torch.zeros(2))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    named = matching_places(module, ["queue"])
    kinds = [KeptBuffers(module, norm_places(module), counted=True), KeptBuffers(module, named, counted=False)]

    def batch(value: float, skip: Skip | None) -> list[float]:
        """Run a training step, with a backward if there is a step. Return mean, queue and the number of batches."""
        for kept in kinds:
            kept.enter_step()
        module(torch.full((4, 2), value))
        module.queue = module.queue + value
        for kept in kinds:
            if skip is None:
                kept.settle()
            else:
                kept.note_backward()
                kept.observe(optimizer, StepResult(skip, torch.tensor(1.0)), manual=False)
        norm = module[0]
        return [norm.running_mean[0].item(), module.queue[0].item(), float(norm.num_batches_tracked)]

    assert batch(4.0, Skip.NO) == [2.0, 4.0, 1.0]
    kept = batch(value, None)
    assert (kept == [2.0, 4.0, 1.0]) is not stays
    assert batch(NAN, Skip.YES) == kept  # restores the last copy, not an earlier one


@pytest.mark.parametrize("value", [8.0, NAN])
def test_a_checkpoint_in_the_middle_of_an_accumulation_has_no_nan(value: float, tmp_path: Path) -> None:
    """Without an overflow it has the statistics of all batches so far, as in fp32."""

    class Saves(Toy):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 2:
                self.before = self.net[0].running_mean.clone()
                self.trainer.save_checkpoint(tmp_path / "a.ckpt")

    data: Any = DataLoader([torch.full((4, FEATURES), x) for x in (1.0, 4.0, value, 2.0)], batch_size=None)  # pyright: ignore[reportArgumentType]
    net = nn.Sequential(nn.BatchNorm1d(FEATURES), nn.Linear(FEATURES, 1))
    trainer = fit(lambda: Saves(net=net), WithoutAutocast("fp16"), data, accumulate_grad_batches=2)
    saved = torch.load(tmp_path / "a.ckpt", weights_only=True)["state_dict"]["net.0.running_mean"]
    assert saved.isfinite().all()
    assert torch.equal(saved, trainer.lightning_module.before) is (value == 8.0)


@pytest.mark.parametrize(("replaced", "reads"), [(False, 0), (True, 1)])
def test_it_waits_only_where_a_tensor_was_replaced(replaced: bool, reads: int) -> None:
    module = nn.Linear(2, 1)
    module.register_buffer("queue", queue := torch.zeros(2))
    kept = KeptBuffers(module, matching_places(module, ["queue"]), counted=False)
    kept.enter_step()
    mine = torch.ones(3)
    if replaced:
        module.queue = mine
    else:
        module.queue += 1
    kept.note_backward()
    with CountReads() as counted:
        kept.observe(torch.optim.SGD(module.parameters(), lr=0.1), StepResult(Skip(torch.tensor(1.0))), manual=False)
    assert counted.count == reads
    assert module.queue is queue
    assert queue.tolist() == [0.0, 0.0]
    assert mine.tolist() == [1.0] * 3  # the other tensor is not written into
