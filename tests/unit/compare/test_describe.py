"""Settings as text: the same in every process, and another text for other settings."""

from __future__ import annotations

import functools
import math
import os
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum
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
from torch import nn

from lightning_amp import AmpPrecision, DynamicLossScaler, MetricComparison, ScaleMonitor
from lightning_amp._text import literal
from lightning_amp.compare._describe import Identity


class Colour(Enum):
    RED = 1
    BLUE = 2


@dataclass
class Options:
    names: set[str] = field(default_factory=set)
    hidden: int = field(default=0, repr=False)


class Plain:
    def __init__(self, size: int, other: Any = None) -> None:
        self.size, self.other = size, other

    def method(self) -> None: ...


class Slotted:
    __slots__ = ("size", "unset")

    def __init__(self, size: int) -> None:
        self.size = size


class Policy(Plain):
    """An object whose `repr` shows a set, like an FSDP policy."""

    def __repr__(self) -> str:
        return f"Policy(size={self.size}, names={self.other})"


class Silent(nn.Module):
    """A module whose `repr` shows none of its settings."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate


def function(value: Any = None, most: int = 1) -> None: ...


WORDS = ("one", "two", "three", "four", "five", "six", "seven")


def simple_settings() -> dict[str, list[Any]]:
    """Return different settings by kind. Each call makes new objects, which equal the objects of other calls."""
    base = torch.arange(6.0)
    return {
        "scalars": [None, True, 1, 1.0, "1", b"1", "None", 1j, math.nan, math.inf, -0.0, 0.0, 2**70],
        "dtypes": [torch.float32, torch.bfloat16, "torch.float32", torch.device("cpu"), torch.device("cuda", 1), "cpu"],
        "containers": [[], (), {}, set(), [1, 2], [2, 1], (1, 2), {1: 2}, {1, 2}, [[1], 2], [[1, 2]], (1,), [None]],
        "strings": [["a, b"], ["a", "b"], "['a', 'b']", {"a": "b"}, {"a: b"}],
        "sets": [set(WORDS), frozenset(WORDS[1:]), {"x": set(WORDS[2:])}],
        "paths": [Path("a b"), Path("a  b"), "a b"],
        "enums": [Colour.RED, Colour.BLUE, "RED"],
        "times": [timedelta(seconds=3), timedelta(seconds=4), 3.0],
        "dataclasses": [Options(), Options(set(WORDS)), Options(set(WORDS[1:])), Options(hidden=1)],
        "objects": [
            Plain(1), Plain(2), Plain(1, Plain(1)), Plain(1, Plain(2)), Plain,
            Policy(1, set(WORDS)), Policy(1, set(WORDS[1:])),
        ],
        "functions": [len, math.sqrt, torch.relu, function, Plain.method, Plain(1).method, Plain(2).method, "len"],
        "partials": [
            functools.partial(function), functools.partial(function, 1), functools.partial(function, value=1),
            functools.partial(function, value=2), functools.partial(len, value=2), function,
        ],
        "tensors": [
            base, base + 1, base.double(), base.reshape(2, 3), base.reshape(3, 2), base[:0], base[1], base.bool(),
            torch.complex(base, base), torch.complex(base, base).conj(), nn.Parameter(base + 7), torch.tensor(math.nan),
        ],
        "numbers of numpy": [np.float32(0.1), np.float64(0.1), np.int64(3)],
        "modules": [Silent(0.1), Silent(0.2), nn.Dropout(0.1), nn.Dropout(0.2), nn.Sequential(Silent(0.1))],
    }  # fmt: skip


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


def texts() -> list[str]:
    return [identity(value) for values in simple_settings().values() for value in values]


ELSEWHERE = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location(*sys.argv[1:])
sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
print(*module.texts(), sep="\\n")
"""


@pytest.mark.slow
def test_another_process_writes_the_same() -> None:
    """It has other addresses, and another order of sets."""
    environment = {**os.environ, "PYTHONHASHSEED": "17", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-W", "ignore", "-c", ELSEWHERE, __name__, __file__]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == texts()


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
