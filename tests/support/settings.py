"""Settings of all kinds in Python and torch."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn


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
