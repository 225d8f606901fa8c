"""Make runs of a comparison without training, with the values that a test is about."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning_amp.compare import CONTROL, Margin, Plan, Point, PrecisionReport, Run


def curve(*values: float) -> tuple[Point, ...]:
    """Return a curve with a validation every 10 steps, each of 0.1 s."""
    return tuple(Point(10 * (i + 1), float(i + 1), value) for i, value in enumerate(values))


def make_run(label: str = "fp32", seed: int = 0, step_s: float | None = 0.01, **fields: Any) -> Run:
    """Return a finished run, with times that differ by 2 %. `fields` go to `Run`."""
    times = () if step_s is None else tuple(step_s * (1 + 0.001 * i) for i in range(20))
    usual: dict[str, Any] = {
        "precision": label,
        "device": "cpu",
        "step_s": times,
        "timed_steps": tuple(range(len(times))),
        "versions": {"torch": "2.13.0"},
    }
    return Run(label, seed, **(usual | fields))


def failed(label: str, seed: int, error: str = "OutOfMemoryError: CUDA out of memory.", **fields: Any) -> Run:
    return make_run(label, seed, None, error=error, **fields)


def make_plan(labels: Sequence[str], num_seeds: int, margins: Mapping[str, Any] | None = None, **fields: Any) -> Plan:
    """Return a plan. Each margin is a number or a `Margin`."""
    return Plan(
        make_module="Net",
        make_data="Data",
        arms={label: f"AmpPrecision({label!r})" for label in labels},
        num_seeds=num_seeds,
        margins={name: m if isinstance(m, Margin) else Margin(m) for name, m in (margins or {}).items()},
        **fields,
    )


def compared(
    finals: Mapping[str, Sequence[float | None]],
    margin: float | None = 0.1,
    *,
    name: str = "val_loss",
    step_s: Mapping[str, float] | None = None,
    memory: Mapping[str, int] | None = None,
) -> PrecisionReport:
    """Return a report of one metric. `finals` has, by label, the final value of each seed; `None`: the run failed."""
    step_s, memory = step_s or {}, memory or {}
    labels = [label for label in finals if label != CONTROL]
    runs = [
        failed(label, seed)
        if value is None
        else make_run(
            label, seed, step_s.get(label, 0.01), curves={name: curve(value)}, peak_memory_bytes=memory.get(label)
        )
        for label, values in finals.items()
        for seed, value in enumerate(values)
    ]
    margins = {} if margin is None else {name: margin}
    return PrecisionReport(
        make_plan(labels, len(next(iter(finals.values()))), margins, control=CONTROL in finals), runs
    )
