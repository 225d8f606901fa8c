"""Outputs of a step in whatever container, and what stands in for a method of a user's object."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from collections import OrderedDict, UserDict, defaultdict
from contextlib import contextmanager
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn

from lightning_amp._containers import to_fp32
from lightning_amp.casting._fp32_outputs import EpochEnd, Fp32Outputs
from lightning_amp.casting._method_override import Override

HALF = [torch.bfloat16, torch.float16]


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
    items = data if isinstance(data, (list, tuple)) else data.values() if hasattr(data, "values") else ()
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
    "packed": lambda x: nn.utils.rnn.pack_sequence([x]),
}


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("name", CONTAINERS)
def test_every_container(name: str, dtype: torch.dtype) -> None:
    data = CONTAINERS[name](half(dtype))
    result = to_fp32(data)
    assert type(result) is type(data)
    kinds = {t.dtype for t in tensors(result) if t.is_floating_point()}
    assert kinds == {torch.float32}
    assert {t.dtype for t in tensors(data) if t.is_floating_point()} == {dtype}  # the user's own is as it was
    if name == "model output":
        assert result.logits is result["logits"]
    if name == "dataclass":
        assert result.text == "x"
    if name == "default dict":
        assert result.default_factory is list


@pytest.mark.parametrize("name", CONTAINERS)
def test_what_needs_no_cast_is_the_same_object(name: str) -> None:
    data = CONTAINERS[name](torch.ones(2))
    assert to_fp32(data) is data


@pytest.mark.parametrize("data", [None, 1.0, "text", torch.ones(2, dtype=torch.float64), torch.ones(2).int(), Plain])
def test_what_is_left_alone(data: Any) -> None:
    assert to_fp32(data) is data


def test_gradients_pass() -> None:
    x = half(torch.bfloat16).requires_grad_()
    to_fp32([x])[0].sum().backward()
    assert x.grad.dtype == torch.bfloat16


class Model(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.seen: list[bool] = []

    def validation_step(self, batch: Tensor, batch_idx: int) -> Any:
        return {"out": self.layer(batch).bfloat16(), "self": id(self)}

    def on_validation_epoch_end(self) -> None:
        self.seen.append(torch.is_autocast_enabled("cpu"))


def test_outputs_of_a_step() -> None:
    module = Model()
    before = dict(vars(module))
    with Fp32Outputs(module, "validation_step"):
        assert module.validation_step(torch.ones(1, 2), 0)["out"].dtype == torch.float32
        assert list(inspect.signature(module.validation_step).parameters) == ["batch", "batch_idx"]
        assert is_overridden("validation_step", module)
    assert vars(module) == before
    with pytest.raises(KeyError, match="x"), Fp32Outputs(module, "validation_step"):
        raise KeyError("x")
    assert vars(module) == before


def test_an_attribute_that_was_there_comes_back() -> None:
    """`torch.compile(LightningModule)` puts compiled functions among the attributes."""
    module = Model()
    compiled = module.validation_step
    vars(module)["validation_step"] = compiled
    with Fp32Outputs(module, "validation_step"):
        assert vars(module)["validation_step"] is not compiled
    assert vars(module)["validation_step"] is compiled


def test_what_the_user_puts_there_in_the_meantime_stays() -> None:
    module, mine = Model(), lambda batch, batch_idx: None
    with Fp32Outputs(module, "validation_step"):
        module.validation_step = mine
    assert module.validation_step is mine


@pytest.mark.parametrize("make", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
@pytest.mark.parametrize("was_attribute", [False, True])
def test_copies_call_themselves(make: Any, was_attribute: bool) -> None:
    module = Model()
    if was_attribute:
        vars(module)["validation_step"] = module.validation_step
    with Fp32Outputs(module, "validation_step"):
        other = make(module)
    assert other.validation_step(torch.ones(1, 2), 0)["self"] == id(other)
    assert other.validation_step(torch.ones(1, 2), 0)["out"].dtype == torch.bfloat16
    assert not any(isinstance(value, Override) for value in vars(other).values())
    assert make(other).validation_step(torch.ones(1, 2), 0)["self"] != id(other)


def test_epoch_end_runs_once_in_its_context() -> None:
    module = Model()
    before, entered = set(vars(module)), []

    @contextmanager
    def context() -> Any:
        entered.append(True)
        with torch.autocast("cpu", torch.bfloat16):
            yield

    EpochEnd(module, "on_validation_epoch_end", context).install()
    assert is_overridden("on_validation_epoch_end", module)
    module.on_validation_epoch_end()
    assert set(vars(module)) == before
    module.on_validation_epoch_end()
    assert module.seen == [True, False]
    assert len(entered) == 1
