"""The steps of one batch move the scale once, at its end. If they overflow, they may lower it earlier."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support import CountReads, flags_on_a_device

from lightning_amp.scaling import DynamicLossScaler, Skip, StepResult
from lightning_amp.scaling._scaler import BatchSteps, lower_scale, move_scale

CPU = torch.device("cpu")
BAD_LOSS = torch.tensor(float("nan"))
SCALERS: dict[str, Callable[[], torch.amp.GradScaler]] = {
    "ours": lambda: DynamicLossScaler(1024.0, growth_interval=1),
    "torch's": lambda: torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1),
}


def step(optimizer_idx: int = 0, overflow: bool = False, bad_loss: bool = False, gradients: bool = True) -> StepResult:
    skip = Skip.on_device(torch.tensor(float(overflow or bad_loss)))
    loss = BAD_LOSS if bad_loss else torch.tensor(1.0)
    return StepResult(skip, loss, optimizer_idx, overflow=skip, had_gradients=gradients)


def moved(*steps: StepResult, scaler: str = "ours", by: Callable[..., object] = move_scale) -> float:
    """Return the scale after these steps: 1024 before, 2048 after a clean batch, 512 after an overflow."""
    made = SCALERS[scaler]()
    by(made, steps)
    return made.get_scale()


@pytest.mark.usefixtures("where_flags_live")
@pytest.mark.parametrize("scaler", SCALERS)
def test_a_batch_moves_it_once(scaler: str) -> None:
    assert moved(step(0), scaler=scaler) == 2048.0
    assert moved(step(0), step(1), step(1), scaler=scaler) == 2048.0
    assert moved(step(0, overflow=True), scaler=scaler) == 512.0
    assert moved(step(0, overflow=True), step(1, overflow=True), step(2), scaler=scaler) == 512.0
    assert moved(scaler=scaler) == 1024.0


@pytest.mark.usefixtures("where_flags_live")
def test_a_bad_loss_leaves_it_alone_unless_gradients_of_another_step_overflowed() -> None:
    assert moved(step(0, bad_loss=True)) == 1024.0
    assert moved(step(0, bad_loss=True), step(1, bad_loss=True)) == 1024.0
    assert moved(step(0, bad_loss=True), step(1)) == 1024.0
    assert moved(step(0, bad_loss=True), step(1, overflow=True)) == 512.0
    assert moved(step(0, bad_loss=True), scaler="torch's") == 512.0  # torch's scaler does not know about losses


@pytest.mark.usefixtures("where_flags_live")
def test_an_overflow_without_a_loss_is_one_of_gradients() -> None:
    alone = StepResult(Skip.YES, overflow=Skip.on_device(torch.tensor(1.0)))
    assert alone.gradient_overflow(CPU).item() == 1.0
    assert step(overflow=True).gradient_overflow(CPU).item() == 1.0
    assert step(bad_loss=True).gradient_overflow(CPU).item() == 0.0
    assert moved(alone) == 512.0


@pytest.mark.usefixtures("where_flags_live")
@pytest.mark.parametrize("scaler", SCALERS)
def test_in_the_middle_of_a_batch_it_only_falls(scaler: str) -> None:
    assert moved(step(0), scaler=scaler, by=lower_scale) == 1024.0
    assert moved(step(0, bad_loss=True), scaler=scaler, by=lower_scale) == 1024.0


class OwnUpdate(torch.amp.GradScaler):
    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        super().update(new_scale)


def test_an_update_of_ones_own_is_called_only_where_nobody_waits() -> None:
    def own() -> OwnUpdate:
        return OwnUpdate("cpu", init_scale=1024.0)

    for make in (SCALERS["ours"], SCALERS["torch's"], own):
        scaler = make()
        assert lower_scale(scaler, [step(0, overflow=True)])
        assert scaler.get_scale() == 512.0
    with flags_on_a_device():
        scalers = [SCALERS["ours"](), SCALERS["torch's"](), own()]
        with CountReads() as reads:
            lowered = [lower_scale(scaler, [step(0, overflow=True)]) for scaler in scalers]
        assert reads.count == 0
    assert lowered == [True, True, False]
    assert [scaler.get_scale() for scaler in scalers] == [512.0, 512.0, 1024.0]


def test_a_round_is_over_when_all_have_stepped() -> None:
    """Two optimizers that step once each make one round."""
    batch = BatchSteps()
    assert not batch.round_is_over(2)
    batch.add(step(0))
    assert not batch.round_is_over(2)
    assert batch.round_is_over(1)
    batch.add(step(1))
    assert batch.round_is_over(2)
    batch.end_round(SCALERS["ours"]())
    assert not batch.round_is_over(2)


def test_a_round_is_over_when_one_has_stepped_again() -> None:
    """From the second step of a critic among three optimizers on, each of its steps is a round."""
    batch, scaler = BatchSteps(), SCALERS["ours"]()
    batch.add(step(0))
    assert not batch.round_is_over(3)
    for _ in range(2):
        batch.add(step(0))
        assert batch.round_is_over(3)
        batch.end_round(scaler)
    batch.add(step(1))
    assert not batch.round_is_over(3)
    batch.end(scaler)
    batch.add(step(0))
    assert not batch.round_is_over(3)  # the next batch has begun


@pytest.mark.usefixtures("where_flags_live")
@pytest.mark.parametrize("scaler", SCALERS)
def test_an_overflow_lowers_it_once_whether_in_the_middle_or_at_the_end(scaler: str) -> None:
    batch, made = BatchSteps(), SCALERS[scaler]()
    batch.add(step(0, overflow=True))
    batch.end_round(made)
    batch.end(made)
    assert made.get_scale() == 512.0
    assert not batch.end(made)


@pytest.mark.usefixtures("where_flags_live")
def test_each_round_that_overflows_lowers_it_and_clean_ones_count_once_for_growth() -> None:
    batch, scaler = BatchSteps(), DynamicLossScaler(1024.0, growth_interval=2)
    for overflow in (True, False, True, False, False):
        batch.end_round(scaler)  # another backward begins
        batch.add(step(0, overflow=overflow))
    assert scaler.get_scale() == 256.0
    assert batch.end(scaler)
    assert scaler.get_scale() == 256.0  # one clean batch; growth takes two
    batch.add(step(0))
    batch.end(scaler)
    assert scaler.get_scale() == 512.0


@pytest.mark.usefixtures("where_flags_live")
@pytest.mark.parametrize("scaler", SCALERS)
def test_a_step_without_gradients_says_nothing(scaler: str) -> None:
    batch, made = BatchSteps(), SCALERS[scaler]()
    batch.add(step(0, gradients=False))
    batch.end_round(made)
    batch.end(made)
    assert made.get_scale() == 1024.0


@pytest.mark.usefixtures("where_flags_live")
@pytest.mark.parametrize("scaler", SCALERS)
def test_a_backward_after_the_last_step_does_not_end_growth(scaler: str) -> None:
    """A loop may step first, with gradients of the last batch. Its backward then ends the round of its only step."""
    batch, made = BatchSteps(), SCALERS[scaler]()
    for growth in (1, 2, 3):
        batch.add(step(0))
        batch.end_round(made)
        batch.end(made)
        assert made.get_scale() == 1024.0 * 2**growth


def test_a_batch_without_steps_moves_nothing() -> None:
    assert not BatchSteps().end(scaler := SCALERS["ours"]())
    assert scaler.get_scale() == 1024.0


def test_records_keep_the_scale_that_they_were_given() -> None:
    """The update of a scaler does not write into the tensor that a record holds."""
    for make in SCALERS.values():
        scaler = make()
        before = scaler.scale(torch.ones(()))
        scale = scaler._scale
        move_scale(scaler, [step(0, overflow=True)])
        assert (before.item(), scale.item(), scaler.get_scale()) == (1024.0, 1024.0, 512.0)
