"""Compute in fp32 what the user or a rule asks for: a function, a block, a method, the outputs of a step, a hook."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, overload

import torch
from typing_extensions import final, override

from lightning_amp._compat import _modules
from lightning_amp._compat._torch import autocast_off
from lightning_amp._containers import to_fp32
from lightning_amp.casting._method_override import MethodOverride
from lightning_amp.numerics import HALF_DTYPES

P = ParamSpec("P")
R = TypeVar("R")


@overload
def fp32_region() -> Fp32Region: ...
@overload
def fp32_region(function: Callable[P, R]) -> Callable[P, R]: ...
def fp32_region(function: Callable[..., Any] | None = None) -> Any:
    """Compute in fp32 inside a step: for functional metrics, and for any other arithmetic that half precision breaks.

    Metric objects (`torchmetrics.Metric`) that are attributes of the module compute in fp32 already. The plugin cannot
    tell a functional metric from any other function, so wrap it:

    .. code-block:: python

        from torchmetrics.functional import pearson_corrcoef

        from lightning_amp.precision import fp32_region

        pearson = fp32_region(pearson_corrcoef)  # or `@fp32_region` above a function of your own
        prediction, target = torch.randn(2, 64).bfloat16()
        print(pearson(prediction, target).dtype)  # float32: arguments are upcast, autocast is off inside

        with fp32_region():  # autocast is off; tensors that are half precision already stay so: call `.float()`
            distance = torch.dist(prediction.float(), target.float())

    Cost: two switches of autocast, and a cast of each half-precision argument. Digits that a half-precision argument
    has already lost do not come back.

    Args:
        function: The function to wrap. Without it, the result is a context manager, which is also a decorator.

    """
    region = Fp32Region()
    return region if function is None else region(function)


@final
class Fp32Region:
    """See :func:`fp32_region`. It may be entered inside of itself."""

    def __init__(self) -> None:
        self._entered: list[contextlib.ExitStack] = []

    def __enter__(self) -> None:
        stack = contextlib.ExitStack()
        accelerator = torch.accelerator.current_accelerator(True)
        for device_type in ["cpu"] if accelerator is None else ["cpu", accelerator.type]:
            stack.enter_context(autocast_off(device_type))
        self._entered.append(stack)

    def __exit__(self, *exc: Any) -> None:
        self._entered.pop().__exit__(*exc)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Return the function in fp32, with half-precision arguments upcast too."""
        call: Callable[..., R] = function

        @functools.wraps(function)
        def in_fp32(*args: P.args, **kwargs: P.kwargs) -> R:
            with Fp32Region():  # threads must not share one
                return call(*to_fp32(args, HALF_DTYPES), **to_fp32(kwargs, HALF_DTYPES))

        return in_fp32


@final
class InFp32(MethodOverride):
    """A method in fp32: autocast off, half-precision arguments upcast.

    Its backward is fp32 too, since autograd computes in the dtypes of the forward. A replaced `forward`, unlike a pair
    of hooks, also covers direct calls of it, and a compiler traces the switch of autocast into the same graph.
    """

    def __init__(self, owner: Any, name: str, device_type: str, *, in_copies: bool = False) -> None:
        super().__init__(owner, name)
        self.device_type, self.in_copies = device_type, in_copies
        self.ran, self.was_compiled = _modules.Flag(), _modules.Flag()  # deep copies share them

    @override
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.ran.set()
        if torch.compiler.is_compiling():
            self.was_compiled.set()
        with autocast_off(self.device_type):
            return self.inner(*to_fp32(args, HALF_DTYPES), **to_fp32(kwargs, HALF_DTYPES))


@final
class Fp32Outputs(MethodOverride):
    """A step of a module whose outputs are float32.

    NumPy has no bfloat16, and sums over an epoch need the precision of float32.
    """

    @override
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return to_fp32(self.inner(*args, **kwargs), HALF_DTYPES)


@final
class EpochEnd(MethodOverride):
    """The epoch-end hook `name` of a module, which runs once in `context`, the context of the steps before it.

    Lightning calls these hooks outside of the plugin's contexts, where half-precision features that a step kept meet a
    head with float32 weights (pytorch/pytorch#110285).
    """

    def __init__(self, owner: Any, name: str, context: Callable[[], contextlib.AbstractContextManager[Any]]) -> None:
        super().__init__(owner, name)
        self.context = context

    @override
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.restore()
        with self.context():
            return self.inner(*args, **kwargs)
