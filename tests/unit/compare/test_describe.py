"""Settings as text: the same in every process, and another one for other settings."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from datetime import timedelta
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint, Timer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.profilers import AdvancedProfiler, SimpleProfiler
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy
from support import settings
from support.settings import WORDS, Plain, Slotted
from torch import nn

from lightning_amp import AmpPrecision, DynamicLossScaler, MetricComparison, ScaleMonitor
from lightning_amp.compare import _describe
from lightning_amp.compare._describe import describe, short, without_text


def trainer_settings(tmp: Path = Path("runs")) -> dict[str, list[Any]]:
    """By kind, what is passed to a Trainer; all differ, and each call makes new objects."""
    return {
        "callbacks": [
            EarlyStopping("x", patience=3), EarlyStopping("x", patience=4), EarlyStopping("y", patience=3),
            EarlyStopping("x", patience=3, mode="max"), LearningRateMonitor(), LearningRateMonitor("step"),
            Timer("00:01:00:00"), Timer("00:02:00:00"), ScaleMonitor(), ScaleMonitor(warn_below=0.5),
            MetricComparison(), MetricComparison(limit_batches=3),
        ],
        "checkpoints": [
            ModelCheckpoint(), ModelCheckpoint(monitor="x"), ModelCheckpoint(monitor="x", save_top_k=2),
            ModelCheckpoint(dirpath=tmp), ModelCheckpoint(train_time_interval=timedelta(minutes=1)),
        ],
        "loggers": [
            CSVLogger(tmp), CSVLogger(tmp, name="other"), CSVLogger(tmp / "else"), CSVLogger(tmp, version=3),
            TensorBoardLogger(tmp), TensorBoardLogger(tmp, log_graph=True),
        ],
        "profilers": [SimpleProfiler(), SimpleProfiler(extended=False), AdvancedProfiler()],
        "strategies": [
            DDPStrategy(), DDPStrategy(find_unused_parameters=True), DDPStrategy(timeout=timedelta(seconds=3)),
            FSDPStrategy(), FSDPStrategy(auto_wrap_policy={nn.Linear, nn.Conv2d, nn.GRU, nn.LSTM}),
        ],
        "plugins": [
            AmpPrecision("fp16"), AmpPrecision("bf16"), AmpPrecision("fp16", fp32_modules=["head"]),
            AmpPrecision("fp16", scaler=DynamicLossScaler(init_scale=256.0)), DynamicLossScaler(),
            DynamicLossScaler(init_scale=256.0), DynamicLossScaler(enabled=False), MixedPrecision("bf16-mixed", "cpu"),
        ],
    }  # fmt: skip


def all_settings() -> dict[str, list[Any]]:
    return settings.simple_settings() | trainer_settings()


KINDS = list(all_settings())


@pytest.mark.parametrize("kind", KINDS)
def test_other_settings_have_another_text(kind: str) -> None:
    texts = [describe(value) for value in all_settings()[kind]]
    assert len(set(texts)) == len(texts)


@pytest.mark.parametrize("kind", KINDS)
def test_equal_settings_have_the_same_text(kind: str) -> None:
    first, second = all_settings()[kind], all_settings()[kind]
    texts = [describe(value) for value in first]
    assert texts == [describe(value) for value in second]
    assert " at 0x" not in "".join(texts)
    assert without_text(first) == []


ELSEWHERE = """
import importlib, importlib.util, sys, types
support = sys.modules["support"] = types.ModuleType("support")
support.__path__ = [sys.argv[1]]  # without what its `__init__` imports
spec = importlib.util.spec_from_file_location("describe", sys.argv[2])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
print(*importlib.import_module("support.settings").write_all(module.describe), sep="\\n")
"""


def test_another_process_writes_the_same() -> None:
    """With other addresses, and another order of sets."""
    folder = Path(settings.__file__).parent
    command = [sys.executable, "-W", "ignore", "-c", ELSEWHERE, folder, _describe.__file__]
    environment = {**os.environ, "PYTHONHASHSEED": "17"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == settings.write_all(describe)


def test_neither_the_clock_nor_the_process_is_a_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loggers and checkpoints hold a token that fsspec makes of the process, and a profiler knows when it was made."""
    before = [describe(value) for values in trainer_settings().values() for value in values]
    monkeypatch.setattr(os, "getpid", lambda: 4711)
    for clock in ("time", "monotonic", "perf_counter"):
        now = getattr(time, clock)()
        monkeypatch.setattr(time, clock, functools.partial(float, now + 1000))
    assert [describe(value) for values in trainer_settings().values() for value in values] == before


def test_what_is_equal_in_python() -> None:
    assert describe({"a": 1, "b": {"c": 2, "d": 3}}) == describe({"b": {"d": 3, "c": 2}, "a": 1})
    assert describe({"a": 1}) == describe(OrderedDict(a=1))
    assert describe(set(WORDS)) == describe(frozenset(reversed(WORDS)))


def test_a_person_can_read_it() -> None:
    assert describe({"max_epochs": 3, "callbacks": [torch.float16, None]}) == (
        "{'callbacks': [torch.float16, None], 'max_epochs': 3}"
    )
    assert describe([nn.Linear, len]) == "[torch.nn.modules.linear.Linear, builtins.len]"
    assert describe(functools.partial(short, most=3)) == f"partial({short.__module__}.short, (), {{'most': 3}})"
    assert "AmpPrecision('fp16') (" in describe(AmpPrecision("fp16"))
    assert "\n" not in describe(nn.Sequential(nn.Linear(2, 3), nn.ReLU()))


def test_cycles_end_and_what_occurs_twice_is_none() -> None:
    loop: list[Any] = [1]
    loop.append(loop)
    assert describe(loop) == "[1, ...]"
    plain = Plain(1)
    plain.other = plain.method
    assert describe(plain) == "support.settings.Plain(other=support.settings.Plain.method of ..., size=1)"
    shared = Plain(1)
    assert describe([shared, shared]) == f"[{describe(shared)}, {describe(shared)}]"


def test_credentials_are_not_written() -> None:
    text = describe(Plain(1, fsspec.filesystem("memory", secret="hunter2")))
    assert text == "support.settings.Plain(other=fsspec.implementations.memory.MemoryFileSystem, size=1)"


def test_a_repr_that_fails() -> None:
    class Broken(Plain):
        def __repr__(self) -> str:
            raise RuntimeError("not yet")

    assert describe(Broken(1)).endswith("Broken(other=None, size=1)")


@pytest.mark.parametrize(
    "value",
    [torch.arange(2000.0), torch.ones(3, device="meta"), np.zeros((2, 3)), Slotted(1), threading.Lock(), object()],
)
def test_what_has_no_text_is_named(value: Any) -> None:
    kind = type(value).__name__
    assert without_text({"callbacks": [Plain(value), value]}) == [kind]
    assert " at 0x" not in describe(value)


def test_short() -> None:
    assert short("x" * 120) == "x" * 120
    long = [short("x" * 121 + end) for end in ("a", "b")]
    assert [len(text) for text in long] == [120, 120]
    assert long[0] != long[1]
