"""`find_fp32_modules`: find which modules must stay in fp32, by measurements on the user's own batches."""

from __future__ import annotations

import glob
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from lightning_amp._arguments import is_number, require
from lightning_amp._compat._names import LightningDataModule, LightningModule
from lightning_amp._text import counted, listed
from lightning_amp.casting import Choice, parse_precision
from lightning_amp.compare import check_factory, check_trainer_names, make_arm
from lightning_amp.precision import AmpPrecision
from lightning_amp.shadow import device_of_trainer, own_data, require_unsharded, unnoticed
from lightning_amp.tune._fp32_bench import Bench, Setting
from lightning_amp.tune._fp32_search import Distance, Found, Fp32Rules, NothingHelps, as_percent, search

_MEASURED = ("fp32_modules", "eval_precision", "upcast_parameters")
"""Arguments of `AmpPrecision` that change the values of a step."""


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

    A copy of the module is trained in fp32 for some steps. From the weights of the first, the eleventh and the
    fourteenth step, private fits then train one step each and validate some batches. This is done once in fp32, and
    once for each set of modules that is tried, with `AmpPrecision(precision, fp32_modules=...)`. Modules are added,
    those whose outputs are furthest from fp32 first, until every error is within `tolerance`. Then as many modules as
    possible are left out again, and modules are replaced by parts of them. For fp16 it chooses a loss scale at which
    gradients fit, if there is one.

    The search has seen only the first steps, a few batches, and one initialisation: compare whole runs before you rely
    on the rules (`compare_precisions`). You do not need it if a run in `precision` is as good as one in fp32.

    Args:
        make_module: Returns a LightningModule. No other process imports it, so it may be a lambda.
        make_data: Returns a LightningDataModule.
        precision: `"fp16"`, `"bf16"`, another spelling of these, `"auto"`, or the arguments of `AmpPrecision` as a
            dict, whose own `fp32_modules` are kept. The scaler makes no difference.
        tolerance: Largest relative error. For the gradient, it is the norm of the difference over the norm. For each
            metric that is logged in validation, it is the difference over the value, or the difference itself if the
            value is 0. The gradients of healthy networks are off by 0.003 to 0.02 in bf16 and by 0.0005 to 0.001 in
            fp16: 0.05 is fair.
        trainer_kwargs: Arguments for the Trainer. The search runs on the first device on which it would train.

    Returns:
        Names of modules, for `fp32_modules=`; empty if nothing is needed. No rule can be left out, unless `.message`
        says that the search was ended early.

    Raises:
        ValueError: If an argument is out of its range; if fp32 itself is not finite; if it is not enough to have all
            modules in fp32; if there are no batches.
        TypeError: If a factory returns an object of another type.

    Cost: a fit of 14 steps, and for each set that is tried three steps and a validation of 3 batches; some dozens of
    sets, at most 150. In memory, three copies of the gradients and of the weights, and once the activations in fp32.

    """
    check_factory("make_module", make_module, LightningModule, travels=False)
    check_factory("make_data", make_data, LightningDataModule, travels=False)
    fine = is_number(tolerance) and tolerance > 0
    require(fine, "tolerance", "a finite number above 0, such as 0.05", tolerance)
    advice = "Pass it as `precision=`: a name, or the arguments of `AmpPrecision` as a dict."
    kwargs = check_trainer_names(trainer_kwargs, "what is searched for", advice)
    device = device_of_trainer(kwargs)
    given = make_arm("precision", "precision", precision).source
    require(isinstance(given, dict), "precision", "a name, or the arguments of `AmpPrecision` as a dict", precision)
    own_rules = AmpPrecision(**given).fp32_modules
    name = _low_precision(given.get("precision", "auto"), device)
    arguments = {**{key: given[key] for key in _MEASURED if key in given}, "precision": name}
    require_unsharded(make_module, "find_fp32_modules")
    with unnoticed(device), own_data(make_data) as data:
        bench = Bench(Setting(device, kwargs, data), make_module, arguments)
        without, found = bench.distance(), Found((), 1, complete=True)
        if not without.within(tolerance):
            found = search(
                bench.tree(), lambda kept: bench.distance(_escaped(kept)).within(tolerance), bench.suspicion()
            )
        if found.names is None:
            raise NothingHelps(_nothing_helps(bench, name, tolerance, without))
        rules = _escaped(found.names)
        distance, speed = (bench.distance(rules), bench.speed(rules)) if rules else (without, None)
    own = " in addition to your own rules" if own_rules else ""
    seen = f"({len(bench.points)} training and {bench.num_validation} validation batches: metrics are coarse)"
    message = f"Nothing{own} needs fp32: in {name!r} {without} {seen}."
    if rules:
        time = (
            f"A training step with them, against one without: {speed}" if speed else "A step does not run without them"
        )
        end = "" if found.complete else " The search ran out of its budget: fewer modules may be enough."
        what = listed([repr(rule) for rule in rules], most=5)
        message = (
            f"{what} in fp32{own}: {distance}; without, {without} {seen}. {time}."
            f" {counted(found.num_tried, 'set')} of modules tried.{end}"
        )
    return Fp32Rules(
        [*own_rules, *rules],
        cost=1 / speed.ratio if speed else math.nan if rules else 1.0,
        message=message,
        tried=found.num_tried,
        gradient_errors=(without.gradient, distance.gradient),
        metric_errors={name: (without.metrics.get(name, math.inf), error) for name, error in distance.metrics.items()},
    )


def _low_precision(given: Any, device: torch.device) -> str:
    """Return `"fp16"` or `"bf16"`; refuse a precision that needs no search."""
    name = parse_precision(given)
    name = Choice.pick(device)[0].name if name == "auto" else name
    picked = f", which 'auto' picks on this device ({device})" if name != parse_precision(given) else ""
    why = {"fp32": "all modules are in fp32 already", "fp8": "search in 'bf16', in which the rest computes"}
    if name in why:
        raise ValueError(f"`precision` must be 'fp16' or 'bf16', got {name!r}{picked}: {why[name]}.")
    Choice.of(name).require(device)
    return name


def _escaped(names: Sequence[str]) -> list[str]:
    return [glob.escape(name) for name in names]


def _nothing_helps(bench: Bench, name: str, tolerance: float, without: Distance) -> str:
    return (
        f"No set of modules in fp32 is enough: with all of them in fp32, in {name!r}"
        f" {bench.distance(_escaped(bench.tree()['']))}, and `tolerance` is {as_percent(tolerance)} (without any,"
        f" {without}). The rest of the error comes from code outside of modules: a step or `forward` of the"
        " LightningModule, or another method than `forward` of a module. It may also come from a random generator of"
        " your own, whose state is not restored. Put that code under `lightning_amp.precision.fp32_region`, with"
        " `.float()` on its inputs, or into the `forward` of a module. If the step itself takes gradients in fp16, use"
        " `lightning_amp.precision.scaled_grad`. Or raise the tolerance."
    )
