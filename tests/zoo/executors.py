"""Small executors whose jobs run in this process, when somebody asks for their result."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from support.synthetic import curve, make_run

import lightning_amp
from lightning_amp.compare import _remote
from lightning_amp.compare._process import PackedTask
from lightning_amp.compare._remote import Assignment, train
from lightning_amp.compare._run import ArmRun
from zoo.compared import TRAINER, Sea, Waves


def assignment_of(pickled: bytes) -> Assignment:
    """Return what `submit` sends, without training it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_remote, "train", lambda assignment: assignment)
        return pickle.loads(pickled)


class Job:
    """A job as engines have it at least: without `cancel`."""

    def __init__(self, call: Callable[[], Any], is_done: Callable[[], bool] = lambda: True) -> None:
        self._call, self._is_done = call, is_done

    def done(self) -> bool:
        return self._is_done()

    def result(self) -> Any:
        return self._call()


class Inline:
    """Runs a job when its result is asked for, and keeps the assignments.

    Args:
        change: Gets each call and its assignment in place of the call itself.
        order: The jobs end in this order, by their number; the usual order is that of `submit`.

    """

    def __init__(
        self, change: Callable[[Callable[..., Any], Assignment], Any] | None = None, order: Sequence[int] = ()
    ) -> None:
        self.assignments: list[Assignment] = []
        self._change = change or (lambda fn, assignment: fn(assignment))
        self._order = list(order)

    def submit(self, fn: Callable[..., Any], /, *args: Any) -> Any:
        fn, assignment = train, assignment_of(*args)
        number = len(self.assignments)
        self.assignments.append(assignment)

        def call() -> Any:
            if number in self._order:
                self._order.remove(number)
            return self._change(fn, assignment)

        return Job(call, lambda: number not in self._order or self._order[0] == number)


def trained(task: PackedTask) -> ArmRun:
    """Return a run with values that depend on its label and seed."""
    value = 1.0 + 0.1 * task.seed + 0.001 * len(task.label)
    return make_run(task.label, task.seed, curves={"val_loss": curve(2.0, value)}, loss=curve(value))


def compare(executor: Any, precisions: Any = ("fp32", "bf16"), **kwargs: Any) -> lightning_amp.PrecisionReport:
    changes = {"trainer_kwargs": TRAINER, "executor": executor, **kwargs}
    return lightning_amp.compare_precisions(changes.pop("module", Waves), Sea, precisions, **changes)


def once(error: BaseException, label: str = "bf16") -> Callable[[Any, Assignment], Any]:
    """Lose the first attempt of the runs of an arm."""

    def change(fn: Any, assignment: Assignment) -> Any:
        if assignment.tasks[0].label == label and not assignment.first_attempt:
            raise error
        return fn(assignment)

    return change


def always(error: BaseException, label: str = "bf16") -> Callable[[Any, Assignment], Any]:
    def change(fn: Any, assignment: Assignment) -> Any:
        if assignment.tasks[0].label == label:
            raise error
        return fn(assignment)

    return change
