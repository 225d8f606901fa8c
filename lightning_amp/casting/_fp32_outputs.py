"""Return step outputs in fp32, and run epoch-end hooks in the context of the steps whose values they use."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from typing_extensions import final, override

from lightning_amp._containers import to_fp32
from lightning_amp.casting._method_override import MethodOverride
from lightning_amp.numerics import HALF_DTYPES


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

    def __init__(self, owner: Any, name: str, context: Callable[[], AbstractContextManager[Any]]) -> None:
        super().__init__(owner, name)
        self.context = context

    @override
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.restore()
        with self.context():
            return self.inner(*args, **kwargs)
