"""If a pretended device cannot be built, tests print one line and no error. The package does not know the device."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from pretended import MISSING, MISSING_OF_ANOTHER_TYPE, build

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LIGHTNING_AMP_TEST_CACHE", str(tmp_path))
    return tmp_path


cpu_torch = pytest.mark.skipif(torch.version.cuda is not None, reason="the device is compiled for a CPU-only torch")


@cpu_torch
def test_no_compiler_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert build.build("cuda") == "there is no C++ compiler (no-such-compiler)"


@cpu_torch
def test_headers_that_are_different_are_one_line_and_leave_nothing(
    empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\necho 'device.cpp:12: error: no member named x' >&2\necho more >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    reason = build.build("cuda")
    assert reason == f"torch {torch.__version__} does not compile it: device.cpp:12: error: no member named x"
    assert not build.compiled("cuda", torch.__version__).exists()


def test_another_torch_and_another_source_have_another_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = build.compiled("cuda", torch.__version__)
    assert build.compiled("cuda", "2.0") != here != build.compiled("pretended", torch.__version__)
    other = tmp_path / "device.cpp"
    other.write_text("// another")
    monkeypatch.setattr(build, "SOURCE", other)
    assert build.compiled("cuda", torch.__version__) != here


@pytest.mark.slow
def test_without_it_the_tests_are_skipped_with_the_reason() -> None:
    environment = {
        **{k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "LIGHTNING_AMP_TEST_DEVICE"))},
        "LIGHTNING_AMP_PRETEND": "cuda",
        "PYTHONPATH": str(REPOSITORY / "tests" / "pretended" / "site"),
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-n0",
        "-p",
        "no:cacheprovider",
        "tests/promises/test_fp32_modules.py",
    ]
    ran = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-2000:]
    assert "it is not compiled: python tests/pretended/build.py" in ran.stdout
    assert "passed" not in ran.stdout


def test_the_package_does_not_know_of_it() -> None:
    files = (REPOSITORY / "lightning_amp").rglob("*.py")
    assert [path for path in files if "LIGHTNING_AMP_PRETEND" in path.read_text(encoding="utf-8")] == []


def test_needs_are_named_once() -> None:
    assert not set(MISSING) & set(MISSING_OF_ANOTHER_TYPE)
