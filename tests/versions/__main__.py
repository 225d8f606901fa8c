"""`make test-versions`: an environment per set of versions, the whole suite in each, and the table.

The exit status is 1 if a test fails in one of them. An environment is kept; a second call starts at once.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

from versions.specs import DEFAULT, Spec
from versions.table import Row, Table

ROOT = Path(__file__).resolve().parents[2]
NEEDS = "plot,report,cli,examples"
ASK = """\
import platform
from importlib.metadata import version
import torch
print(platform.python_version(), torch.__version__, *map(version, ["lightning", "torchmetrics", "numpy"]))
"""


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line; then build, run and write row by row."""
    args = parse(arguments)
    table, commit, failed = Table.read(args.out), head(args.out), False
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(table.page(), encoding="utf-8")  # a test of the suite reads this page
    for spec in args.specs or [Spec.parse(text) for text in DEFAULT]:
        print(f"\n=== {spec}", flush=True)
        python = build(spec, args.folder / spec.slug)
        row = run(python, args.workers, args.pytest, commit)
        failed |= row.has_failed
        print(row.closing, flush=True)
        if not args.pytest:
            table = table.with_row(row)
            args.out.write_text(table.page(), encoding="utf-8")
    return int(failed)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make test-versions", description=__doc__)
    parser.add_argument("specs", nargs="*", type=Spec.parse, help="such as python==3.12,torch==2.11.0,lightning==2.6.1")
    parser.add_argument("--folder", type=Path, default=ROOT / ".versions", help="where the environments are")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/results/versions.md", help="the table")
    parser.add_argument("--workers", default="2", help="of pytest-xdist")
    parser.add_argument("--pytest", default="", help="arguments for pytest; then no row is written")
    return parser.parse_args(arguments)


def head(out: Path) -> str:
    """Return the commit under test, with `-dirty` if more than the table has changed."""
    table = [f":!{out.resolve().relative_to(ROOT)}"] if out.resolve().is_relative_to(ROOT) else []
    changed = output("git", "status", "--porcelain", "--untracked-files=no", "--", ".", *table)
    return output("git", "rev-parse", "--short", "HEAD").strip() + ("-dirty" if changed else "")


def output(*command: str) -> str:
    """Run a command and return its output; its errors are printed unchanged."""
    result = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    if result.returncode:
        sys.exit(f"`{' '.join(command)}` failed; above is what it says.")
    return result.stdout


def build(spec: Spec, folder: Path) -> Path:
    """Make the environment; return its Python.

    The package and its requirements are installed first, as a user gets them. The suite's tools come second, and must
    not change any of them.
    """
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    if not python.exists():
        uv("venv", "--python", spec.python, str(folder))
    resolution = ["--resolution", "lowest-direct"] if spec.lowest else []
    extras = NEEDS if spec.lowest else f"{NEEDS},fp8"  # which the lowest torch cannot import
    uv("pip", "install", "--python", str(python), *resolution, *spec.requirements, "-e", f".[{extras}]")
    installed = uv("pip", "freeze", "--python", str(python), "--exclude-editable")
    fixed = folder / "installed.txt"
    fixed.write_text(re.sub("(?m)^(lightning==.*)", r"\1\npytorch-\1", installed), encoding="utf-8")
    uv("pip", "install", "--python", str(python), "-c", str(fixed), "--group", "test")
    return python


def uv(*args: str) -> str:
    """Run uv."""
    return output(sys.executable, "-m", "uv", "--quiet", *args)


def run(python: Path, workers: str, arguments: str, commit: str) -> Row:
    """Run the suite and read its results."""
    report = python.parents[1] / "report.xml"
    report.unlink(missing_ok=True)
    start = time.perf_counter()
    options = ["-n", workers, "-q", f"--junitxml={report}", *arguments.split()]
    command = [str(python), "-m", "pytest", *options]
    subprocess.run(command, cwd=ROOT, check=False)  # its report names the failed tests
    if not report.exists():
        sys.exit("pytest wrote no report; above is what it says.")
    suites = list(ElementTree.parse(report).iter("testsuite"))
    failed, skipped, total = (sum(int(s.get(key, 0)) for s in suites) for key in ("failures", "skipped", "tests"))
    failed += sum(int(s.get("errors", 0)) for s in suites)
    return Row(
        *output(str(python), "-c", ASK).split(),
        passed=str(total - failed - skipped),
        skipped=str(skipped),
        failed=str(failed),
        minutes=f"{(time.perf_counter() - start) / 60:.0f}",
        date=time.strftime("%Y-%m-%d"),
        commit=commit,
    )


if __name__ == "__main__":
    sys.exit(main())
