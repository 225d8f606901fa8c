"""The GPU tests and the benchmarks run where only torch, Lightning and pytest are installed.

A machine lent for an hour has nothing else. The package itself is imported from the checkout and need not be installed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
INSTALLED = ("torch", "lightning", "torchmetrics", "pytest")


def link_distribution(name: str, folder: Path, linked: set[str]) -> None:
    """Link a distribution and its requirements into a folder that serves as site-packages."""
    if name in linked:
        return
    linked.add(name)
    try:
        installed = distribution(name)
    except PackageNotFoundError:  # an optional requirement that is not installed here
        return
    for top in {file.parts[0] for file in installed.files or []} - {"..", "__pycache__"}:
        if not (folder / top).exists():
            (folder / top).symlink_to(str(installed.locate_file(top)))
    for requirement in map(Requirement, installed.requires or []):
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            link_distribution(requirement.name, folder, linked)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the environment of a Python started with `-S` that sees only the packages in `INSTALLED`."""
    folder = tmp_path_factory.mktemp("site-packages")
    linked: set[str] = set()
    for name in INSTALLED:
        link_distribution(name, folder, linked)
    assert not linked & {"hypothesis", "lightning-amp", "matplotlib", "pytest-timeout", "pytest-xdist", "tensorboard"}
    of_pytest = {"PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT"}
    return {**{k: v for k, v in os.environ.items() if k not in of_pytest}, "PYTHONPATH": str(folder)}


def run(environment: dict[str, str], folder: Path, *arguments: str) -> str:
    command = [sys.executable, "-S", *arguments]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=200, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_tests_for_gpus_are_collected(environment: dict[str, str], tmp_path: Path) -> None:
    options = ["--collect-only", "--quiet", "-p", "no:cacheprovider"]
    printed = run(environment, tmp_path, "-m", "pytest", str(ROOT / "tests" / "gpu"), *options)
    collected = {Path(line.partition("::")[0]).name for line in printed.splitlines() if "::" in line}
    assert collected == {path.name for path in (ROOT / "tests" / "gpu").glob("test_*.py")}


@pytest.mark.slow
def test_the_benchmarks_can_be_started(environment: dict[str, str]) -> None:
    modules = [f"tests.benchmarks.{path.stem}" for path in (ROOT / "tests" / "benchmarks").glob("[!_]*.py")]
    code = f"import importlib\nfor name in {modules!r}: print(importlib.import_module(name).main.__module__)"
    assert run(environment, ROOT, "-c", code).split() == modules != []


def test_the_process_that_hands_out_the_tests_needs_no_torch() -> None:
    """Yield while the test workers wait, so that the subprocess has the machine to itself."""
    code = "import sys, conftest; print(*{'torch', 'lightning', 'lightning_amp', 'support'} & set(sys.modules))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), str(ROOT)])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "\n"
