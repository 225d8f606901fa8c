"""Small executors whose jobs run in this process, when somebody asks for their result."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

from support.synthetic import curve, make_run

import lightning_amp
from lightning_amp.compare import Run, Spec
from lightning_amp.compare._spec import versions
from zoo.compared import TRAINER, Sea, Waves


class Job:
    """A job as engines have it at least: without `cancel`."""

    def __init__(self, call: Callable[[], Any], is_done: Callable[[], bool] = lambda: True) -> None:
        self._call, self._is_done = call, is_done

    def done(self) -> bool:
        return self._is_done()

    def result(self) -> Any:
        return self._call()


class Inline:
    """Runs a job when its result is asked for.

    Args:
        change: Gets each job and its number in place of the job itself.
        order: The jobs end in this order, by their number; the usual order is that of `submit`.

    """

    def __init__(
        self, change: Callable[[Callable[[], Any], int], Any] = lambda job, _: job(), order: Sequence[int] = ()
    ) -> None:
        self.sent: list[bytes] = []
        self._change, self._order = change, list(order)

    def submit(self, fn: Callable[..., Any], /, *args: Any) -> Any:
        number = len(self.sent)
        self.sent.append(pickle.dumps((fn, args)))

        def call() -> Any:
            if number in self._order:
                self._order.remove(number)
            fn, args = pickle.loads(self.sent[number])
            return self._change(lambda: fn(*args), number)

        return Job(call, lambda: number not in self._order or self._order[0] == number)


def trained(label: str, seed: int) -> Run:
    """Return a run with values that depend on its label and seed."""
    value = 1.0 + 0.1 * seed + 0.001 * len(label)
    return make_run(label, seed, curves={"val_loss": curve(2.0, value)}, loss=curve(value), versions=VERSIONS)


def trained_here(spec: Spec, *_: Any) -> Run:
    """Stand in for `run_in_process`."""
    return trained(spec.label, spec.seed)


def trained_there(header: dict[str, Any], *_: Any) -> Run:
    """Stand in for `run_packed`."""
    return trained(header["label"], header["seed"])


def compare(executor: Any, precisions: Any = ("fp32", "bf16"), **kwargs: Any) -> lightning_amp.PrecisionReport:
    changes = {"trainer_kwargs": TRAINER, "executor": executor, **kwargs}
    return lightning_amp.compare_precisions(changes.pop("module", Waves), Sea, precisions, **changes)


VERSIONS = versions()
