"""The headline table: `python -m benchmarks.headline`.

Six well-known models train on synthetic data: in strict fp32, in fp32 with TF32, in Lightning's bf16 and fp16, and in
our bf16, fp16 and fp8. Each run has its own process, and its record is added to a file as soon as it ends. A second
call goes on where the first one stopped. The page is written from the records.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks._machine import RESULTS, ROOT, machine_here, why_not_there
from benchmarks.headline._arms import ARMS
from benchmarks.headline._page import page
from benchmarks.headline._plan import Run, plan
from benchmarks.headline._records import read
from benchmarks.headline._series import Series
from benchmarks.headline.models import MODELS
from lightning_amp._files import write_atomically


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line, run, write the page."""
    args = _parse(arguments)
    out: Path = args.out or (ROOT / "headline_tiny" if args.tiny else RESULTS) / "headline.json"
    if refusal := why_not_there(out, tiny=args.tiny):
        print(refusal, file=sys.stderr)
        return 2
    runs = _wanted(args)
    if args.list:
        _print_plan(runs)
        return 0
    if not args.page_only:
        import torch

        if args.device == "cuda" and not torch.cuda.is_available():
            print(
                "The table needs a CUDA device, and there is none here."
                " Next step: `--tiny` runs all of it at toy sizes on the CPU, which shows only that it runs;"
                " `--page-only` writes the page of the records that there are.",
                file=sys.stderr,
            )
            return 2
        machine = machine_here(torch.device(args.device), tiny=args.tiny)
        limits = {"run_limit_s": args.run_limit_s, "limit_s": 60 * args.limit_minutes}
        series = Series(machine, args.device, out, **limits)
        series.go(runs, retry=args.retry)
    text = page(read(out))
    write_atomically(out.with_suffix(".md"), lambda file: file.write(text))
    print(f"The page is {out.with_suffix('.md').name}, beside the records.")
    return 0


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.headline", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", type=_names(tuple(MODELS)), metavar="MODELS", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--arms", type=_names(tuple(ARMS)), metavar="ARMS", help=f"of {', '.join(ARMS)}")
    parser.add_argument("--tiny", action="store_true", help="a rehearsal, all of it at toy sizes: does it run?")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="of `--tiny` (default: cpu); else it is cuda")
    parser.add_argument("--out", type=Path, help="the file of records; the page is written beside it, as .md")
    parser.add_argument("--limit-minutes", type=float, default=float("inf"), help="start no run that would not end")
    parser.add_argument("--run-limit-s", type=float, default=240.0, help="end a run that takes longer (default: 240)")
    parser.add_argument("--retry", action="store_true", help="do runs again that failed or took too long")
    parser.add_argument("--page-only", action="store_true", help="run nothing, write the page")
    parser.add_argument("--list", action="store_true", help="print the plan, and what it takes on an H200")
    args = parser.parse_args(arguments)
    if args.device and not args.tiny:
        parser.error("--device is for --tiny")
    args.device = args.device or ("cpu" if args.tiny else "cuda")
    return args


def _names(legal: tuple[str, ...]) -> Callable[[str], tuple[str, ...]]:
    """Return a function that reads names with commas between them."""

    def read_names(text: str) -> tuple[str, ...]:
        names = tuple(text.split(","))
        if unknown := [name for name in names if name not in legal]:
            raise argparse.ArgumentTypeError(f"must be some of {', '.join(legal)}, got {unknown[0]!r}")
        return names

    return read_names


def _wanted(args: argparse.Namespace) -> list[Run]:
    models = [model for name, model in MODELS.items() if not args.only or name in args.only]
    return [run for run in plan(models, tiny=args.tiny) if not args.arms or run.arm in args.arms]


def _print_plan(runs: list[Run]) -> None:
    total_s = 0.0
    for run in runs:
        total_s += run.estimated_s()
        print(f"{total_s / 60:5.1f} min  {run}")
    print(f"{len(runs)} runs, about {total_s / 60:.0f} minutes on an H200; `--limit-minutes 9` does it in pieces.")


if __name__ == "__main__":
    sys.exit(main())
