"""Kill a training run at random moments, resume it each time, and check that nothing is lost.

    make faults FAULTS_ARGS="--kills 50 --seed 1"

A run saves a checkpoint every few steps, with all callbacks of this package writing their files. Its process gets a
SIGKILL: at a random moment, or while one of our files is being written. It is resumed from its last checkpoint. Once in
each run that checkpoint is cut in half first, as Lightning may leave it if the temporary folder is on another disk.
At the end, everything must equal a run that was never killed, bit for bit. Then the next precision begins, until
enough kills were survived.

It prints the results, and exits with 1 if anything was lost.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # set before torch is imported: a fork copies only the thread that calls it

import argparse
import functools
import json
import logging
import random
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from support.resuming import Averaging, assert_equal, everything, ours, plugin_for, train

from lightning_amp import MetricComparison, OverflowLocator
from lightning_amp._files import LEFTOVER
from lightning_amp.findings import StepRecord
from lightning_amp.reports import ScaleHistory

STEPS = 52
EVERY = 7  # never at the end of an epoch: Lightning does not repeat a validation that was cut off
GRADIENT, NAN = (3, 11, 30, 52, 70), (5, 18, 19, 25, 33, 47, 66, 90)
RUNS: dict[str, dict[str, Any]] = {
    "fp16, accumulated": {"fused": True, "accumulate": 2},
    "bf16": {"fused": False, "accumulate": 1},
    "fp16": {"fused": True, "accumulate": 1},
}


def run(name: str, folder: Path, ckpt_path: Path | None, slow: float = 0.0) -> None:
    """Train, and write a result at the end; this runs in the process that gets killed."""
    settings = RUNS[name]
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder / "tmp")
    if slow:  # a slow disk, so that a file stays half written for a moment
        sync = os.fsync
        os.fsync = lambda handle: (time.sleep(slow), sync(handle))[1]
    callbacks = [Averaging(), *ours(folder / "ours")]
    locator = next(c for c in callbacks if isinstance(c, OverflowLocator))
    locator.max_reports = 20
    trainer = train(
        plugin_for(name[:4]), STEPS, gradient=GRADIENT, nan=NAN, callbacks=callbacks, ckpt_path=ckpt_path,
        optimizer=functools.partial(torch.optim.AdamW, lr=0.01, fused=settings["fused"]),
        accumulate_grad_batches=settings["accumulate"], checkpoints=folder / "checkpoints", every_n_steps=EVERY,
    )  # fmt: skip
    next(c for c in callbacks if isinstance(c, MetricComparison)).to_csv(folder / "ours" / "comparison.csv")
    torch.save(everything(trainer, folder / "ours"), folder / "unfinished.pt")
    (folder / "unfinished.pt").replace(folder / "result.pt")


def fork(work: Callable[[], None], log: Path) -> int:
    """Run it in a child process that starts with everything imported; its output goes to `log`."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        with log.open("a") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def exit_code(child: int, timeout_s: float) -> int | None:
    """Return its exit code, or minus the signal that ended it; `None` while it runs."""
    end = time.monotonic() + timeout_s
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() >= end:
            return None
        time.sleep(0.002)


def kill_when(child: int, timeout_s: float, reached: Callable[[], bool]) -> int:
    """Send a SIGKILL when `reached` returns true, or after a time limit; return the exit code."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end and not reached():
        code = exit_code(child, 0.0)
        if code is not None:
            return code
        time.sleep(0.0005)
    os.kill(child, signal.SIGKILL)
    code = exit_code(child, 60.0)
    assert code is not None
    return code


@dataclass
class Account:
    """Counts over all runs."""

    kills: int = 0
    while_writing: int = 0
    finished: int = 0
    torn_checkpoints: int = 0
    lost: list[str] = field(default_factory=list)

    def loses(self, what: str) -> None:
        self.lost.append(what)
        print(f"  LOST: {what}", flush=True)


def leftovers(folder: Path) -> list[Path]:
    return list((folder / "ours").glob(f".*{LEFTOVER}"))


def last_checkpoint(folder: Path, account: Account) -> tuple[Path | None, int]:
    """Return the newest checkpoint that loads, and its step; delete Lightning's files that do not load."""
    paths = (folder / "checkpoints").glob("*.ckpt")
    for path in sorted(paths, key=lambda p: int(p.stem.removeprefix("step=")), reverse=True):
        try:
            checkpoint = torch.load(path, weights_only=True)
        except Exception:
            account.torn_checkpoints += 1
            path.unlink()
            continue
        return path, checkpoint["global_step"]
    return None, 0


def check_files(folder: Path, skips: list[StepRecord], step: int, account: Account) -> None:
    """Check after a kill that every file of ours is whole and as new as the last checkpoint."""
    for path in (folder / "ours").iterdir():
        try:
            if path.name.endswith(LEFTOVER):
                continue
            if path.suffix == ".csv":
                history = ScaleHistory.from_csv(path)
                if history.num_attempted < step:
                    account.loses(f"{path.name} ends at step {history.num_attempted}, the checkpoint at {step}")
                known = [r for r in skips if r.index < history.num_attempted]
                if [r for r in history if r.skipped] != known:
                    account.loses(f"{path.name} tells of other skips")
            elif path.suffix == ".json":
                json.loads(path.read_text())
            else:
                torch.load(path, weights_only=True)
        except Exception as error:
            account.loses(f"{path.name} is torn: {type(error).__name__}: {error}")
    if step and not (folder / "ours" / "scale_history.csv").exists():
        account.loses("scale_history.csv does not exist although there is a checkpoint")


def survive(name: str, folder: Path, kills: int, chance: random.Random, account: Account) -> None:
    """Run until the end, or until there were enough kills; after those the run may finish."""
    log = folder / "log.txt"
    references = folder / "whole"
    for path in (references, folder / "killed"):
        (path / "ours").mkdir(parents=True)
        (path / "tmp").mkdir()
    start = time.monotonic()
    if exit_code(fork(lambda: run(name, references, None), log), 300.0) != 0:
        account.loses(f"the run without kills failed:\n{log.read_text()[-3000:]}")
        return
    duration = time.monotonic() - start
    whole = torch.load(references / "result.pt", weights_only=False)
    skips = [record for record in whole["history"] if record.skipped]
    folder = folder / "killed"
    attempt = 0
    while True:
        path = last_checkpoint(folder, account)[0]
        if path is not None and attempt == 2:  # cut in half, as a kill may leave it
            os.truncate(path, path.stat().st_size // 2)
            path = last_checkpoint(folder, account)[0]
        attempt += 1
        in_write = chance.random() < 0.5
        slow = 0.02 if in_write else 0.0
        known = set(leftovers(folder))
        child = fork(functools.partial(run, name, folder, path, slow), log)
        if account.kills >= kills:
            code = exit_code(child, 300.0)
        elif in_write:
            writes, seen = chance.randint(1, 6), set[Path]()

            def writing(seen: set[Path] = seen, known: set[Path] = known, writes: int = writes) -> bool:
                seen.update(set(leftovers(folder)) - known)
                return len(seen) >= writes

            code = kill_when(child, duration, writing)
        else:
            code = kill_when(child, chance.uniform(0.05, 0.7) * duration, lambda: False)
        if code == -signal.SIGKILL:
            account.kills += 1
            account.while_writing += bool(set(leftovers(folder)) - known)
            check_files(folder, skips, last_checkpoint(folder, account)[1], account)
            continue
        if code != 0:
            account.loses(f"a resumed run ended with {code}:\n{log.read_text()[-3000:]}")
            return
        break
    account.finished += 1
    result = torch.load(folder / "result.pt", weights_only=False)
    for part in whole:
        try:
            assert_equal({part: result[part]}, {part: whole[part]})
        except AssertionError as error:
            account.loses(f"{name}: `{part}` is not that of the run without kills: {str(error)[:500]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=15, help="how many to survive (default: 15)")
    parser.add_argument("--seed", type=int, default=0, help="of the random moments (default: 0)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.ERROR)
    account, chance = Account(), random.Random(args.seed)
    start = time.monotonic()
    names = list(RUNS)[: max(1, args.kills // 3)]
    with tempfile.TemporaryDirectory(prefix="lightning_amp_faults_") as folder:
        while not account.lost and (account.kills < args.kills or not account.finished):
            name = names[account.finished % len(names)]
            # The kills are spread over the precisions; the last one takes the rest.
            share = -(-args.kills * (account.finished + 1) // len(names))
            where = Path(folder) / str(account.finished)
            survive(name, where, min(args.kills, share), chance, account)
            print(f"{name}: {account.kills} kills so far", flush=True)
    print(
        f"Survived {account.kills} kills, {account.while_writing} of them while a file of ours was being written, in"
        f" {time.monotonic() - start:.0f} s. {account.finished} runs came to their end and were compared, bit for bit,"
        f" with runs without kills; {account.torn_checkpoints} torn checkpoints were passed over."
    )
    print(f"Lost: {len(account.lost)} things." if account.lost else "Lost: nothing.")
    sys.exit(bool(account.lost))


if __name__ == "__main__":
    main()
