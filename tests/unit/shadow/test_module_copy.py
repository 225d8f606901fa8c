"""A copy of a module or batch shares only what is large or useless as a copy."""

from __future__ import annotations

import functools
import threading
import types
import weakref
from typing import Any, NamedTuple

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from zoo.copies import Module, Tracker, copied

from lightning_amp.shadow._module_copy import NotCopiedError, copy_batch, copy_module


class Graphs:
    """A batch of its own class, like the batches of graph libraries."""

    def __init__(self, x: Tensor) -> None:
        self.store = {"x": x, "itself": self}


class Point(NamedTuple):
    x: Any
    y: Any


def test_what_is_shared_and_what_is_copied() -> None:
    module: Any = Module()
    module.tracker = Tracker()
    nested: dict[str, Any] = {"lock": threading.Lock(), "values": []}
    module.nested = nested
    module.deep = [{"generator": (i for i in range(3))}]
    module.generator = torch.Generator().manual_seed(1)
    module.data = TensorDataset(torch.zeros(2))
    module.non_leaf = module.net[0].weight * 2
    module.teacher = [nn.Linear(2, 2)]
    module.teacher[0].pupil = [module]
    module.method = module.values.append
    module.bound = module.configure_optimizers
    module.partial = functools.partial(Module.print, module)
    module.net[0].parent = [module]
    copy = copied(module)
    assert copy.net[0].weight is not module.net[0].weight
    assert torch.equal(copy.net[0].weight, module.net[0].weight)
    assert copy.net[1].running_mean is not module.net[1].running_mean
    assert copy.tracker.lock is module.tracker.lock
    assert copy.tracker.values is not module.tracker.values
    assert copy.nested["values"] is not module.nested["values"]
    assert copy.data is module.data
    assert not torch.equal(torch.rand(1, generator=copy.generator), torch.rand(1, generator=None))
    assert torch.equal(module.generator.get_state(), torch.Generator().manual_seed(1).get_state())
    assert torch.equal(copy.non_leaf, module.non_leaf)
    assert copy.non_leaf is not module.non_leaf
    assert copy.teacher[0] is not module.teacher[0]
    assert torch.equal(copy.teacher[0].weight, module.teacher[0].weight)
    assert copy.teacher[0].pupil == [copy]
    assert copy.bound.__self__ is copy
    assert copy.partial.args == (copy,)
    assert copy.net[0].parent[0] is copy
    assert {id(m) for m in copy.modules()}.isdisjoint({id(m) for m in module.modules()})
    with pytest.raises(NotCopiedError, match=r"`Module\.deep` cannot be copied"):
        next(copy.deep[0]["generator"])
    assert list(module.deep[0]["generator"]) == [0, 1, 2]


def test_a_failed_copy_leaves_no_half_filled_objects() -> None:
    module: Any = Module()
    values = [1.0, 2.0]
    unlucky: list[Any] = [values, threading.Lock(), 3.0]
    module.first = module.second = unlucky
    copy: Any = copied(module)
    assert copy.first[0] == [1.0, 2.0]
    assert copy.first[2] == 3.0
    assert copy.second is copy.first
    assert copy.first[0] is not values


def test_weak_proxies_events_streams_and_imported_modules_are_shared(device: torch.device) -> None:
    module: Any = Module()
    module.profiled, module.numpy = [weakref.proxy(module)], np
    module.event, module.stream = torch.Event(device.type), torch.Stream(device.type)
    copy: Any = copied(module)
    assert copy.profiled[0] is module.profiled[0]
    assert copy.numpy is np
    assert copy.event is module.event
    assert copy.stream is module.stream


def test_half_precision_is_upcast_on_demand() -> None:
    module: Any = Module()
    module.net[0].bfloat16()
    module.again = module.net[0].weight  # another name for it
    module.net[1].half()
    copy: Any = copy_module(module, {}, upcast=True)
    assert {value.dtype for value in copy.state_dict().values()} == {torch.float32, torch.int64}
    assert copy.net[0].weight is copy.again
    assert torch.equal(copy.net[0].weight, module.net[0].weight.float())
    assert module.net[0].weight.dtype == torch.bfloat16
    assert module.net[1].running_mean.dtype == torch.float16
    assert copied(module).net[0].weight.dtype == torch.bfloat16


def test_half_precision_batches_are_upcast_however_deep() -> None:
    x = torch.ones(2, dtype=torch.bfloat16, requires_grad=True)
    batch = {"list": [x, (x, 1)], "point": Point(x, 1), "graph": Graphs(x), "index": torch.arange(2), "name": "a"}
    copy = copy_batch(batch, upcast=True)
    assert copy["list"][0].dtype == torch.float32
    assert copy["list"][0].requires_grad
    assert copy["list"][1][0] is copy["list"][0] is copy["point"][0]
    assert isinstance(copy["point"], Point)
    assert copy["graph"].store["x"].dtype == torch.float32
    assert copy["graph"].store["itself"] is copy["graph"]
    assert copy["index"].dtype == torch.int64
    assert x.dtype == batch["graph"].store["x"].dtype == torch.bfloat16  # type: ignore[attr-defined]


def test_forward_redirection_of_ddp_is_rebound() -> None:
    # Lightning's DDP leaves the bound `forward` of the module as an attribute on it.
    module = Module()
    module.forward = types.MethodType(lambda self, x: self, module)  # type: ignore[method-assign]
    copy = copied(module)
    assert copy(torch.zeros(1)) is copy


@pytest.mark.parametrize("how", ["submodule", "in place", "lightning module"])
def test_compiled_modules_are_copied_uncompiled(how: str) -> None:
    calls: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        calls.append(1)
        return graph.forward

    module: Any = Module()
    if how == "submodule":
        module.net = torch.compile(module.net, backend=backend)
    elif how == "in place":
        module.net.compile(backend=backend)
    else:
        from lightning.pytorch.utilities.compile import from_compiled

        module.forward = module.net.forward
        module = from_compiled(torch.compile(module, backend=backend))  # type: ignore[arg-type]
    copy = copied(module)
    assert copy.forward is not module.forward
    copy.net(torch.randn(3, 2))
    assert calls == []
    assert copy.training_step.__self__ is copy
    assert torch.equal(next(copy.parameters()), next(module.parameters()))
    assert torch.equal(next(module.buffers()), torch.zeros(2))


def test_buffers_can_be_used_with_gradients_in_a_validation() -> None:
    module = Module()
    with torch.inference_mode():
        copy = copied(module)
    copy.eval()
    x = torch.randn(3, 2, requires_grad=True)
    copy.net(x).sum().backward()  # BatchNorm saves its statistics for the backward, which must be ordinary tensors
    assert x.grad is not None


def test_recurrent_layers_keep_their_weights() -> None:
    class Recurrent(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.LSTM(2, 3)

    module = Recurrent()
    copy, x = copied(module), torch.randn(4, 1, 2)
    assert torch.equal(copy.rnn(x)[0], module.rnn(x)[0])
    with torch.no_grad():
        copy.rnn.weight_hh_l0.mul_(2)
    assert not torch.equal(copy.rnn(x)[0], module.rnn(x)[0])


def test_batches_are_copied_deep_but_not_their_storage() -> None:
    storage = torch.arange(1000.0)
    shared = storage[3:5]
    batch = {"x": shared, "again": [shared], "names": ["a"], "array": np.zeros(2), "point": Point(shared, 1)}
    copy = copy_batch(batch)
    copy["x"] += 1
    copy["names"].append("b")
    copy["array"] += 1
    assert shared.tolist() == [3.0, 4.0]
    assert batch["names"] == ["a"]
    assert batch["array"].tolist() == [0.0, 0.0]
    assert copy["again"][0] is copy["x"]
    assert isinstance(copy["point"], Point)
    assert copy["x"].untyped_storage().nbytes() == 8


def test_a_batch_that_cannot_be_copied_is_refused() -> None:
    with pytest.raises(NotCopiedError, match=r"`batch` cannot be copied \(TypeError: cannot pickle"):
        copy_batch({"x": torch.ones(2), "rows": [(i for i in range(3)), 1]})


# -- functions of a copy refer to the copy -----------------------------------------------------------------------------


def test_hooks_that_close_over_the_module_see_the_copy() -> None:
    module: Any = Module()
    features: list[Tensor] = []
    module.features = features
    module.net[0].register_forward_hook(lambda _module, _inputs, output: module.values.append(output.numel()))
    module.net[0].register_forward_hook(lambda _module, _inputs, output: features.append(output))
    copied(module).net(torch.randn(3, 2))
    assert module.values == []
    assert features == []
    module.net(torch.randn(3, 2))
    assert len(module.values) == len(features) == 1


def test_closures_in_closures_partials_and_functions_that_call_themselves() -> None:
    module: Any = Module()

    def note(value: float) -> None:
        module.values.append(value)

    def countdown(number: int) -> None:
        note(number)
        if number:
            countdown(number - 1)

    module.plain, module.frozen, module.again = (lambda: note(1.0)), functools.partial(note, 2.0), countdown
    copy = copied(module)
    copy.plain()
    copy.frozen()
    copy.again(0)
    assert copy.values == [1.0, 2.0, 0.0]
    assert module.values == []


def test_keywords_defaults_and_marks_of_a_function_stay() -> None:
    module: Any = Module()

    def hook(self: Any, *args: Any, factor: float = 2.0) -> float:
        return factor * len(module.values)

    hook.mark = "mine"  # type: ignore[attr-defined]
    module.hook = hook
    copy = copied(module)
    copy.values.append(1.0)
    assert copy.hook is not hook
    assert (copy.hook(None), copy.hook(None, factor=5.0), copy.hook.mark) == (2.0, 5.0, "mine")
