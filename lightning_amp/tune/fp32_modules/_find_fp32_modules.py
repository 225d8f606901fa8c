"""`find_fp32_modules`: find which modules must stay in fp32, by measurements on the user's own batches."""

from __future__ import annotations

import glob
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from typing_extensions import final

from lightning_amp._text import counted, listed
from lightning_amp.shadow import require_unsharded
from lightning_amp.tune.fp32_modules._bench import Bench
from lightning_amp.tune.fp32_modules._request import Request
from lightning_amp.tune.fp32_modules._result import DistanceToFp32, Fp32Rules, NothingHelps, as_percent
from lightning_amp.tune.fp32_modules._search import Found, as_rules, search
from lightning_amp.tune.fp32_modules._short_fit import in_a_short_fit

_STEPS: tuple[int, ...] = (0, 10)
"""Indices of the measured batches of training.

At the start, weights of 1 or 0 in a norm or an output layer may stop gradients; after some steps their values differ.
"""

_FURTHER = 3
"""Number of batches after which the result is checked."""

_ROUNDS = 3
"""Largest number of searches; each search adds the batch on which the previous rules were not enough."""


def find_fp32_modules(
    make_module: Callable[[], LightningModule],
    make_data: Callable[[], LightningDataModule],
    precision: str | int | torch.dtype | Mapping[str, Any] = "fp16",
    *,
    tolerance: float,
    trainer_kwargs: Mapping[str, Any] | None = None,
) -> Fp32Rules:
    """Find which modules must stay in fp32, so that gradients and metrics are close enough to fp32.

    .. code-block:: python

        rules = find_fp32_modules(lambda: model, lambda: data, "bf16", tolerance=0.05)
        print(rules.message)
        trainer = L.Trainer(plugins=[AmpPrecision("bf16", fp32_modules=rules)])

    A copy of the module is trained in fp32 for some steps. At the first and the eleventh step, it computes the
    gradient in fp32 and in `precision`, from the same weights and random numbers. Then it validates some batches in
    both. The search begins with all modules in fp32 and leaves out as many modules as possible while every error stays
    within `tolerance`. It then replaces the modules that are left by parts of them. At the end it passes the rules to
    `AmpPrecision` in a second such fit and checks them on a later batch. If they are not enough there, the search goes
    on with that batch. For fp16 it chooses a loss scale at which gradients fit, if there is one.

    The search has seen only the first steps, a few batches, and one initialisation: compare whole runs before you rely
    on the rules (`compare_precisions`). You do not need it if a run in `precision` is as good as one in fp32.

    Args:
        make_module: Returns a LightningModule. No other process imports it, so it may be a lambda.
        make_data: Returns a LightningDataModule.
        precision: `"fp16"`, `"bf16"`, another spelling of these, `"auto"`, or the arguments of `AmpPrecision` as a
            dict, whose own `fp32_modules` are kept. A scaler makes no difference.
        tolerance: Largest relative error. For the gradient, it is the norm of the difference over the norm. For each
            metric that is logged in validation, it is the difference over the value, or the difference itself if the
            value is 0. The gradients of healthy networks are off by 0.003 to 0.02 in bf16 and by 0.0005 to 0.001 in
            fp16: 0.05 is fair.
        trainer_kwargs: Arguments for the Trainer. The search runs on the first device on which it would train.

    Returns:
        Globs on module names, for `fp32_modules=`; empty if nothing is needed. No rule can be left out, unless
        `.message` says that the search was ended early.

    Raises:
        ValueError: If an argument is out of its range; if fp32 itself is not finite; if it is not enough to have all
            modules in fp32; if there are no batches.
        TypeError: If a factory returns an object of another type.

    It takes no executor, because each measurement depends on those before it.

    Cost: two fits of some 14 steps, and about 2k log2(n) times a step and a validation of 3 batches, for k of n
    modules; at most some hundred. In memory, a gradient and a copy of the weights for each measured step, and once the
    activations in fp32.

    """
    request = Request(make_module, make_data, precision, tolerance, trainer_kwargs)
    require_unsharded(request.make_module, "find_fp32_modules")
    steps, num_tried = [*_STEPS], 0
    while True:
        answer = in_a_short_fit(request, steps, partial(_search, request))
        num_tried += answer.num_tried
        rules, further = (*request.rules, *answer.rules), steps[-1] + _FURTHER
        checked = in_a_short_fit(request, [0, further], Bench.distance, rules=rules, later=len(steps) - 1)
        if checked.within(tolerance) or len(steps) - len(_STEPS) == _ROUNDS - 1:
            break
        steps.append(further)
    without, found = answer.without, answer.distance
    more = "" if checked.within(tolerance) else f" On a later batch, {checked.describe(tolerance)}."
    return Fp32Rules(
        rules,
        cost=answer.cost,
        message=_message(request, answer, num_tried) + more,
        tried=num_tried,
        gradient_errors=(without.gradient, found.gradient),
        metric_errors={name: (without.metrics.get(name, math.inf), error) for name, error in found.metrics.items()},
    )


@final
class _Answer(NamedTuple):
    """The result of one search: the rules, and the distance from fp32 without and with them."""

    rules: tuple[str, ...]
    without: DistanceToFp32
    distance: DistanceToFp32
    cost: float
    num_tried: int
    complete: bool
    num_training: int
    num_validation: int


def _search(request: Request, bench: Bench) -> _Answer:
    """Search with the measurements of one fit."""
    without, tree, tolerance = bench.distance(), bench.tree(), request.tolerance

    def passes(kept: Sequence[str]) -> bool:
        return bench.distance(_escaped(kept), until=tolerance).within(tolerance)

    found = Found((), 1, complete=True)
    if not without.within(tolerance):
        found = search(tree, passes, bench.suspicion(tree))
    if found.names is None:
        own = bench.repeats_itself()
        if own > tolerance:
            raise NothingHelps(
                f"The step is not reproducible: in fp32, too, its gradients differ by {as_percent(own)} from one run to"
                " the next (same weights, batch and random state). Draw random numbers from the global generator"
                " of torch, NumPy or Python, whose state is restored, or raise the tolerance."
            )
        raise NothingHelps(_nothing_helps(request, without, bench.distance(_escaped(tree[""]))))
    rules = as_rules(found.names, [name for name in tree if name and name not in found.names])
    distance = bench.distance(rules) if rules else without
    cost = bench.step_time_ratio(rules) if rules else 1.0
    counts = len(bench.points), len(bench.batches)
    return _Answer(rules, without, distance, cost, found.num_tried, found.complete, *counts)


def _escaped(names: Sequence[str]) -> list[str]:
    return [glob.escape(name) for name in names]


def _nothing_helps(request: Request, without: DistanceToFp32, with_all: DistanceToFp32) -> str:
    return (
        f"No set of modules in fp32 is enough: with all of them in fp32, in {request.name!r} {with_all.describe()}, and"
        f" `tolerance` is {as_percent(request.tolerance)} (without any, {without.describe()}). The rest of the error"
        " comes from code outside of modules: a step or `forward` of the LightningModule, or another method than"
        " `forward` of a module. Put that code under `lightning_amp.precision.fp32_region`, with `.float()` on its"
        " inputs, or into the `forward` of a module. If the step itself takes gradients in fp16, use"
        " `lightning_amp.precision.scaled_grad`. Or raise the tolerance."
    )


def _message(request: Request, answer: _Answer, num_tried: int) -> str:
    validation = f"{answer.num_validation} validation batch{'' if answer.num_validation == 1 else 'es'}"
    seen = f"{answer.num_training} training and {validation}"
    if not answer.distance.metrics:
        why = "the module logs nothing in validation" if answer.num_validation else "there is no validation"
        seen = f"{answer.num_training} training batches, gradients alone: {why}"
    own = " in addition to your own rules" if request.rules else ""
    if not answer.rules:
        return f"Nothing{own} needs fp32: in {request.name!r} {answer.without.describe()} ({seen})."
    what = listed([repr(rule) for rule in answer.rules], most=5)
    end = "" if answer.complete else " The search ran out of its budget: fewer modules may be enough."
    time = f"A training step takes {answer.cost:.2f} times as long."
    if math.isnan(answer.cost):
        time = "A training step does not run without them."
    return (
        f"{what} in fp32{own}: {answer.distance.describe()}; without, {answer.without.describe()} ({seen}). {time}"
        f" {counted(num_tried, 'set')} of modules tried.{end}"
    )
