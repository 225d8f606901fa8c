"""`make projects`: run all projects, or some, and write the table. The exit status is 1 if a difference is our fault.

Each project runs in its own process, so that a crash, a hang or a leak affects no other project.
"""

from __future__ import annotations

import argparse
import gc
import logging
import multiprocessing as mp
import os
import sys
import tempfile
import time
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch

from projects.judge import NOTE, OURS, WRONG, Finding, Result, judge
from projects.registry import PRECISIONS, Project, all_projects
from projects.table import page, summary


class Worker(NamedTuple):
    """A running project."""

    process: Any
    result: Connection
    project: Project
    deadline: float
    printed: Path


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line, run the projects, and write the table."""
    args = parse(arguments)
    projects = [p for p in all_projects().values() if wanted(p, args)]
    if args.list:
        print("\n".join(f"{p.family:20} {p.name:32} {p.missing() or ''}" for p in projects))
        return 0
    if not projects:
        print("No project matches. Next step: `--list` shows all.", file=sys.stderr)
        return 2
    start = time.perf_counter()
    results = run_all(projects, args)
    order = [p.name for p in projects]
    results.sort(key=lambda r: order.index(r.project))
    text = page(results)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(text, encoding="utf-8")
    print(f"\n{summary(results)}\n{time.perf_counter() - start:.0f} s", end="")
    print(f"; {args.out} has the table." if args.out else ".")
    return int(any(r.ours for r in results))


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make projects PROJECTS_ARGS=...", description=__doc__)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these projects, or parts of their names")
    parser.add_argument("--family", nargs="+", default=[], help="only these families")
    parser.add_argument("--precision", nargs="+", choices=PRECISIONS, help="only this half precision, beside fp32")
    parser.add_argument("--fast", action="store_true", help="without the arms with callbacks")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="projects at a time (default: one per core)"
    )
    parser.add_argument("--out", type=Path, help="write the page here")
    parser.add_argument("--list", action="store_true", help="name the projects and stop")
    return parser.parse_args(arguments)


def wanted(project: Project, args: argparse.Namespace) -> bool:
    named = not args.only or any(part == project.name or part in project.name for part in args.only)
    return named and (not args.family or project.family in args.family)


def run_all(projects: list[Project], args: argparse.Namespace) -> list[Result]:
    gc.freeze()  # what is imported already; some projects collect garbage often (the finder of batch sizes)
    torch.set_num_threads(1)  # before the fork: the models are tiny, and a fork must not have other threads
    context = mp.get_context("fork" if "fork" in mp.get_all_start_methods() else "spawn")
    waiting, running, results = list(projects), list[Worker](), list[Result]()
    with tempfile.TemporaryDirectory() as folder:
        try:
            while waiting or running:
                while waiting and len(running) < args.jobs:
                    running.append(start(context, waiting.pop(0), args, Path(folder)))
                wait([w.result for w in running], timeout=1.0)
                for worker in list(running):
                    result = collect(worker)
                    if result is not None:
                        running.remove(worker)
                        results.append(result)
                        print(line(result, len(results), len(projects)), flush=True)
        finally:
            for worker in running:
                worker.process.kill()
    return results


def start(context: Any, project: Project, args: argparse.Namespace, folder: Path) -> Worker:
    printed = folder / f"{len(list(folder.iterdir()))}.txt"
    printed.touch()
    receive, send = context.Pipe(duplex=False)
    precisions = tuple(p for p in project.precisions if not args.precision or p in args.precision)
    process = context.Process(target=work, args=(project.name, precisions, not args.fast, send, printed))
    process.start()
    send.close()
    return Worker(process, receive, project, time.monotonic() + project.timeout_s, printed)


def work(name: str, precisions: tuple[str, ...], callbacks: bool, send: Connection, printed: Path) -> None:
    """Run a project in a worker process. Its output goes to a file; if the worker dies, its last arm is known."""
    output = os.open(printed, os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    torch.set_num_threads(1)
    for logger in ("lightning.pytorch", "lightning.fabric", "transformers"):
        logging.getLogger(logger).setLevel(logging.ERROR)
    project = replace(all_projects()[name], precisions=precisions)
    result = judge(project, callbacks, tell=send.send)
    send.send(result)
    send.close()


def collect(worker: Worker) -> Result | None:
    """Return the outcome of a worker that has finished, died, or run out of time; `None` if it still runs."""
    arm = "plain fp32"
    while worker.result.poll():
        try:
            message = worker.result.recv()
        except EOFError:
            worker.process.join()
            return failed(worker, arm, f"the process died with exit code {worker.process.exitcode}")
        if isinstance(message, Result):
            worker.process.join()
            return message
        arm = _last_arm[worker.project.name] = message
    if time.monotonic() > worker.deadline:
        worker.process.kill()
        worker.process.join()
        return failed(worker, arm, f"not finished after {worker.project.timeout_s:.0f} s")
    return None


_last_arm: dict[str, str] = {}


def failed(worker: Worker, arm: str, why: str) -> Result:
    project = worker.project
    arm = _last_arm.get(project.name, arm)
    print("\n".join(worker.printed.read_text(errors="replace").splitlines()[-15:]), file=sys.stderr)
    whose = OURS if arm.startswith("ours") else NOTE if arm.startswith("stock") else WRONG
    precision = next((p for p in PRECISIONS if p in arm), "fp32")
    finding = Finding(precision, whose, f"{why} in the arm {arm!r}")
    return Result(project.name, project.family, project.description, findings=[finding])


def line(result: Result, done: int, of: int) -> str:
    verdict = result.skipped and f"not run: {result.skipped}"
    verdict = verdict or "; ".join(str(f) for f in result.findings if f.whose != NOTE) or "ok"
    return f"[{done:3}/{of}] {result.family}: {result.project} ({result.seconds:.0f} s): {verdict}"


if __name__ == "__main__":
    sys.exit(main())
