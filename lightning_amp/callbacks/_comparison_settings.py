"""Settings of `MetricComparison`: checked at construction; names in `tolerance` as soon as metrics are known."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from types import CodeType
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_amp._arguments import is_count, is_number, require, require_bool, require_choice
from lightning_amp.reports import LOADER_SUFFIX
from lightning_amp.shadow import Stage


def check_settings(
    every_n_epochs: object,
    limit_batches: object,
    tolerance: object,
    on_exceed: object,
    by_module: object = False,
) -> None:
    """Refuse what `MetricComparison` cannot do.

    Raises:
        ValueError: Naming the argument.
    """
    fine = is_count(every_n_epochs)
    require(fine, "every_n_epochs", "an integer of at least 1", every_n_epochs, "Use 1 to compare every time.")
    share = isinstance(limit_batches, float) and 0.0 < limit_batches <= 1.0
    rule = "an integer of at least 1 (batches), a float in (0, 1] (share of the batches) or `None`"
    advice = "Leave it out to compare over all batches."
    require(limit_batches is None or is_count(limit_batches) or share, "limit_batches", rule, limit_batches, advice)
    numbers: Any = tolerance if isinstance(tolerance, Mapping) else {} if tolerance is None else {"": tolerance}
    fine = all(isinstance(k, str) and is_number(v, finite=False) and v >= 0 for k, v in numbers.items())
    rule = "a number of at least 0, a mapping from metric names to such numbers or `None`"
    require(fine, "tolerance", rule, tolerance, "It is absolute, in the unit of the metric.")
    require_bool("by_module", by_module)
    require_choice("on_exceed", on_exceed, ("warn", "raise"), '"warn" lets training go on.')


def why_not_logged(
    names: Iterable[str], logged: Iterable[str], module: LightningModule, stage: Stage, *, sanity: bool
) -> str | None:
    """Tell a user which metrics that `tolerance` names are not logged; `None` if all are.

    One tolerance serves validation and test. If the module has both steps, a name with "test" in it is test's.

    A metric may be left out of the sanity check, or depend on values that it did not see. So there a name stays in
    doubt if the module's code writes it out, and all do if that code asks for `sanity_checking`. One that was logged
    for each loader (`<name>/dataloader_idx_0`) is not in doubt.
    """
    if is_overridden("validation_step" if stage == "test" else "test_step", module):
        names = [name for name in names if ("test" in name.lower()) == (stage == "test")]
    available = sorted(logged)
    unknown = sorted(set(names).difference(available))
    if sanity and unknown:
        words = set(_words(module))
        per_loader = {known.partition(LOADER_SUFFIX)[0] for known in available}
        unknown = [name for name in unknown if name not in words or name in per_loader]
        if "sanity_checking" in words:
            unknown = []
    if not unknown:
        return None
    text = f"`tolerance` names metrics that {stage} does not log: {unknown}. Choose from {available}"
    later = "; for one that is logged only later, `num_sanity_val_steps=0` leaves this check to the first comparison"
    return text + later if sanity else text


def _words(module: LightningModule) -> Iterator[str]:
    """Yield names and strings in the code of a module's class and its bases, short of Lightning's own."""
    for cls in type(module).__mro__:
        if cls is LightningModule:
            return
        for value in vars(cls).values():
            function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
            if inspect.isfunction(function):
                yield from _words_of_code(inspect.unwrap(function).__code__)


def _words_of_code(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    waiting = list(code.co_consts)
    while waiting:
        constant = waiting.pop()
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, (tuple, frozenset)):  # the keys of a dictionary
            waiting.extend(constant)
        elif isinstance(constant, CodeType):
            yield from _words_of_code(constant)
