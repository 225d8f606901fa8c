"""Name hyperparameters that are not finite, before an optimizer step uses them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from lightning.pytorch import Trainer
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import final

from lightning_amp.numerics import stack_scalars

_MOST_LATE = 1000  # number of values on a device to keep until they are read
_NUMBERS = ("lr", "weight_decay", "momentum", "dampening", "betas", "alpha", "eps", "rho")


class _Late(NamedTuple):
    """A hyperparameter on a device, with the value that a step used."""

    optimizer: Optimizer
    group: int
    name: str
    step: int | None
    value: Tensor


@final
class StepSettings:
    """Checks the hyperparameters of each step. `first` names the first bad one and its step; empty without one."""

    def __init__(self) -> None:
        self.first = ""
        self._late: list[_Late] = []

    def look(self, trainer: Trainer, optimizer: Optimizer, step: int | None) -> list[tuple[object, str]]:
        """Describe hyperparameters that are not finite, each under a key. Keep values on a device for :meth:`read`."""
        found: list[tuple[object, str]] = []
        for group, name, value in _numbers(optimizer):
            if isinstance(value, Tensor) and value.device.type != "cpu":
                self._late.append(_Late(optimizer, group, name, step, value.detach().sum()))
            elif not math.isfinite(value):
                found.append(self._found(trainer, optimizer, group, name, float(value), step, "is about to use it"))
        return found + self.read(trainer) if len(self._late) >= _MOST_LATE else found

    def read(self, trainer: Trainer) -> list[tuple[object, str]]:
        """Describe the kept hyperparameters that are not finite. This waits for the device if there are any."""
        late, self._late = self._late, []
        values = stack_scalars([one.value for one in late]).tolist() if late else []
        return [
            self._found(trainer, one.optimizer, one.group, one.name, value, one.step, "has used it")
            for one, value in zip(late, values, strict=True)
            if not math.isfinite(value)
        ]

    def _found(
        self, trainer: Trainer, optimizer: Optimizer, group: int, name: str, value: float, step: int | None, does: str
    ) -> tuple[object, str]:
        is_what = "NaN" if math.isnan(value) else "infinite"
        which = "the next step" if step is None else f"step {step}"
        self.first = self.first or f"`{name}` was {is_what} in {which}"
        who, setter = optimizer_name(trainer, optimizer, group), _set_by(trainer, optimizer, group, name)
        text = (
            f"{who}: `{name}` is {is_what}{setter}. {which[0].upper()}{which[1:]} {does}, in any precision. Correct"
            " it, and go back to a checkpoint from before that step."
        )
        return ("setting", id(optimizer), group, name), text


def optimizer_name(trainer: Trainer, optimizer: Optimizer, group: int) -> str:
    """Return the name of an optimizer, or of a parameter group, in messages: `The optimizer (SGD)`."""
    known = trainer.optimizers
    index = next((i for i, other in enumerate(known) if other is optimizer), None)
    which = f" {index} of {len(known)}" if len(known) > 1 and index is not None else ""
    part = f", parameter group {group}" if len(optimizer.param_groups) > 1 else ""
    return f"The optimizer{which} ({type(optimizer).__name__}{part})"


def _numbers(optimizer: Optimizer) -> Iterator[tuple[int, str, Any]]:
    for index, group in enumerate(optimizer.param_groups):
        for name in _NUMBERS:
            value = group.get(name)
            several = isinstance(value, (tuple, list))
            for i, number in enumerate(value if several else (value,)):
                is_scalar = isinstance(number, Tensor) and number.numel() == 1 and not number.is_meta
                if is_scalar or isinstance(number, (int, float)):
                    yield index, f"{name}[{i}]" if several else name, number


def _set_by(trainer: Trainer, optimizer: Optimizer, group: int, name: str) -> str:
    """Name the schedule that set the value, and the line of the function that computes it."""
    schedules = [c.scheduler for c in trainer.lr_scheduler_configs if getattr(c.scheduler, "optimizer", 0) is optimizer]
    if name.partition("[")[0] not in ("lr", "momentum", "betas") or not schedules:
        return ""
    schedule: Any = schedules[-1]
    functions = getattr(schedule, "lr_lambdas", None)
    code = getattr(functions[min(group, len(functions) - 1)], "__code__", None) if functions else None
    where = f", by the function at {code.co_filename.rpartition('/')[2]}:{code.co_firstlineno}" if code else ""
    return f", as `{type(schedule).__name__}` has set it{where}"
