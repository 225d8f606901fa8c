"""Do runs one after the other, each in its own process."""

from __future__ import annotations

import datetime
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from typing_extensions import final

from benchmarks._machine import Machine, installed
from benchmarks._processes import Deadline
from benchmarks.headline._arms import ARMS
from benchmarks.headline._plan import Run
from benchmarks.headline._records import FINAL, Outcome, Record, append, read
from benchmarks.headline.models import MODELS
from lightning_amp._text import counted
from lightning_amp.advice._machine import support_of


@final
class Series:
    """Does the runs that are not on record yet, while there is time.

    Args:
        machine: The machine of the records.
        device_type: `"cuda"` or `"cpu"`.
        out: The file of records.
        run_limit_s: Seconds after which a run is ended, and counts as one that took too long.
        limit_s: Seconds for all of them.

    """

    def __init__(self, machine: Machine, device_type: str, out: Path, *, run_limit_s: float, limit_s: float) -> None:
        self._machine, self._device_type, self._out = machine, device_type, out.resolve()
        self._run_limit_s, self._deadline = run_limit_s, Deadline(limit_s)

    def go(self, runs: Sequence[Run], *, retry: bool = False) -> None:
        """Do the runs in order, and report each.

        Args:
            runs: The runs.
            retry: Do runs again that failed or took too long.

        """
        waiting = [run for run in runs if not self._is_done(run, retry)]
        print(f"{len(runs) - len(waiting)} of {len(runs)} runs are on record.", flush=True)
        for number, run in enumerate(waiting):
            if run.arm == "fp8" and not has_torchao() and not MODELS[run.model].no_fp8:
                print(f"{run}: left out, torchao is not installed", flush=True)
                continue
            outcome = self._known(run)
            if outcome is None:
                if not self._deadline.allows(self._estimated_s(run)):
                    left = counted(len(waiting) - number, "run")
                    print(f"Time is up, with {left} left. The same command goes on.", flush=True)
                    return
                outcome = self._run(run)
            if outcome is None:
                print(f"Time was up in the middle of {run}. The same command goes on with it.", flush=True)
                return
            append(self._out, Record(self._machine, run, outcome, datetime.date.today().isoformat()))
            print(f"{run}: {_said(outcome)}", flush=True)

    def _records(self) -> list[Record]:
        return [record for record in read(self._out) if record.machine == self._machine]

    def _is_done(self, run: Run, retry: bool) -> bool:
        found = [record.outcome for record in self._records() if record.run == run]
        return bool(found) and (not retry or found[-1].status in FINAL)

    def _estimated_s(self, run: Run) -> float:
        """Return the expected seconds of a run: as the last one of this model, or as planned."""
        alike = [r for r in self._records() if (r.run.model, r.run.compiled) == (run.model, run.compiled)]
        took = [record.outcome.wall_s for record in alike if record.outcome.wall_s]
        return took[-1] if took else run.estimated_s()

    def _known(self, run: Run) -> Outcome | None:
        """Return the outcome of a run that need not be done; `None` for others."""
        if run.arm == "fp8" and MODELS[run.model].no_fp8:
            return Outcome("cannot", MODELS[run.model].no_fp8)
        support, reason = (
            ("native", "") if self._machine.tiny else support_of(ARMS[run.arm].format, torch.device("cuda"))
        )
        if support == "missing":
            return Outcome("cannot", reason)
        for record in self._records():
            smaller = record.run._replace(batch=run.batch) == run and record.run.batch < run.batch
            if smaller and record.outcome.status == "does not fit":
                return Outcome("does not fit", f"a batch of {record.run.batch} does not fit either")
        return None

    def _run(self, run: Run) -> Outcome | None:
        """Do a run in a process and return its outcome; `None` if the deadline of all came before its own limit."""
        with tempfile.TemporaryDirectory() as folder:
            result = Path(folder, "outcome.json")
            command = [sys.executable, "-m", "benchmarks.headline._one_run", json.dumps(run._asdict())]
            command += ["--out", str(result), "--device", self._device_type]
            ended = self._deadline.run(command + ["--tiny"] * self._machine.tiny, Path(folder), self._run_limit_s)
            if ended is None:
                return None
            if ended.status == 0:
                return Outcome.from_dict(json.loads(result.read_text(encoding="utf-8")))._replace(wall_s=ended.wall_s)
            return Outcome("took too long" if ended.status is None else "failed", ended.reason, wall_s=ended.wall_s)


def _said(outcome: Outcome) -> str:
    if outcome.speed is None:
        return f"{outcome.status}: {outcome.reason}"
    peak = f", {outcome.memory['peak'] / 2**30:.2f} GiB" if "peak" in outcome.memory else ""
    return f"{outcome.speed:.1f} samples/s{peak} ({outcome.wall_s:.0f} s)"


def has_torchao() -> bool:
    """Return whether the libraries of fp8 are installed."""
    return bool(installed("torchao"))
