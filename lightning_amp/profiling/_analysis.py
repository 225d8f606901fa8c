"""From the operations of a recorded step to facts."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from statistics import median

import torch

from lightning_amp.advice import CastSite, Reason, SlowProduct, Unaligned, Wait, compare
from lightning_amp.measure import FORWARD
from lightning_amp.profiling._operations import Operation
from lightning_amp.profiling._probes import product, time_probes
from lightning_amp.profiling._recorder import Recorder

HALF = {"bfloat16": "bf16", "float16": "fp16", "float8_e4m3fn": "fp8", "float8_e5m2": "fp8"}
_FULL = ("float32", "float64")
_EMPTY = {"t", "view", "detach", "transpose", "expand", "slice", "select", "unsqueeze", "permute", "_unsafe_view"}
_RECURRENT = {"lstm", "gru", "rnn_tanh", "rnn_relu"}
"""Which cast for each time step by themselves."""
_MOST = 8
"""How many places of a kind are kept."""
_CASTING = {"to", "float", "half", "bfloat16", "double", "type", "type_as"}
_NOT_MULTIPLIED = 32
"""A dimension this small (the classes of a head, a single output) is not worth a pad."""


def flops_by_dtype(operations: Iterable[Operation]) -> dict[str, int]:
    """Return the FLOPs of matrix products, the most first."""
    found = Counter[str]()
    for operation in operations:
        if operation.flops:
            found[operation.dtype] += operation.flops
    return dict(found.most_common())


def flops_by_module(operations: Iterable[Operation]) -> dict[str, dict[str, int]]:
    """Return the FLOPs of the forward by module and dtype, the most first."""
    found: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for operation in operations:
        if operation.flops and operation.part == FORWARD:
            found[operation.module][operation.dtype] += operation.flops
    ordered = sorted(found.items(), key=lambda item: -sum(item[1].values()))
    return {name: dict(count.most_common()) for name, count in ordered}


def reasons(operations: Iterable[Operation]) -> tuple[Reason, ...]:
    """Return why products of the forward ran in fp32, the most FLOPs first."""
    found = Counter[tuple[str, str]]()
    for operation in operations:
        if not operation.flops or operation.dtype not in _FULL or operation.part != FORWARD:
            continue
        if operation.in_fp32_module:
            key = "fp32_modules", operation.module
        elif operation.dtype == "float64":
            key = "float64", str(operation.place or operation.module)
        elif not operation.autocast:
            key = "autocast off", str(operation.place or operation.module)
        elif "attention" in operation.asked:
            key = "attention in fp32", str(operation.place or operation.module)
        else:
            key = "not on autocast's list", f"{operation.name} in {operation.place or operation.module or 'the module'}"
        found[key] += operation.flops
    return tuple(Reason(why, where, flops) for (why, where), flops in found.most_common(_MOST))


def casts(operations: Iterable[Operation]) -> tuple[CastSite, ...]:
    """Return the casts between floating formats by place, those that take longest first."""
    seen: set[int] = set()
    sites: defaultdict[tuple[str, str], list[float]] = defaultdict(lambda: [0, 0, 0.0])
    for operation in operations:
        if not operation.cast_bytes:
            continue
        place = str(operation.place) if operation.place else ""
        first = operation.cast_of and operation.cast_of not in seen  # autocast would cast it, too
        if not first and operation.part == FORWARD and operation.asked.rpartition(".")[2] in _CASTING and place:
            key = "explicit", place
        elif operation.cast_of and operation.part == FORWARD:
            again = operation.cast_of in seen and operation.asked.rpartition(".")[2] not in _RECURRENT
            key = "weight again" if again else "weight", operation.module
        else:
            key = "activation", operation.module if operation.part == FORWARD else operation.part
        if operation.cast_of:
            seen.add(operation.cast_of)
        for number, value in enumerate((1, operation.cast_bytes, operation.seconds)):
            sites[key][number] += value
    found = [CastSite(kind, where, int(n), int(size), s) for (kind, where), (n, size, s) in sites.items()]
    found.sort(key=lambda site: (-site.seconds, site.kind, site.where))
    # Sums must stay true: of each kind the first ones by place, and the others as one.
    kept: list[CastSite] = []
    for kind in dict.fromkeys(site.kind for site in found):
        own = [site for site in found if site.kind == kind]
        kept.extend(own[:_MOST])
        if rest := own[_MOST:]:
            sums = (sum(s.count for s in rest), sum(s.num_bytes for s in rest), sum(s.seconds for s in rest))
            kept.append(CastSite(kind, f"{len(rest)} other places", *sums))
    return tuple(kept)


def waits(recorder: Recorder) -> tuple[Wait, ...]:
    """Return where the host waited, the most first."""
    return tuple(Wait(where, what, count, own) for (where, what, own), count in recorder.waits.most_common())


def unaligned(
    operations: Sequence[Operation], multiple: int, device: torch.device, budget_s: float = 3.0
) -> tuple[Unaligned, ...]:
    """Return products in half precision whose sizes are no multiples, those with the most FLOPs measured with padding.

    Args:
        operations: Of a step.
        multiple: What sizes should be multiples of.
        device: Where.
        budget_s: How long measuring may take.

    """
    groups: defaultdict[tuple[tuple[int, int, int], str], list[Operation]] = defaultdict(list)
    for operation in operations:
        if operation.sizes and operation.dtype in HALF and not _fits(operation.sizes, multiple):
            groups[operation.sizes, operation.dtype].append(operation)
    most = sorted(groups.items(), key=lambda item: -sum(o.flops for o in item[1]))[:_MOST]
    found: list[Unaligned] = []
    for (sizes, dtype), own in most:
        padded = (_padded(sizes[0], multiple), _padded(sizes[1], multiple), _padded(sizes[2], multiple))
        module = next((o.module for o in own if o.part == FORWARD and o.module), "")
        seconds = padded_seconds = 0.0
        speed = None
        if budget_s > 0:
            per_run = min(0.2, budget_s / 4)
            name = HALF[dtype] if HALF[dtype] != "fp8" else "bf16"
            probes = {"as it is": product(name, sizes, device), "padded": product(name, padded, device)}
            as_it_is, with_pads = time_probes(probes, device, per_run).values()
            speed = compare(with_pads, as_it_is)
            seconds, padded_seconds = median(as_it_is) * len(own), median(with_pads) * len(own)
            budget_s -= 2 * per_run
        flops = sum(o.flops for o in own)
        found.append(Unaligned(sizes, padded, module, len(own), flops, seconds, padded_seconds, speed))
    return tuple(found)


def _fits(sizes: tuple[int, int, int], multiple: int) -> bool:
    return all(size % multiple == 0 or size < _NOT_MULTIPLIED for size in sizes)


def _padded(size: int, multiple: int) -> int:
    return size if size < _NOT_MULTIPLIED else -(-size // multiple) * multiple


def product_s(operations: Iterable[Operation]) -> float:
    """Return the seconds in matrix products, but for what any call takes that computes nothing."""
    all_ = list(operations)
    empty = [operation.seconds for operation in all_ if operation.name in _EMPTY]
    call_s = median(empty) if empty else 0.0
    return sum(max(0.0, operation.seconds - call_s) for operation in all_ if operation.flops)


def slower_products(now: Iterable[Operation], fp32: Iterable[Operation]) -> tuple[SlowProduct, ...]:
    """Return modules whose products take longer than in fp32, those that lose most first."""
    seconds: defaultdict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for number, operations in enumerate((now, fp32)):
        for operation in operations:
            if operation.flops:
                where = operation.module if operation.part == FORWARD else operation.part
                seconds[where, operation.name][number] += operation.seconds
    found = [SlowProduct(where, name, a, b) for (where, name), (a, b) in seconds.items() if a > b > 0]
    return tuple(sorted(found, key=lambda product: product.fp32_s - product.seconds)[:_MOST])
