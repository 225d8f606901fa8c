"""What comes out of evaluation: step outputs in fp32, and epoch-end hooks that can use what steps kept."""

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
    """A step of a module whose outputs are float32. NumPy has no bfloat16, and sums over an epoch need the digits."""

    @override
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return to_fp32(self.inner(*args, **kwargs), HALF_DTYPES)

    def __enter__(self) -> None:
        self.install()

    def __exit__(self, *exc: object) -> None:
        self.restore()


@final
class EpochEnd(MethodOverride):
    """An epoch-end hook of a module that runs, once, in the context of the steps before it.

    Lightning calls these hooks outside of the plugin's contexts, where half-precision features that a step kept meet a
    head with float32 weights (pytorch/pytorch#110285).

    Args:
        owner: The module.
        name: Of the hook.
        context: What to run it in.

    """

    def __init__(self, owner: Any, name: str, context: Callable[[], AbstractContextManager[Any]]) -> None:
        super().__init__(owner, name)
        self.context = context

    @override
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.restore()
        with self.context():
            return self.inner(*args, **kwargs)
