"""Matrix products of the forward that stay in fp32, with one code per reason.

The codes are `autocast-off`, `float64`, `not-on-autocast-list`, `attention-in-fp32` and `fp32-modules-dominate`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from typing_extensions import final

from lightning_amp._text import counted, percent
from lightning_amp.advice._decision import FP32
from lightning_amp.advice._gains import gain, is_worth_it
from lightning_amp.advice._record import WITHOUT_RULES, Operation, Step
from lightning_amp.advice.findings._finding import Evidence, Finding, graded
from lightning_amp.measure import FORWARD

Why = Literal["fp32_modules", "float64", "autocast off", "attention in fp32", "not on autocast's list"]

_MOST = 8
"""Places to keep."""


@final
@dataclass(frozen=True)
class Fp32Products:
    """Products at one place (a module or a line of code) that ran in fp32 or float64."""

    why: Why
    where: str
    flops: int


def fp32_products(step: Step) -> tuple[Fp32Products, ...]:
    """Return the products of the forward that ran in fp32, the most FLOPs first."""
    if step.precision == FP32:
        return ()
    found = Counter[tuple[Why, str]]()
    for operation in step.recorded.of_the_module:
        if operation.flops and operation.dtype in ("float32", "float64") and operation.part == FORWARD:
            why = _why(operation)
            where = operation.module if why == "fp32_modules" else str(operation.place or operation.module)
            if why == "not on autocast's list":
                where = f"{operation.name} in {where or 'the module'}"
            found[why, where] += operation.flops
    return tuple(Fp32Products(why, where, flops) for (why, where), flops in found.most_common(_MOST))


def _why(operation: Operation) -> Why:
    if operation.in_fp32_module:
        return "fp32_modules"
    if operation.dtype == "float64":
        return "float64"
    if not operation.autocast:
        return "autocast off"
    return "attention in fp32" if "attention" in operation.asked else "not on autocast's list"


@final
class _Words(NamedTuple):
    code: str
    what: str
    action: str


_WORDS: dict[Why, _Words] = {
    "autocast off": _Words(
        "autocast-off",
        "run where autocast is turned off",
        "Take that region out, or keep only the operation in it that needs fp32. If that operation is a module of its"
        " own, name it in `fp32_modules` instead.",
    ),
    "float64": _Words(
        "float64",
        "are computed in float64, which autocast leaves alone",
        "Make the tensors float32: `.float()` on what is loaded, and no `torch.float64` constants.",
    ),
    "not on autocast's list": _Words(
        "not-on-autocast-list",
        "run in operations that autocast does not compute in half precision",
        "Write them as `matmul`, `linear` or a convolution: autocast runs these in half precision.",
    ),
    "attention in fp32": _Words(
        "attention-in-fp32",
        "are attention that torch computes step by step in fp32, since no fused kernel takes these arguments",
        "Call it with arguments that a fused kernel takes: no dropout on a CPU, and no returned attention weights.",
    ),
}


def products_in_fp32(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding for each reason that keeps 2 % of the FLOPs in fp32, or 10 % if the reason is `fp32_modules`."""
    found = fp32_products(evidence.step)
    total = max(evidence.step.recorded.forward_flops, 1)
    for why, words in _WORDS.items():
        own = [products for products in found if products.why == why]
        share = sum(products.flops for products in own) / total
        if share >= 0.02:
            text = f"{percent(share)} of the FLOPs of the forward {words.what}: {_places(own)}."
            yield Finding(graded(share, 0.1), words.code, text, words.action, share)
    own = [products for products in found if products.why == "fp32_modules"]
    share = sum(products.flops for products in own) / total
    if share >= 0.1:
        yield _modules_dominate(evidence.step, own[0].where, share)


def _places(found: Sequence[Fp32Products]) -> str:
    more = f", and in {counted(len(found) - 2, 'other place')}" if len(found) > 2 else ""
    return "; ".join(products.where or "the module itself" for products in found[:2]) + more


def _modules_dominate(step: Step, largest: str, share: float) -> Finding:
    without = gain(step, WITHOUT_RULES)
    text = f"`fp32_modules` keeps {percent(share)} of the FLOPs of the forward in fp32, most of them in `{largest}`"
    clear = share >= 0.5
    if without is not None:
        text += f"; without it, tried here: {without}"
        clear = is_worth_it(without)
    action = "Name fewer modules: `find_fp32_modules` searches for the smallest set that keeps the gradients."
    return Finding("warning" if clear else "note", "fp32-modules-dominate", f"{text}.", action, share)
