from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict, UserList, defaultdict
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from lightning_amp._containers import replace, tensors_in, to_fp32
from lightning_amp.numerics import HALF_DTYPES


class Pair(NamedTuple):
    a: Any
    b: Any


@dataclasses.dataclass
class Plain:
    logits: Any
    text: str = "x"


@dataclasses.dataclass(frozen=True)
class Frozen:
    logits: Any
    inner: Any = None


class ModelOutput(OrderedDict):  # as in transformers: keys are attributes too
    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)


def tensors(data: Any) -> list[Tensor]:
    if isinstance(data, Tensor):
        return [data]
    if dataclasses.is_dataclass(data):
        return tensors([getattr(data, f.name) for f in dataclasses.fields(data)])
    items = data if isinstance(data, (list, tuple, UserList)) else data.values() if hasattr(data, "values") else ()
    return [tensor for item in items for tensor in tensors(item)]


def half(dtype: torch.dtype) -> Tensor:
    return torch.tensor([1.0, 2.5], dtype=dtype)


CONTAINERS: dict[str, Any] = {
    "tensor": lambda x: x,
    "list": lambda x: [x, "text", None],
    "tuple": lambda x: (x, 3),
    "named tuple": lambda x: Pair(x, [x]),
    "max": lambda x: torch.max(x[None], dim=1),
    "dict": lambda x: {"a": x, "b": {"c": [x]}},
    "default dict": lambda x: defaultdict(list, {"a": [x]}),
    "ordered dict": lambda x: OrderedDict(a=x),
    "model output": lambda x: ModelOutput(logits=x, past=(x, x)),
    "user dict": lambda x: UserDict(a=x),
    "dataclass": Plain,
    "frozen dataclass": lambda x: Frozen({"a": x}, Plain(x)),
    "user list": lambda x: UserList([x]),
    "read-only mapping": lambda x: MappingProxyType({"a": x, "b": 1}),
    "packed": lambda x: nn.utils.rnn.pack_sequence([x]),
}


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("name", CONTAINERS)
def test_every_container(name: str, dtype: torch.dtype) -> None:
    data = CONTAINERS[name](half(dtype))
    result = to_fp32(data, HALF_DTYPES)
    assert type(result) is type(data)
    kinds = {t.dtype for t in tensors(result) if t.is_floating_point()}
    assert kinds == {torch.float32}
    assert {t.dtype for t in tensors(data) if t.is_floating_point()} == {dtype}  # the user's object did not change
    if name == "model output":
        assert result.logits is result["logits"]
    if name == "dataclass":
        assert result.text == "x"
    if name == "default dict":
        assert result.default_factory is list


@pytest.mark.parametrize("name", CONTAINERS)
def test_what_needs_no_cast_is_the_same_object(name: str) -> None:
    data = CONTAINERS[name](torch.ones(2))
    assert to_fp32(data, HALF_DTYPES) is data


@pytest.mark.parametrize("data", [None, 1.0, "text", torch.ones(2, dtype=torch.float64), torch.ones(2).int(), Plain])
def test_what_is_left_alone(data: Any) -> None:
    assert to_fp32(data, HALF_DTYPES) is data


def test_gradients_pass() -> None:
    x = half(torch.bfloat16).requires_grad_()
    to_fp32([x], HALF_DTYPES)[0].sum().backward()
    assert x.grad.dtype == torch.bfloat16


def test_what_is_replaced_is_not_looked_into() -> None:
    pair = Pair(1, 2)
    seen: list[Any] = []

    def function(value: Any) -> Any:
        seen.append(value)
        return "new" if value is pair else value

    assert replace({"a": [pair, 3]}, function) == {"a": ["new", 3]}
    assert seen[2:] == [pair, 3]


def test_paths_of_tensors() -> None:
    class Graph:
        def __init__(self) -> None:
            self.x, self.names, self.nodes = torch.zeros(1), ["a"], [torch.zeros(1)]

    data = [torch.zeros(1), {"a": (torch.arange(2), "text")}, Graph(), nn.Linear(1, 1), None]
    assert [path for path, _ in tensors_in(data)] == ["[0]", "[1]['a'][0]", "[2].x"]
