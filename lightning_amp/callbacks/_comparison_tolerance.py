"""Check the differences of `MetricComparison` against its `tolerance`, and the names in it."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from types import CodeType
from typing import Any, Literal

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from typing_extensions import final

from lightning_amp import _messages
from lightning_amp._arguments import is_number, require
from lightning_amp.findings import LOADER_SUFFIX
from lightning_amp.reports import ComparisonTable
from lightning_amp.shadow import Stage

OnExceed = Literal["warn", "raise"]


def require_tolerance(tolerance: object) -> None:
    """Raise a `ValueError` for a value that is not a valid tolerance."""
    numbers: Any = tolerance if isinstance(tolerance, Mapping) else {} if tolerance is None else {"": tolerance}
    fine = all(isinstance(k, str) and is_number(v, finite=False) and v >= 0 for k, v in numbers.items())
    rule = "a number of at least 0, a mapping from metric names to such numbers or `None`"
    require(fine, "tolerance", rule, tolerance, "It is absolute, in the unit of the metric.")


@final
class Tolerance:
    """The tolerance of `MetricComparison` in one run."""

    def __init__(self, tolerance: float | Mapping[str, float] | None, on_exceed: OnExceed) -> None:
        self._tolerance, self._on_exceed = tolerance, on_exceed
        self._names_checked = False

    def check_names(self, trainer: Trainer, module: LightningModule, logged: AbstractSet[str]) -> None:
        """Raise a `ValueError` for names that are not logged up to the first comparison. All ranks must call this."""
        if not isinstance(self._tolerance, Mapping) or self._names_checked:
            return
        if not trainer.sanity_checking:
            self._names_checked = True
        stage: Stage = "test" if trainer.testing else "validation"
        error = _why_not_logged(self._tolerance, logged, module, stage, sanity=trainer.sanity_checking)
        # The other ranks do not have a metric that is logged on rank 0 only.
        if trainer.strategy.reduce_boolean_decision(error is not None, all=True):
            raise ValueError(error)

    def judge(self, trainer: Trainer, table: ComparisonTable) -> None:
        """Warn of metrics above their tolerance, or raise a `RuntimeError`. All ranks must call this."""
        if self._tolerance is None:
            return
        where = table.exceeding()
        if not trainer.strategy.reduce_boolean_decision(bool(where), all=False):
            return
        where = where or "on another rank"
        epoch = trainer.current_epoch
        text = f"`MetricComparison`: mixed precision costs more than the tolerance in epoch {epoch}: {where}"
        if self._on_exceed == "raise":
            raise RuntimeError(f"{text}. Keep sensitive modules in fp32, or raise the tolerance")
        _messages.warn(f"{text}.")


def _why_not_logged(
    names: Iterable[str], logged: Iterable[str], module: LightningModule, stage: Stage, *, sanity: bool
) -> str | None:
    """Name the metrics of `tolerance` that are not logged; return `None` if all are.

    One tolerance serves validation and test. If the module has both steps, a name that contains "test" belongs to the
    test.

    The sanity check may lack a metric that a later validation logs. In the sanity check, a name is accepted if the
    module's code contains it. If that code reads `sanity_checking`, all names are accepted. A name that was logged for
    each loader (`<name>/dataloader_idx_0`) is never accepted.
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
    """Yield names and strings in the code of a module's class and its bases, up to Lightning's own."""
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
        elif isinstance(constant, (tuple, frozenset)):  # a constant tuple, such as the keys of a dictionary
            waiting.extend(constant)
        elif isinstance(constant, CodeType):
            yield from _words_of_code(constant)
