"""Where the records of a run show that it was stuck and went on in another precision."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lightning_amp.scaling._step_record import StepRecord


def fallbacks(records: Iterable[StepRecord]) -> list[StepRecord]:
    """Return the first step of each precision but the first. Of steps of an older version nobody knows theirs."""
    found: list[StepRecord] = []
    before = ""
    for record in records:
        if before and record.precision and record.precision != before:
            found.append(record)
        before = record.precision or before
    return found


def before_fallback(records: Sequence[StepRecord]) -> Sequence[StepRecord]:
    """Return the steps in the precision in which the run began: from a fallback on there is no loss scale."""
    later = fallbacks(records)
    return records[: records.index(later[0])] if later else records


def describe_fallbacks(records: Iterable[StepRecord]) -> str:
    """Write them behind other words: `, bf16 from step 64 on`; empty if there are none."""
    return "".join(f", {record.precision} from step {record.index:,} on" for record in fallbacks(records))
