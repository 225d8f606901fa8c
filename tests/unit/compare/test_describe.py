"""Settings as text: the same in every process, and another text for other settings."""

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
from support.settings import WORDS, Plain, Slotted, simple_settings
from torch import nn

from lightning_amp import AmpPrecision, DynamicLossScaler, MetricComparison, ScaleMonitor
from lightning_amp._text import literal
from lightning_amp.compare._describe import Identity


def identity(value: Any) -> str:
    return Identity().of(value)


def without_identity(value: Any) -> list[str]:
    writer = Identity()
    writer.of(value)
    return list(dict.fromkeys(writer.unknown))


def trainer_settings(tmp: Path = Path("runs")) -> dict[str, list[Any]]:
    """Arguments of a Trainer by kind. All differ, and each call makes new objects."""
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
    return simple_settings() | trainer_settings()


@pytest.mark.parametrize("kind", list(all_settings()))
def test_a_setting_has_one_text_and_another_setting_another(kind: str) -> None:
    first, second = all_settings()[kind], all_settings()[kind]
    texts = [identity(value) for value in first]
    assert len(set(texts)) == len(texts)
    assert texts == [identity(value) for value in second]
    assert " at 0x" not in "".join(texts)
    assert without_identity(first) == []


ELSEWHERE = """
from lightning_amp.compare._describe import Identity
from support.settings import simple_settings
print(*[Identity().of(value) for values in simple_settings().values() for value in values], sep="\\n")
"""


@pytest.mark.slow
def test_another_process_writes_the_same() -> None:
    """It has other addresses, and another order of sets."""
    environment = {**os.environ, "PYTHONHASHSEED": "17", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-W", "ignore", "-c", ELSEWHERE]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [identity(value) for values in simple_settings().values() for value in values]


def test_neither_the_clock_nor_the_process_is_a_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loggers and checkpoints hold a token that fsspec makes of the process. A profiler holds its time of creation."""
    before = [identity(value) for values in trainer_settings().values() for value in values]
    monkeypatch.setattr(os, "getpid", lambda: 4711)
    for clock in ("time", "monotonic", "perf_counter"):
        now = getattr(time, clock)()
        monkeypatch.setattr(time, clock, functools.partial(float, now + 1000))
    assert [identity(value) for values in trainer_settings().values() for value in values] == before


def test_values_that_are_equal_in_python() -> None:
    assert identity({"a": 1, "b": {"c": 2, "d": 3}}) == identity({"b": {"d": 3, "c": 2}, "a": 1})
    assert identity({"a": 1}) == identity(OrderedDict(a=1))
    assert identity(set(WORDS)) == identity(frozenset(reversed(WORDS)))


def test_cycles_end_and_a_value_may_occur_twice() -> None:
    loop: list[Any] = [1]
    loop.append(loop)
    assert identity(loop) == "[1, ...]"
    plain = Plain(1)
    plain.other = plain.method
    assert identity(plain).count("...") == 1
    shared = Plain(1)
    assert identity([shared, shared]) == f"[{identity(shared)}, {identity(shared)}]"


def test_credentials_are_not_written() -> None:
    assert "hunter2" not in identity(Plain(1, fsspec.filesystem("memory", secret="hunter2")))


@pytest.mark.parametrize(
    "value",
    [torch.arange(2000.0), torch.ones(3, device="meta"), np.zeros((2, 3)), Slotted(1), threading.Lock(), object()],
)
def test_types_without_an_identity_are_named(value: Any) -> None:
    assert without_identity({"callbacks": [Plain(value), value]}) == [type(value).__name__]
    assert " at 0x" not in identity(value)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"max_epochs": 3, "precision": torch.float16}, "{'max_epochs': 3, 'precision': torch.float16}"),
        ([nn.Linear, int, test_credentials_are_not_written], "[Linear, int, test_credentials_are_not_written]"),
        (EarlyStopping("x"), "EarlyStopping"),
        ([ModelCheckpoint()], "[ModelCheckpoint]"),
        (AmpPrecision("fp16"), "AmpPrecision('fp16')"),
        (nn.Sequential(nn.ReLU()), "Sequential( (0): ReLU() )"),
        ("x" * 200, "'" + "x" * 116 + "..."),
    ],
)
def test_a_person_can_read_it(value: Any, text: str) -> None:
    assert literal(value) == text


def width(number: int) -> Any:
    return lambda: number


def test_lambdas_differ_by_what_they_do() -> None:
    assert identity(width(3)) == identity(width(3)) != identity(width(4))
    assert identity(lambda: Plain(3)) != identity(lambda: Plain(4))
    assert without_identity(width(threading.Lock())) == ["lock"]
