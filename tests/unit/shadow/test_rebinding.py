"""Functions of a copy refer to the copy."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from zoo.copies import Module, copied


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
