"""Test a promise twice: it holds with our plugin, and with Lightning's own it fails for the given reason."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from lightning_amp import AmpPrecision, DynamicLossScaler
from support import STOCK_CACHES_CASTS, flags_on_a_device, scaled_fp32, stock, stock_fp32

STOCK_MARKS = [pytest.mark.stock, pytest.mark.slow]
"""Runs with Lightning's own plugin only show that it fails, so `make test` leaves them out."""

DECIDED_BY_A_FLAG = {1, 2, "2+8", 3, 5, 6, 8, 9, 10, 11, 16, 38}
"""Rows about steps that a flag skips. Only these also run with the flag on a device."""


@dataclass(frozen=True)
class Plugins:
    """Make the plugin for a promise: ours, or Lightning's own."""

    ours: bool
    flags_on_a_device: bool = False

    def scaled(self, init_scale: float = 2.0**10, **kwargs: Any) -> Any:
        """Return a plugin with loss scaling but without autocast. By powers of two, a run must equal fp32 exactly."""
        return (scaled_fp32 if self.ours else stock_fp32)(init_scale=init_scale, **kwargs)

    def fp16(self, init_scale: float = 2.0**10, **kwargs: Any) -> Any:
        if not self.ours:
            return stock("fp16", init_scale=init_scale, **kwargs)
        return AmpPrecision("fp16", scaler=DynamicLossScaler(init_scale, **kwargs))

    def bf16(self) -> Any:
        return AmpPrecision("bf16") if self.ours else stock("bf16")

    def fp32(self) -> Any:
        return AmpPrecision("fp32") if self.ours else None


def promise(
    row: int | str,
    stock: str | None,
    raises: type[BaseException] | tuple[type[BaseException], ...] = AssertionError,
    **next_release: str | None,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Mark the test of a row of the promises.

    Only the run with Lightning's own plugin is marked `slow`.

    Args:
        row: The number of the row, for the test id.
        stock: Pattern of the error with which the same test fails under Lightning's own plugin; `None` if Lightning
            2.6 keeps this promise.
        raises: The type of the error.
        next_release: `next_stock` replaces `stock` with Lightning's next release, if that differs.

    """
    if STOCK_CACHES_CASTS:
        stock = next_release.get("next_stock", stock)

    where = [False, True] if row in DECIDED_BY_A_FLAG else [False]
    ours = [(Plugins(True, on), f"ours{', flags on a device' * on}", None) for on in where]
    return each_of(row, [*ours, (Plugins(False), "stock", stock)], raises)


def each_of(
    row: int | str,
    cases: Sequence[tuple[Any, str, str | None]],
    raises: type[BaseException] | tuple[type[BaseException], ...],
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test with each of several `plugins`: their name, and the error that the test must raise, if any."""
    expected = {plugins: error for plugins, _, error in cases}

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def wrapper(*args: Any, plugins: Any, **kwargs: Any) -> None:
            error = expected[plugins]
            fails = contextlib.nullcontext() if error is None else pytest.raises(raises, match=error)
            with fails, flags_on_a_device() if plugins.flags_on_a_device else contextlib.nullcontext():
                test(*args, plugins=plugins, **kwargs)

        wrapper.__signature__ = inspect.signature(test)  # type: ignore[attr-defined]
        params = [
            pytest.param(plugins, id=f"row{row}-{name}", marks=[] if plugins.ours else STOCK_MARKS)
            for plugins, name, _ in cases
        ]
        return pytest.mark.parametrize("plugins", params)(wrapper)

    return decorate


DIFFERS = "Tensor-likes are not|Scalars are not"


def fused_adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01, fused=True)


def plain_adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01)


def fused_sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9, fused=True)


def plain_sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


OPTIMIZERS = {"adamw": plain_adamw, "fused adamw": fused_adamw, "sgd": plain_sgd, "fused sgd": fused_sgd}

PLAIN_AND_FUSED = ["sgd", "fused adamw"]
"""One optimizer for each way to decide about a step: by the host, and in a fused kernel."""
