"""Distinguish skipped steps with a new cause, with a known cause, and with no fault at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from typing_extensions import final

from lightning_amp._arguments import is_count
from lightning_amp._text import counted
from lightning_amp.causes.overflow._everybody import Explained
from lightning_amp.reports import OverflowReport
from lightning_amp.scaling import Saved

MAX_REPLAYS = 20
"""Number of skipped steps to run again per allowed report. Most show a known cause, or a scale that settles."""


@final
class KnownCauses:
    """The reports of one Trainer, on at most `max_reports` causes and steps, and counts of each kind of skip.

    `reports` has new causes and, as long as there is room, steps that were skipped for a known one.
    """

    def __init__(self, max_reports: int) -> None:
        self.max_reports = max_reports
        self.reports: list[OverflowReport] = []
        self.known: set[str] = set()
        self._num_steps = 0
        self._num_replays = self._num_causes = self._num_calibrating = self._num_repeated = 0
        self._by_key: dict[str, OverflowReport] = {}  # only causes found in this process, with all tried remedies
        self._latest: tuple[int, str] | None = None  # the last skip, and the key of its cause

    @property
    def is_complete(self) -> bool:
        """Return whether the limit is reached, so that no further skipped step is run again."""
        return self.has_all_causes or self._num_replays >= MAX_REPLAYS * self.max_reports

    @property
    def has_all_causes(self) -> bool:
        """Return whether `max_reports` causes were found."""
        return self._num_causes >= self.max_reports

    def add(self, found: Sequence[Explained]) -> list[OverflowReport]:
        """Count the results of all ranks for one skipped step; return the new entries of :attr:`reports`."""
        self._num_replays += 1
        record = found[0].report.record
        faults = [one for one in found if not one.report.is_calibration]
        if record.skipped:
            self._latest = (record.index, faults[0].key) if faults else None
        if not faults:
            self._num_calibrating += record.skipped
            return []
        taken = [replace(one.report, is_repeated=one.key in self.known) for one in faults]
        is_new = not all(report.is_repeated for report in taken)
        if not is_new and not record.skipped:
            return []
        self._by_key |= {one.key: one.report for one in faults if one.key not in self.known}
        self.known.update(one.key for one in faults)
        self._num_repeated += not is_new
        if self._num_steps >= self.max_reports:
            if not is_new:
                return []
            self._forget_a_repeated_one()
        self.reports += taken
        self._num_steps += 1
        self._num_causes += is_new
        return taken

    def since(self, step: int) -> str:
        """Write the cause of the last skip, and the advice; return an empty text if the skip was before this step."""
        if self._latest is None or self._latest[0] < step or self._latest[1] not in self._by_key:
            return ""
        return f"The cause, as `OverflowLocator` found it: {self._by_key[self._latest[1]].in_one_line}."

    def summary(self) -> str:
        """Count the skips without a report, for the end of a fit; return an empty text if there are none."""
        parts: list[str] = []
        if self._num_calibrating:
            steps = counted(self._num_calibrating, "step")
            parts.append(f"{steps} skipped while the scale settled, which is how dynamic scaling works")
        if self._num_repeated:
            parts.append(f"{counted(self._num_repeated, 'step')} more skipped for a cause that was reported")
        return "; ".join(parts)

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        state: dict[str, Any] = {
            "num_located": self._num_steps, "reports": [report.as_dict() for report in self.reports],
        }  # fmt: skip
        if self._num_replays:
            state["looks"] = [self._num_replays, self._num_causes, self._num_calibrating, self._num_repeated]
            state["known"] = sorted(self.known)
        return state

    def restore(self, saved: Saved, state: Mapping[str, Any]) -> None:
        """Continue from the result of :meth:`state`.

        Raises:
            ValueError: If an entry is wrong. Nothing changes then.

        """
        num_steps = saved.count("num_located")
        try:
            reports = [OverflowReport.from_dict(values) for values in saved.entries("reports")]
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise saved.wrong("reports", "a list of reports, as `OverflowReport.as_dict()` writes them") from error
        looks = saved.entries("looks") if "looks" in state else [0, 0, 0, 0]
        if not (len(looks) == 4 and all(is_count(number, 0) for number in looks)):
            raise saved.wrong("looks", "four whole numbers of 0 or more")
        known = saved.entries("known") if "known" in state else []
        self.reports, self.known, self._num_steps = reports, set(map(str, known)), num_steps
        self._num_replays, self._num_causes, self._num_calibrating, self._num_repeated = looks

    def _forget_a_repeated_one(self) -> None:
        """Make room for a new cause: drop the latest report of a cause that was known."""
        index = next(report.record.index for report in reversed(self.reports) if report.is_repeated)
        self.reports = [r for r in self.reports if r.record.index != index or not r.is_repeated]
        self._num_steps -= 1
