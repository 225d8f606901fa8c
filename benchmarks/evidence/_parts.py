"""The parts of the evidence, in the order in which they run. Each is a command."""

from __future__ import annotations

import importlib.util
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from typing_extensions import final

from benchmarks._machine import RESULTS, ROOT
from benchmarks.evidence._printed import as_it_is, in_a_block, results_of_tests

OUT, WORK = "{out}", "{work}"
"""Placeholders in a command: the folder of the results, and a folder that is removed after the part."""
_MOST_S = 500.0
HEADLINE_MINUTES = 5


@final
class Part(NamedTuple):
    """One part.

    Attributes:
        name: Its name in the file of records and on the page.
        arguments: Arguments of Python.
        estimated_s: Approximate seconds on an H200.
        results: Exit statuses of a part with a result; some commands end with 1 if they found a fault.
        read: Returns Markdown for the page from the folder with the output.
        missing: Why the part cannot run here; empty if it can.

    """

    name: str
    arguments: tuple[str, ...]
    estimated_s: float
    results: tuple[int, ...] = (0,)
    read: Callable[[Path], str] = in_a_block
    missing: str = ""

    @property
    def limit_s(self) -> float:
        """Return the seconds after which it is killed."""
        return max(self.estimated_s, min(3 * self.estimated_s, _MOST_S))

    def command(self, out: Path, work: Path) -> list[str]:
        """Return the command to run."""
        filled = [text.replace(OUT, str(out)).replace(WORK, str(work)) for text in self.arguments]
        return [sys.executable, *filled]

    def shown(self) -> str:
        """Return the command as a person types it."""
        folder = str(RESULTS.relative_to(ROOT))
        return shlex.join(["python", *(text.replace(OUT, folder) for text in self.arguments if WORK not in text)])


def parts(device_type: str, *, tiny: bool) -> list[Part]:
    """Return all parts.

    Args:
        device_type: `"cuda"`, or `"cpu"` in a rehearsal.
        tiny: A rehearsal with the smallest sizes, and with one file of the tests, which have no sizes.

    """
    small = ("--tiny", "--device", device_type) if tiny else ()
    return [
        *_tests(tiny),
        Part(
            "waits per step",
            ("-m", "tests.benchmarks.waits", *(["NAdam"] if tiny else [])),
            20.0 if tiny else 240.0,
            results=(0, 1),
            missing="" if _exists("tests.benchmarks.waits") else "this checkout has no `tests.benchmarks.waits`",
        ),
        Part("the optimizer step", ("-m", "tests.benchmarks.optimizer_phase", *small), 20.0),
        Part("the headline's first rows", _headline(small), 60.0 if tiny else 60.0 * HEADLINE_MINUTES + 30),
        Part(
            "precisions compared",
            ("-m", "benchmarks.evidence._comparison", *small, "--html", f"{OUT}/{comparison_page(tiny=tiny)}"),
            60.0 if tiny else 240.0,
            read=as_it_is,
        ),
        Part("the claims", _claims(small), 60.0 if tiny else 240.0, results=(0, 1)),
        Part("the doctor", ("-m", "benchmarks.evidence._doctor", *small), 30.0 if tiny else 90.0),
    ]


def comparison_page(*, tiny: bool) -> str:
    """Return the file name of the comparison page."""
    return "rehearsal_comparison.html" if tiny else "gpu_comparison.html"


def _tests(tiny: bool) -> Iterator[Part]:
    files = sorted((ROOT / "tests" / "gpu").glob("test_*.py"))
    slow = {"test_cuda_comparison": 60.0, "test_cuda_doctor": 90.0, "test_cuda_fp8": 150.0, "test_cuda_fsdp": 90.0}
    for file in files[:1] if tiny else files:
        options = ("-v", "-p", "no:cacheprovider", "--tb=short", f"--junitxml={WORK}/results.xml")
        command = ("-m", "pytest", str(file.relative_to(ROOT)), *options)
        yield Part(f"tests: {file.name}", command, slow.get(file.stem, 30.0), results=(0, 1), read=results_of_tests)


def _headline(small: tuple[str, ...]) -> tuple[str, ...]:
    """Return the command for the rows that fit into some minutes; in a rehearsal, for three runs."""
    command = ("-m", "benchmarks.headline", "--limit-minutes", str(HEADLINE_MINUTES), "--out", f"{OUT}/headline.json")
    return (*command, *small, "--only", "resnet50", "--arms", "bf16,lightning_fp16") if small else command


def _claims(small: tuple[str, ...]) -> tuple[str, ...]:
    """Return the command for all claims; in a rehearsal, for two."""
    command = ("-m", "benchmarks.claims", "--out", OUT)
    return (*command, *small, "--only", "clipping,bad_batch") if small else command


def _exists(module: str) -> bool:
    return importlib.util.find_spec(module) is not None
