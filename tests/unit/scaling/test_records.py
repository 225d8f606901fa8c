from __future__ import annotations

import dataclasses

import pytest
import torch
from support import CountReads

from lightning_amp.findings import StepRecord
from lightning_amp.scaling import RecordLog, Skip, StepResult


def scalar(value: float) -> torch.Tensor:
    return torch.tensor(value)


def note(log: RecordLog, idx: int, scale: torch.Tensor | None, skip: Skip, loss: torch.Tensor | None) -> None:
    log.append(StepResult(skip, loss, idx, scale))


def test_records_are_immutable() -> None:
    record = StepRecord(0, 0, 1.0, 1.0, False, "none")
    with pytest.raises(dataclasses.FrozenInstanceError):
        record.scale = 2.0  # type: ignore[misc]


def test_reads_back_in_blocks() -> None:
    log = RecordLog(block=4)
    blocks: list[list[StepRecord]] = []
    log.subscribe(blocks.append)
    with CountReads() as reads:
        for i in range(9):
            note(log, 0, scalar(8.0), Skip(scalar(float(i == 2))), scalar(1.0))
            log.close_round(scalar(4.0))
    assert reads.count == 0  # a block is one transfer, not an `.item()` per record
    assert [len(block) for block in blocks] == [4, 4]
    assert (log.num_steps, log.num_skipped) == (7, 1)
    log.flush()
    assert [r.index for block in blocks for r in block] == list(range(9))
    assert blocks[0][2] == StepRecord(2, 0, 8.0, 4.0, True, "gradient")
    assert log.last == StepRecord(8, 0, 8.0, 4.0, False, "none")


def skips(log: RecordLog, count: int) -> None:
    for _ in range(count):
        note(log, 0, None, Skip.YES, scalar(1.0))
        log.close_round(None)


def test_a_smaller_limit_than_a_checkpoint_had_stops_at_the_next_skip() -> None:
    log = RecordLog()
    log.restore(0, 10, ["gradient"] * 10, None)
    log.limit = 5
    assert len(log.streak) == 10
    note(log, 0, None, Skip.NO, None)
    log.close_round(None)
    log.flush()
    assert log.streak == ()
    log.restore(0, 10, ["gradient"] * 10, None)
    with pytest.raises(FloatingPointError, match="11 optimizer steps in a row"):
        skips(log, 1)


def test_a_skip_that_lowered_the_scale_starts_the_count_again() -> None:
    log = RecordLog(3)
    for i in range(12):  # the loss is not finite in every second batch, and gradients overflow in the others
        note(log, 0, scalar(2.0 ** (20 - i // 2)), Skip.YES, scalar(float("nan") if i % 2 == 0 else 1.0))
        log.close_round(scalar(2.0 ** (20 - (i + 1) // 2)))
    log.flush()
    assert (log.num_skipped, log.num_lost, log.streak) == (12, 6, ())
    with pytest.raises(FloatingPointError, match="3 optimizer steps in a row"):
        skips(log, 3)
