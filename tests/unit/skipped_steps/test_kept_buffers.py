"""Buffers return to their values at the last attempted step if the next step is skipped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from support import FEATURES, CountReads, Toy, WithoutAutocast, fit
from support.promises import OPTIMIZERS, PLAIN_AND_FUSED
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_amp.scaling import Skip, StepResult
from lightning_amp.skipped_steps import KeptBuffers, matching_places, norm_places

NAN = float("nan")


class Loop:
    """The events of a training loop that concern buffers. A batch is one number."""

    def __init__(self) -> None:
        self.module = nn.Sequential(nn.BatchNorm1d(2, momentum=0.5), nn.Linear(2, 1))
        self.module.register_buffer("queue", torch.zeros(2))
        self.optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in self.module]
        named = matching_places(self.module, ["queue"])
        self.kinds = [
            KeptBuffers(self.module, norm_places(self.module), counted=True),
            KeptBuffers(self.module, named, counted=False),
        ]

    def batch(self, value: float, *, backward: bool = True) -> None:
        for kept in self.kinds:
            kept.enter_step()
        self.forward(value)
        if backward:
            self.backward()

    def backward(self) -> None:
        for kept in self.kinds:
            kept.note_backward()

    def settle(self) -> None:
        for kept in self.kinds:
            kept.settle()

    def forward(self, value: float) -> None:
        self.module(torch.full((4, 2), value))
        self.module.queue = self.module.queue + value

    def step(self, skip: Skip | bool = False, loss: float = 1.0, *, manual: bool = False, of: int = 0) -> None:
        skip = skip if isinstance(skip, Skip) else Skip.YES if skip else Skip.NO
        for kept in self.kinds:
            kept.observe(self.optimizers[of], StepResult(skip, torch.tensor(loss)), manual=manual)

    @property
    def seen(self) -> list[float]:
        """Return running mean, queue, and the number of batches, which has no rounding."""
        norm = self.module[0]
        return [norm.running_mean[0].item(), self.module.queue[0].item(), float(norm.num_batches_tracked)]


@pytest.fixture
def loop() -> Loop:
    return Loop()


FLAGS = {True: (Skip.YES, Skip(torch.tensor(1.0))), False: (Skip.NO, Skip(torch.tensor(0.0)))}


@pytest.mark.parametrize("where", [0, 1], ids=["on the host", "on a device"])
def test_a_skipped_batch_was_never_drawn(loop: Loop, where: int) -> None:
    loop.batch(4.0)
    loop.step(FLAGS[False][where])
    assert loop.seen == [2.0, 4.0, 1.0]
    loop.batch(NAN)
    loop.step(FLAGS[True][where])
    assert loop.seen == [2.0, 4.0, 1.0]
    loop.batch(2.0)
    loop.step(FLAGS[False][where])
    assert loop.seen == [2.0, 6.0, 2.0]


def test_all_batches_of_an_accumulation_are_dropped_with_its_step(loop: Loop) -> None:
    loop.batch(4.0)
    loop.step()
    for value in (8.0, 16.0, 32.0):
        loop.batch(value)
    loop.step(skip=True)
    assert loop.seen == [2.0, 4.0, 1.0]


@pytest.mark.parametrize("where", [0, 1], ids=["on the host", "on a device"])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("skipped", [0, 1])
def test_optimizers_of_the_same_forward(loop: Loop, skipped: int, order: tuple[int, int], where: int) -> None:
    """The layer is the first optimizer's; the queue belongs to both."""
    loop.batch(4.0)
    loop.step()
    loop.batch(8.0)
    for index in order:
        loop.step(FLAGS[index == skipped][where], of=index, manual=True)
    assert loop.seen == ([2.0, 4.0, 1.0] if skipped == 0 else [5.0, 4.0, 2.0])


def test_a_forward_between_two_steps_belongs_to_the_second(loop: Loop) -> None:
    loop.batch(4.0)
    loop.step(manual=True)
    before = loop.seen
    loop.forward(8.0)
    loop.backward()
    loop.step(skip=True, manual=True)
    assert loop.seen == before == [2.0, 4.0, 1.0]


@pytest.mark.parametrize(("value", "stays"), [(8.0, True), (NAN, False)])
def test_a_step_without_a_backward_is_kept_if_it_is_finite(loop: Loop, value: float, stays: bool) -> None:
    """SWA's BatchNorm pass has no step, so no flag says whether it was finite."""
    loop.batch(4.0)
    loop.step()
    loop.batch(value, backward=False)
    loop.settle()
    assert (loop.seen == [2.0, 4.0, 1.0]) is not stays
    kept = loop.seen
    loop.batch(NAN)
    loop.step(skip=True)  # restores the last copy, not an earlier one
    assert loop.seen == kept


@pytest.mark.parametrize("where", [0, 1], ids=["on the host", "on a device"])
@pytest.mark.parametrize(("value", "stays"), [(8.0, True), (NAN, False)])
def test_a_mended_batch_leaves_no_nan(loop: Loop, where: int, value: float, stays: bool) -> None:
    """The step was applied although its loss was not finite."""
    loop.batch(4.0)
    loop.step()
    loop.batch(value)
    loop.step(FLAGS[False][where], loss=NAN)
    assert (loop.seen == [2.0, 4.0, 1.0]) is not stays


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


# -- in a Trainer ------------------------------------------------------------------------------------------------------


class StepsLate(L.LightningModule):
    """The second optimizer steps at the start of the next batch, before its forward."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.first, self.second = nn.Linear(FEATURES, 4), nn.Linear(4, 1)
        self.norm = nn.BatchNorm1d(4)
        self.make_optimizer = optimizer

    def configure_optimizers(self) -> Any:
        return [self.make_optimizer(net.parameters()) for net in (self.first, self.second)]

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        first, second = self.optimizers()
        if batch_idx:
            second.step()
        self.means = [*getattr(self, "means", []), self.norm.running_mean.clone()]
        first.zero_grad()
        second.zero_grad()
        self.manual_backward(self.second(self.norm(self.first(batch))).float().pow(2).mean())
        if batch_idx == 3:
            self.second.weight.grad[0, 0] = torch.inf  # the first optimizer's gradients are finite, so it steps
        first.step()


@pytest.mark.usefixtures("where_flags_live")
@pytest.mark.parametrize("optimizer", PLAIN_AND_FUSED)
def test_statistics_go_back_for_a_step_in_the_next_batch(optimizer: str) -> None:
    plugin = WithoutAutocast("fp16")
    trainer = fit(lambda: StepsLate(OPTIMIZERS[optimizer]), plugin)
    means = trainer.lightning_module.means
    assert plugin.num_skipped == 1
    assert torch.equal(means[4], means[3])  # equal to the values before the bad batch
    assert not torch.equal(means[3], means[2])
    assert not torch.equal(means[5], means[4])
