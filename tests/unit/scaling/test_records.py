from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support import CountReads

from lightning_amp.findings import StepRecord
from lightning_amp.scaling import RecordLog, Skip, StepResult, Subscription, _records


def scalar(value: float) -> torch.Tensor:
    return torch.tensor(value)


def note(
    log: RecordLog,
    idx: int,
    scale: torch.Tensor | None,
    skip: Skip,
    loss: torch.Tensor | None,
    bad_loss: Skip = Skip.NO,
) -> None:
    log.append(StepResult(skip, loss, idx, scale, reported_bad_loss=bad_loss))


def test_records_are_immutable() -> None:
    record = StepRecord(0, 0, 1.0, 1.0, False, "none")
    with pytest.raises(dataclasses.FrozenInstanceError):
        record.scale = 2.0  # type: ignore[misc]


def test_a_subscription_is_closed_once_and_for_all() -> None:
    everybody = list[Subscription]()
    one, two = (Subscription(lambda records: None, everybody) for _ in range(2))
    assert everybody == [one, two]
    one.close()
    one.close()
    assert (everybody, one.is_open, two.is_open) == ([two], False, True)


def test_reads_back_in_blocks() -> None:
    log = RecordLog(block=4)
    blocks: list[list[StepRecord]] = []
    log.subscribe(blocks.append)
    with CountReads() as reads:
        for i in range(9):
            note(log, 0, scalar(8.0), Skip(scalar(float(i == 2))), scalar(1.0))
            log.close_batch(scalar(4.0))
    assert reads.count == 0  # a block is one transfer, not an `.item()` per record
    assert [len(block) for block in blocks] == [4, 4]
    assert (log.num_steps, log.num_skipped) == (7, 1)
    log.flush()
    assert [r.index for block in blocks for r in block] == list(range(9))
    assert blocks[0][2] == StepRecord(2, 0, 8.0, 4.0, True, "gradient")
    assert log.last == StepRecord(8, 0, 8.0, 4.0, False, "none")


def test_who_must_act_at_once_hears_of_a_skip_in_its_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    original = _records.read_scalars

    def counted(values: Sequence[torch.Tensor | bool | None]) -> list[float]:
        read.append(sum(isinstance(value, torch.Tensor) for value in values))
        return original(values)

    monkeypatch.setattr(_records, "read_scalars", counted)
    log, blocks = RecordLog(block=8), list[list[StepRecord]]()
    subscription = log.subscribe(blocks.append, at_once=True)
    for i in range(6):
        read.clear()
        skip = Skip(scalar(float(i == 3))) if i % 2 else Skip.NO
        note(log, 0, scalar(8.0), skip, scalar(1.0))
        log.close_batch(scalar(4.0))
        if i != 3:
            assert sum(read) == i % 2  # one flag, read once; nothing if the host knows it
        assert log.num_attempted == i + 1
        assert [len(block) for block in blocks] == ([4] if i >= 3 else [])
    subscription.close()
    assert blocks[0][3] == StepRecord(3, 0, 8.0, 4.0, True, "gradient")
    assert log.num_steps + log.num_skipped == 4
    log.flush()
    assert (log.num_steps, log.num_skipped, log.num_attempted) == (5, 1, 6)


@pytest.mark.parametrize("loss", [float("nan"), float("inf"), -float("inf")])
def test_reason_is_the_loss_only_if_the_loss_was_not_finite(loss: float) -> None:
    log = RecordLog()
    for value in (loss, 1.0):
        note(log, 1, None, Skip.YES, scalar(value))
        log.close_batch(None)
        log.flush()
        assert log.last.reason == ("gradient" if value == 1.0 else "loss")
    assert log.last == StepRecord(1, 1, 1.0, 1.0, True, "gradient")


def test_known_skips_stop_at_once() -> None:
    log = RecordLog(3, describe_skips=lambda: "Parameter `x` is bad")
    with pytest.raises(FloatingPointError, match=r"3 optimizer steps in a row.*1 with a non-finite loss, 2 with.*`x`"):
        for i in range(4):
            note(log, 0, None, Skip.YES, scalar(float("nan") if i == 1 else 1.0))
            log.close_batch(None)
    assert log.num_skipped == 3
    note(log, 0, None, Skip.NO, None)  # the log can be used again
    log.close_batch(None)
    log.flush()
    assert log.num_steps == 1


def test_skips_on_the_device_stop_one_read_back_later() -> None:
    log = RecordLog(3, block=8)
    for _ in range(7):
        note(log, 0, None, Skip(scalar(1.0)), None)
        log.close_batch(None)
    with pytest.raises(FloatingPointError, match="in a row"):
        log.flush()


def test_a_step_in_between_breaks_the_row() -> None:
    log = RecordLog(3, block=100)
    for i in range(20):
        note(log, 0, None, Skip(scalar(float(i % 3 != 0))), None)
        log.close_batch(None)
    log.flush()
    assert log.streak == ("gradient",)


def skips(log: RecordLog, count: int, *, known: bool = True, losses: int = 0) -> None:
    for i in range(count):
        note(log, 0, None, Skip.YES if known else Skip(scalar(1.0)), scalar(float("nan") if i < losses else 1.0))
        log.close_batch(None)


def test_records_have_the_precision_of_their_step() -> None:
    log, found = RecordLog(), list[StepRecord]()
    log.subscribe(found.extend)
    for precision in ("fp16", "bf16"):
        log.go_on_in(precision, 64)
        note(log, 0, None, Skip.NO, None)
        log.close_batch(None)
        log.flush()
    assert [record.precision for record in found] == ["fp16", "bf16"]


@pytest.mark.parametrize("known", [True, False])
def test_who_asks_is_told_of_a_stuck_run_at_the_end_of_a_batch(known: bool) -> None:
    log, told = RecordLog(block=8, describe_skips=lambda: "Parameter `x` is bad"), list[str]()
    log.go_on_in("fp16", 3, told.append)
    skips(log, 2, known=known)
    assert told == []
    skips(log, 1, known=known)
    if not known:
        log.flush()  # `on_stuck` is called at the end of a batch only, and no error is raised
        assert told == []
        skips(log, 5, known=known)
    number = 3 if known else 8
    assert told == [
        f"{number} optimizer steps in a row were skipped (the limit is 3), the last at loss scale 1. Reasons: 0 with a"
        f" non-finite loss, {number} with non-finite gradients under a finite loss. Parameter `x` is bad."
    ]
    log.go_on_in("bf16", 4)
    assert log.streak == ()
    skips(log, 3, known=known)
    with pytest.raises(FloatingPointError, match=r"4 optimizer steps in a row .*\(the limit is 4\)"):
        skips(log, 1) if known else (skips(log, 1, known=False), log.flush())


def test_a_good_step_does_not_end_what_was_found() -> None:
    """One read-back covers a whole block, of which some ranks may have read the first part already."""
    log, told = RecordLog(block=8), list[str]()
    log.go_on_in("fp16", 3, told.append)
    skips(log, 3, known=False)
    log.flush()
    for _ in range(5):
        note(log, 0, None, Skip(scalar(0.0)), None)
        log.close_batch(None)
    assert len(told) == 1


@pytest.mark.parametrize(("losses", "helps"), [(1, True), (2, True), (3, False)])
def test_nobody_can_help_against_losses(losses: int, helps: bool) -> None:
    log, told = RecordLog(), list[str]()
    log.go_on_in("fp16", 4, told.append)
    with (
        contextlib.nullcontext()
        if helps
        else pytest.raises(FloatingPointError, match="The loss itself is not finite, which no loss scale can change")
    ):
        skips(log, 4, losses=losses)
    assert len(told) == helps


def test_a_smaller_limit_than_a_checkpoint_had_stops_at_the_next_skip() -> None:
    log = RecordLog()
    log.restore(0, 10, ["gradient"] * 10, None)
    log.go_on_in("fp16", 5)
    assert len(log.streak) == 10
    note(log, 0, None, Skip.NO, None)
    log.close_batch(None)
    log.flush()
    assert log.streak == ()
    log.restore(0, 10, ["gradient"] * 10, None)
    with pytest.raises(FloatingPointError, match="11 optimizer steps in a row"):
        skips(log, 1)


@pytest.mark.parametrize("fallback", [True, False])
def test_the_error_offers_a_fallback_in_fp16_alone(fallback: bool) -> None:
    for precision in ("fp16", "bf16"):
        log = RecordLog(offers_fallback=fallback)
        log.go_on_in(precision, 2)
        with pytest.raises(FloatingPointError) as error:
            for _ in range(2):
                note(log, 0, scalar(8.0), Skip.YES, scalar(1.0))
                log.close_batch(scalar(8.0))
        assert ("`fallback=['bf16']`" in str(error.value)) == (fallback and precision == "fp16")


def test_a_step_taken_with_a_bad_loss_is_told_to_who_asks() -> None:
    for asks, known in itertools.product([True, False], repeat=2):
        log, told, blocks = RecordLog(block=8), list[StepRecord](), list[list[StepRecord]]()
        log.subscribe(blocks.append, at_once=True, on_bad_loss=told.append if asks else None)
        assert log.wants_losses == asks
        for i in range(6):
            flag = scalar(float(i in (2, 4)))
            skip = Skip.YES if i == 4 else Skip.NO
            note(log, 0, None, skip, scalar(1.0), (Skip.on_device(flag) if known else Skip(flag)) if asks else Skip.NO)
            log.close_batch(None)
            assert [record.index for record in told] == ([2] if asks and i >= 2 else [])
        assert [(record.skipped, record.reason) for record in told] == ([(False, "none")] if asks else [])
        assert [len(block) for block in blocks] == ([3, 2] if asks else [5])


@pytest.mark.parametrize("reason", ["loss", "gradient"])
@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
def test_the_error_claims_no_more_than_is_known(reason: str, precision: Any) -> None:
    log = RecordLog()
    log.go_on_in(precision, 2)
    with pytest.raises(FloatingPointError) as error:
        skips(log, 2, losses=2 * (reason == "loss"))
    text = str(error.value)
    assert "Attach `OverflowLocator()`" in text
    assert ("with precision 'fp32' to see" in text) == (precision != "fp32")
    assert "overflow although" not in text
    assert "learning rate" not in text


@pytest.mark.parametrize("cause", ["", "It was the moth."])
def test_the_error_repeats_a_cause_that_was_found(cause: str) -> None:
    log, asked = RecordLog(), list[int]()
    log.go_on_in("fp16", 2)
    note(log, 0, None, Skip.NO, None)
    log.subscribe(lambda records: None, cause=lambda since: asked.append(since) or cause)
    with pytest.raises(FloatingPointError) as error:
        skips(log, 2)
    assert asked == [1]
    assert str(error.value).endswith(cause or "to see whether it happens there too.")
    assert "Attach" not in str(error.value)
