"""Compute metrics in fp32. Inside autocast torchmetrics rounds sums of squares and products of images to eight bits.

SSIM of 0.96 becomes 0.27, Pearson correlation NaN, R2 of 0.74 becomes 1.0 (Lightning-AI/torchmetrics#1725, #1290).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator, Iterable, Mapping
from itertools import islice
from typing import Any, ParamSpec, TypeVar, overload

import torch
from torch import nn
from torchmetrics import Metric, MetricCollection
from typing_extensions import final, override

from lightning_amp._containers import to_fp32
from lightning_amp.casting._method_override import InPlace, MethodOverride
from lightning_amp.numerics import HALF_DTYPES

P = ParamSpec("P")
R = TypeVar("R")


def is_metric(module: nn.Module) -> bool:
    """Return whether this is a metric or a collection of metrics. These compute in fp32 without any rule."""
    return isinstance(module, (Metric, MetricCollection))


# -- functional metrics ------------------------------------------------------------------------------------------------


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
            if torch.is_autocast_enabled(device_type):
                stack.enter_context(torch.autocast(device_type, enabled=False))
        self._entered.append(stack)

    def __exit__(self, *exc: Any) -> None:
        self._entered.pop().__exit__(*exc)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Return the function in fp32, with half-precision arguments upcast too."""
        call: Callable[..., R] = function

        @functools.wraps(function)
        def in_fp32(*args: P.args, **kwargs: P.kwargs) -> R:
            with self:
                return call(*to_fp32(args, HALF_DTYPES), **to_fp32(kwargs, HALF_DTYPES))

        return in_fp32


# -- metric objects ----------------------------------------------------------------------------------------------------


@final
class _InFp32(MethodOverride):
    """`update` or `compute` of a metric: autocast off, half-precision arguments upcast.

    `Metric.forward` calls both through the instance, and `Metric.__getstate__` leaves both out. So copies and pickles
    of the metric get the plain methods, even in the middle of a step.
    """

    def __init__(self, metric: Metric, name: str, device_type: str) -> None:
        super().__init__(metric, name)
        self.device_type = device_type

    @override
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_autocast_enabled(self.device_type):
            return self.inner(*to_fp32(args, HALF_DTYPES), **to_fp32(kwargs, HALF_DTYPES))
        with torch.autocast(self.device_type, enabled=False):
            return self.inner(*to_fp32(args, HALF_DTYPES), **to_fp32(kwargs, HALF_DTYPES))


@final
class Fp32Metrics(InPlace):
    """Context in which the metrics of a module compute in fp32. Costs 0.3 us, and 1 us per metric.

    It finds metrics among the submodules, and in plain lists, tuples, sets and dictionaries. Overrides are made once
    and reused, because `torch.compile` would compile again for a new function.
    """

    def __init__(self, module: nn.Module, device_type: str) -> None:
        self._device_type = device_type
        self._overrides: dict[tuple[int, str], _InFp32] = {}
        self.find(module)

    def find(self, module: nn.Module) -> None:
        """Find the metrics again, since metrics may have been added or removed.

        This takes about 4 us of host time per submodule.
        """
        metrics = {id(metric): metric for metric in metrics_of(module)}
        self._overrides = {key: known for key, known in self._overrides.items() if key[0] in metrics}
        for key, metric in metrics.items():
            for name in ("update", "compute"):
                known = self._overrides.get((key, name))
                found = vars(metric).get(name)
                # the metric has a new method: its state was set
                if known is None or (found is not known and found is not known.inner):
                    self._overrides[key, name] = _InFp32(metric, name, self._device_type)

    @override
    def install(self) -> None:
        for method in self._overrides.values():
            method.install()

    @override
    def restore(self) -> None:
        for method in self._overrides.values():
            method.restore()


def metrics_of(module: nn.Module) -> list[Metric]:
    """Find all metrics that can be reached from a module without calling anything."""
    return list({id(metric): metric for metric in _walk(module, set())}.values())


def _walk(module: nn.Module, seen: set[int]) -> Generator[Metric, None, None]:
    for submodule in module.modules():
        if id(submodule) in seen:
            continue
        seen.add(id(submodule))
        if isinstance(submodule, Metric):
            yield submodule
        for value in vars(submodule).values():
            if isinstance(value, (list, tuple, set, dict)) and value:  # in this order, because a tensor is not a bool
                yield from _in_container(value, seen, depth=0)


def _in_container(container: Iterable[Any], seen: set[int], depth: int) -> Generator[Metric, None, None]:
    items = container.values() if isinstance(container, Mapping) else container
    for item in islice(items, 1000):  # a longer list holds values that a step collects, not metrics
        if isinstance(item, nn.Module):
            yield from _walk(item, seen)
        elif depth < 3 and isinstance(item, (list, tuple, set, dict)):
            yield from _in_container(item, seen, depth + 1)
