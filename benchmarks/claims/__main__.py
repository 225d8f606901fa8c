"""Claims of articles about mixed precision, measured one by one: `python -m benchmarks.claims`.

Each claim adds a record to `claims.json` as soon as it has run, and the page `claims.md` is written from the records.
A second call goes on where the first one stopped. On a machine with a GPU the same command measures on it.
"""

from __future__ import annotations

import argparse
import datetime
import logging
import sys
import time
import warnings
from collections.abc import Mapping
from pathlib import Path

import torch

from benchmarks._machine import RESULTS, ROOT, machine_here, why_not_there
from benchmarks.claims._claim import Claim, Outcome, Setting
from benchmarks.claims._page import page
from benchmarks.claims._record import Record, read, write
from benchmarks.claims.claims import claims
from lightning_amp._files import write_atomically


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line, run, write the page. Return 1 if a claim's run failed."""
    known = claims()
    args = _parse(arguments, known)
    out: Path = args.out or (ROOT / "claims_tiny" if args.tiny else RESULTS)
    if refusal := why_not_there(out, tiny=args.tiny):
        print(refusal, file=sys.stderr)
        return 2
    out.mkdir(parents=True, exist_ok=True)
    failed = False
    if not args.page:
        failed = _run_all(args, {name: known[name] for name in args.only or known}, out / "claims.json")
    text = page(known, read(out / "claims.json"))
    write_atomically(out / "claims.md", lambda file: file.write(text))
    print(f"The page is claims.md, beside the records in {out}.")
    return int(failed)


def _parse(arguments: list[str] | None, known: Mapping[str, Claim]) -> argparse.Namespace:
    def names(text: str) -> list[str]:
        found = text.split(",")
        if unknown := [name for name in found if name not in known]:
            raise argparse.ArgumentTypeError(f"must be some of {', '.join(known)}, got {unknown[0]!r}")
        return found

    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.claims", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", type=names, metavar="CLAIMS", help="these claims, with commas between them")
    parser.add_argument("--out", type=Path, help="the folder of claims.json and claims.md (default: docs/results)")
    parser.add_argument("--again", action="store_true", help="run claims again that have a result")
    parser.add_argument("--tiny", action="store_true", help="a rehearsal with the smallest sizes: does it run?")
    parser.add_argument("--page", action="store_true", help="run nothing, write the page")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there is one")
    return parser.parse_args(arguments)


def _run_all(args: argparse.Namespace, wanted: Mapping[str, Claim], path: Path) -> bool:
    """Run the claims that have no result on this machine; return whether one failed."""
    setting = Setting(args.device or ("cuda" if torch.cuda.is_available() else "cpu"), args.tiny)
    machine = machine_here(setting.device, tiny=args.tiny)
    done = {r.name for r in read(path) if r.machine == machine and r.verdict != "failed" and not args.again}
    failed = False
    for name, claim in wanted.items():
        if name in done:
            continue
        begin = time.monotonic()
        outcome = _outcome(claim, setting)
        seconds = round(time.monotonic() - begin, 1)
        today = datetime.date.today().isoformat()
        write(path, Record(machine, setting.device_type, name, *outcome, today, seconds))
        print(f"{name}: {outcome.verdict}, {outcome.figure} ({seconds} s)", flush=True)
        failed = failed or outcome.verdict == "failed"
    return failed


def _outcome(claim: Claim, setting: Setting) -> Outcome:
    """Run a claim; an error is its outcome."""
    try:
        return claim.run(setting)
    except Exception as error:
        return Outcome("failed", f"{type(error).__name__}: {error}"[:300])


if __name__ == "__main__":
    for logger in ("lightning.pytorch", "lightning.fabric", "lightning_amp"):
        logging.getLogger(logger).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    sys.exit(main())
