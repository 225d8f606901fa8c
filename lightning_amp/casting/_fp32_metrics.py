"""Compute metrics in fp32. Inside autocast torchmetrics rounds sums of squares and products of images to eight bits.

SSIM of 0.96 becomes 0.27, Pearson correlation NaN, R2 of 0.74 becomes 1.0 (Lightning-AI/torchmetrics#1725, #1290).
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from itertools import islice
from typing import Any

from torch import nn
from torchmetrics import Metric, MetricCollection

from lightning_amp.casting._fp32_region import InFp32
from lightning_amp.casting._method_override import Overrides


def is_metric(module: nn.Module) -> bool:
    """Return whether this is a metric or a collection of metrics. These compute in fp32 without any rule."""
    return isinstance(module, (Metric, MetricCollection))


def metrics_in_fp32(module: nn.Module, device_type: str) -> Overrides:
    """Return a context in which the metrics of a module compute in fp32. Entering it costs 1 us per metric.

    It finds metrics among the submodules, and in plain lists, tuples, sets and dictionaries, in about 4 us of host time
    per submodule. `Metric.forward` calls the two methods through the instance. `Metric.__getstate__` leaves both out,
    so copies and pickles of a metric get the plain methods, even in the middle of a step.
    """
    metrics = {id(metric): metric for metric in _walk(module, set())}.values()
    return Overrides(InFp32(metric, name, device_type) for metric in metrics for name in ("update", "compute"))


def _walk(module: nn.Module, seen: set[int]) -> Generator[Metric, None, None]:
    """Find all metrics that can be reached from a module without calling anything."""
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
