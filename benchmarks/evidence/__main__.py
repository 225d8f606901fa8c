"""Collect all measurements that need a GPU: `make gpu-evidence`, or `python -m benchmarks.evidence`.

It runs the tests for GPUs and all benchmarks that need one, each in its own process, and writes a page of the results.
A second call goes on where the first one stopped. It needs a checkout, torch, lightning, torchmetrics and pytest.
Some parts also use transformers, scipy or torchao; without them they measure less, and say so.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks._machine import RESULTS, ROOT, machine_here, why_not_there
from benchmarks.evidence._collection import Collection, write_page
from benchmarks.evidence._parts import Part, parts
from benchmarks.evidence._record import read


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line, and collect."""
    import torch

    args = _parse(arguments)
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    out: Path = args.out or (ROOT / "evidence_tiny" if args.tiny else RESULTS)
    wanted = parts(device_type, tiny=args.tiny)
    if args.list:
        _print_plan(wanted)
        return 0
    if args.page_only:
        write_page(out)
        return 0
    if refusal := _refusal(args, out, device_type, wanted):
        print(refusal, file=sys.stderr)
        return 2
    machine = machine_here(torch.device(device_type), tiny=args.tiny)
    collection = Collection(machine, out, commit=args.commit or commit_here(), limit_s=60 * args.limit_minutes)
    collection.go(wanted, retry=args.retry)
    found = [record.status for record in read(out / "gpu.json") if record.machine == machine]
    return int(any(status not in ("done", "not there") for status in found))


def commit_here() -> str:
    """Return the commit of the checkout, and whether files have changed since; `unknown` without git."""
    if not (ROOT / ".git").exists():
        return "unknown"
    try:
        found = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.strip()
        sources = ["lightning_amp", "benchmarks", "tests", "examples"]
        changed = subprocess.run(["git", "diff", "--quiet", "HEAD", "--", *sources], cwd=ROOT, check=False).returncode
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{found}, with changes" if changed else found


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.evidence", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="the folder of the results (default: docs/results)")
    parser.add_argument(
        "--limit-minutes", type=float, default=9.0, help="start no part that would end later (default: 9)"
    )
    parser.add_argument("--retry", action="store_true", help="do parts again that have no result, or found a fault")
    parser.add_argument("--commit", help="what the page says of the checkout (default: git is asked)")
    parser.add_argument("--tiny", action="store_true", help="a rehearsal on any device: does it run?")
    parser.add_argument("--page-only", action="store_true", help="run nothing, write the page")
    parser.add_argument("--list", action="store_true", help="print the plan, and what it takes on an H200")
    return parser.parse_args(arguments)


def _refusal(args: argparse.Namespace, out: Path, device_type: str, wanted: Sequence[Part]) -> str:
    """Return why nothing can run, and the next step; empty if everything can."""
    if device_type == "cpu" and not args.tiny:
        return (
            "Evidence needs a CUDA device, and there is none here."
            " Next step: `--tiny` rehearses all of it, which shows only that it runs."
        )
    longest = max(wanted, key=lambda part: part.estimated_s)
    if 60 * args.limit_minutes < longest.estimated_s:
        return (
            f"`--limit-minutes` must leave time for the longest part, got {args.limit_minutes:g}: {longest.name} takes"
            f" about {longest.estimated_s / 60:.1f} minutes. Next step: allow more."
        )
    return why_not_there(out, tiny=args.tiny)


def _print_plan(wanted: Sequence[Part]) -> None:
    total_s = 0.0
    for part in wanted:
        total_s += part.estimated_s
        print(f"{part.estimated_s / 60:4.1f} min  {part.name}: {part.missing or part.shown()}")
    print(f"{len(wanted)} parts, about {total_s / 60:.0f} minutes on an H200.")


if __name__ == "__main__":
    sys.exit(main())
