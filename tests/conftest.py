"""Give every test quiet threads, a fixed seed, and the device to run on.

Nothing here imports torch or Lightning before a test needs it. The process that hands out the tests does not use them,
and the workers would wait for its imports.

`LIGHTNING_AMP_TEST_DEVICE=cuda pytest` runs the tests that take `device` or `accelerator` on a GPU.
`make test-device` runs only these tests, on a pretended device: `tests/pretended`.
`LIGHTNING_AMP_TEST_MACHINE=bf16-slow pytest` runs them on another CPU of `support/machines.py`.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import math
import os
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

# Idle OpenMP threads sleep, so that tests stay fast on a busy machine. torch reads this when it is imported, and
# subprocesses inherit it.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("KMP_BLOCKTIME", "0")

import pytest

if TYPE_CHECKING:
    import torch

import pretended

if pretended.KIND:
    os.environ["LIGHTNING_AMP_TEST_DEVICE"] = pretended.KIND
DEVICE = os.environ.get("LIGHTNING_AMP_TEST_DEVICE", "cpu")
ACCELERATOR = DEVICE.partition(":")[0]
if ACCELERATOR not in {"cpu", "cuda", pretended.KIND}:
    raise ValueError(f"`LIGHTNING_AMP_TEST_DEVICE` must be 'cpu' or 'cuda'; got {DEVICE!r}.")
_ON_DEVICE = {"device", "accelerator", "DEVICE", "assert_as_fp32", "evaluate", "fit", "quiet_trainer", "promise"}
"""Fixtures, and functions of `support`, that put tensors on the device."""
_MOST_CASES = {"cuda": 2, "pretended": 1}
"""How many cases of one parametrized test run on a pretended device; `LIGHTNING_AMP_PRETEND_ALL=1` runs all."""


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Accept pytest-timeout's option where it is not installed: `tests/gpu` needs nothing but pytest."""
    if not pluginmanager.hasplugin("timeout"):
        parser.addini("timeout", "Has no effect without pytest-timeout.")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give each worker tests that stand together, because they share fixtures, references and imports.

    A worker that has finished takes half of what another has left. `-n` alone deals the tests out one by one.
    """
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log) if config.getoption("dist") == "load" else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the cases beyond `few` as slow, and skip tests that this device does not run."""
    for every in _cases_of_each(items):
        if mark := every[0].get_closest_marker("few"):
            quick = set(_spread(every, mark.args[0]))
            for item in every:
                if item not in quick:
                    item.add_marker(pytest.mark.slow)
    legal = {*pretended.MISSING, *pretended.MISSING_OF_ANOTHER_TYPE}
    for item in items:
        if unknown := set(_needs(item)) - legal:
            raise pytest.UsageError(f"{item.nodeid} needs {unknown.pop()!r}; legal are {', '.join(sorted(legal))}")
    if ACCELERATOR == "cpu":
        return
    wanted = [item for item in items if item.get_closest_marker("cpu") is None]
    if pretended.KIND and not os.environ.get("LIGHTNING_AMP_PRETEND_ALL"):
        wanted = list(_some_of_each([item for item in wanted if _uses_a_device(item)]))
    kept = set(wanted)
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = wanted
    reason = pretended.why_not() if pretended.KIND else ""
    lacks = pretended.what_it_lacks()
    for item in items if pretended.KIND else ():
        if reason:
            item.add_marker(pytest.mark.skip(reason=f"no pretended device: {reason}"))
        elif needs := [lacks[need] for need in _needs(item) if need in lacks]:
            item.add_marker(pytest.mark.skip(reason=f"the pretended device lacks {needs[0]}"))


def _needs(item: pytest.Item) -> list[str]:
    return [need for mark in item.iter_markers("needs") for need in mark.args]


def _uses_a_device(item: pytest.Item) -> bool:
    """Return whether a test runs on the device: by a fixture, or by what its module imports from `support`."""
    fixtures: tuple[str, ...] = getattr(item, "fixturenames", ())
    names: Mapping[str, Any] = vars(getattr(item, "module", None) or object)
    return (
        not _ON_DEVICE.isdisjoint(fixtures) or not _ON_DEVICE.isdisjoint(names) or "gpu" in item.path.parts
    )  # fmt: skip


def _some_of_each(items: list[pytest.Item]) -> Iterator[pytest.Item]:
    """Yield each test, but only some evenly spread cases of a large parametrized one: all would take minutes."""
    for every in _cases_of_each(items):
        quick = [item for item in every if item.get_closest_marker("slow") is None]
        yield from _spread(quick or every, _MOST_CASES[ACCELERATOR])


def _cases_of_each(items: list[pytest.Item]) -> Iterator[list[pytest.Item]]:
    """Yield the cases of each test."""
    for _, cases in groupby(items, key=lambda item: item.nodeid.partition("[")[0]):
        yield list(cases)


def _spread(every: list[pytest.Item], most: int) -> list[pytest.Item]:
    """Return evenly spread cases.

    The step has no divisor in common with their number. So it meets all values of each parameter.
    """
    step = -(-len(every) // most)
    while math.gcd(step, len(every)) > 1 and step < len(every):
        step += 1
    return every[::step]


def pytest_collection_finish() -> None:
    """Keep garbage collections from walking through modules and thousands of tests, which live until the end.

    Each such walk takes a third of a second, and tests of memory or weak references collect often.
    """
    if "lightning.pytorch" in sys.modules:
        importlib.import_module("support.trainers")  # this halves the time that each Trainer takes
    gc.collect()
    gc.freeze()


def pytest_runtest_setup() -> None:
    """Seed each test, so that its outcome does not depend on earlier tests, and give it one thread.

    The models are tiny, so a second thread only costs the time to wake it. (DDP sets another number.) This is a hook
    because hypothesis refuses function-scoped fixtures.
    """
    import numpy as np
    import torch

    _move_to_the_machine()
    torch.set_num_threads(1)
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Return the device of the test's tensors."""
    import torch

    return torch.device(DEVICE)


@pytest.fixture(scope="session")
def accelerator() -> str:
    """Return the `accelerator` argument of the Trainer."""
    return ACCELERATOR


@cache
def _move_to_the_machine() -> None:
    """Let the package see the same CPU on every machine, before the first test."""
    from support import machines

    machines.move_to(machines.NAME)


@pytest.fixture
def on_machine() -> Iterator[Callable[[str], None]]:
    """Return a function that moves the test to one of `support.machines.MACHINES`, or to the `real` machine."""
    from support import machines

    yield machines.move_to
    machines.move_to(machines.NAME)


@pytest.fixture(params=["bf16-fast", "bf16-slow", "fp16-native", "amd", "arm", "none"])
def machine(request: pytest.FixtureRequest, on_machine: Callable[[str], None]) -> str:
    """Run the test on each kind of CPU."""
    on_machine(request.param)
    return request.param


@pytest.fixture
def own_lstm() -> Iterator[None]:
    """Use torch's own LSTM kernels, because oneDNN's do not run in half precision on every CPU."""
    import torch

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="TF32 acceleration on top of oneDNN")
        flags = torch.backends.mkldnn.flags(enabled=False)
        flags.__enter__()
    yield
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="TF32 acceleration on top of oneDNN")
        flags.__exit__(None, None, None)


@pytest.fixture
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make an empty folder the current directory, for code that writes there."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def weights_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load every checkpoint with `weights_only=True`; Lightning 2.5 has no argument for it."""
    monkeypatch.setenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "1")


@pytest.fixture
def memory_folder() -> Iterator[str]:
    """Return the URL of a folder that does not exist yet and is written in place."""
    from fsspec.implementations.memory import MemoryFileSystem

    yield "memory://runs/1"
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


@pytest.fixture
def bucket_folder() -> Iterator[str]:
    """Return the URL of a folder in a bucket; `Bucket.failure` lets an upload fail."""
    from support.stores import Bucket

    Bucket.failure = None
    yield "test-bucket://bucket/run"
    Bucket.objects.clear()
    Bucket.failure = None


@pytest.fixture(params=["memory_folder", "bucket_folder"])
def folder_url(request: pytest.FixtureRequest) -> str:
    """Return the URL of a folder of each kind."""
    return request.getfixturevalue(request.param)


@pytest.fixture(params=[False, True], ids=["flags on the host", "flags on a device"])
def where_flags_live(request: pytest.FixtureRequest) -> Iterator[None]:
    """Decide about a step both ways: at once, as on the CPU, and without asking the device, as on a GPU."""
    from support import flags_on_a_device

    with flags_on_a_device() if request.param else contextlib.nullcontext():
        yield
