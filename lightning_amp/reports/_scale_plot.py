"""The picture of a loss scale over the steps of a run, and of several side by side."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any

from lightning_amp.findings import StepRecord, describe_fallbacks
from lightning_amp.reports._figures import new_figure, saved, say_empty

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from lightning_amp.reports._scale_history import ScaleHistory
    from lightning_amp.reports._scale_replay import PolicyReplay

_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000")
_MANY = 100
"""Marks: from here on they are small, or would hide the line that they stand on."""

_NO_STEP = "no optimizer step was taken"


def plot_history(history: ScaleHistory, path: str | os.PathLike[str] | None = None) -> Figure:
    """Draw what :meth:`ScaleHistory.plot` returns."""
    figure = new_figure(8, 3.6)
    axes: Any = figure.add_subplot()
    if history.last is None:
        say_empty(axes, _NO_STEP)
    else:
        _curve(axes, history, color=_COLORS[0], label="loss scale")
        overflows, losses = _skips(history)
        grown = [r for r in history if r.next_scale > r.scale]
        for label, marker, color, records in (
            ("skipped: gradients overflowed", "v", _COLORS[1], overflows),
            ("skipped: loss was not finite", "x", "black", losses),
            ("scale grew", "^", _COLORS[2], grown if len(grown) <= _MANY else []),
        ):
            _mark(axes, records, marker, color, f"{label} ({len(records):,})")
        for record in history.fallbacks:
            _mark_fallback(axes, record, "gray", f"{record.precision} from step {record.index:,} on")
        _finish(figure, axes)
    title = textwrap.fill(f"Loss scale: {history.summary()}", 90, break_on_hyphens=False)
    return _named(figure, axes, title, path)


def plot_histories(
    histories: Mapping[str, ScaleHistory],
    path: str | os.PathLike[str] | None = None,
    *,
    replays: Mapping[str, PolicyReplay] | None = None,
) -> Figure:
    """Draw several runs into one picture, each in its colour, with its skips in the same.

    Args:
        histories: By the name that the legend gives them.
        path: Where to save the picture too, also a URL.
        replays: Of some of them, by the same names: drawn broken where no undecided step overflows, and dotted where
            all do.

    Raises:
        ModuleNotFoundError: Without matplotlib.

    """
    figure = new_figure(8, 3.6 + 0.12 * len(histories))
    axes: Any = figure.add_subplot()
    marks: dict[str, str] = {}
    for (name, history), color in zip(histories.items(), cycle(_COLORS), strict=False):
        if history.last is None:
            axes.plot([], [], color=color, label=f"{name}: {_NO_STEP}")
            continue
        skipped = f"{history.num_skipped:,} of {history.num_attempted:,} steps skipped{describe_fallbacks(history)}"
        for record in history.fallbacks:
            _mark_fallback(axes, record, color)
        _curve(axes, history, color=color, label=f"{name}: {skipped}")
        for label, marker, records in zip(("overflow", "loss not finite"), "vx", _skips(history), strict=True):
            if records:
                _mark(axes, records, marker, color)
                marks[f"skipped: {label}"] = marker
        replay = (replays or {}).get(name)
        if replay is not None:
            _curve(axes, replay.optimistic, color=color, linestyle="--", linewidth=1)
            _curve(axes, replay.pessimistic, color=color, linestyle=":", linewidth=1)
    for label, marker in marks.items():
        axes.plot([], [], linestyle="none", marker=marker, markersize=4, color="gray", label=label)
    for label, linestyle in (("replayed: no undecided step overflows", "--"), ("replayed: all of them do", ":")):
        if replays:
            axes.plot([], [], linestyle=linestyle, linewidth=1, color="gray", label=label)
    if any(history.last is not None for history in histories.values()):
        longest = max(len(text) for text in axes.get_legend_handles_labels()[1])
        _finish(figure, axes, columns=2 if longest < 60 else 1)
    else:
        say_empty(axes, _NO_STEP)
    return _named(figure, axes, "Loss scale", path)


def _curve(axes: Any, history: ScaleHistory, **style: Any) -> None:
    """Draw the scale; steps at which nothing changed are not stored, each record has the scale around its own step.

    From a fallback on it is 1, and no line leads there: the scale did not rise or fall to it, it is gone.
    """
    changes = {record.index for record in history.fallbacks}
    steps: list[float] = []
    scales: list[float] = []
    for r in history:
        if r.index in changes:
            steps.append(r.index)
            scales.append(float("nan"))
        steps += [r.index, r.index + 1, r.index + 1]
        scales += [r.scale, r.scale, r.next_scale]
    axes.plot(steps, scales, **style)


def _mark_fallback(axes: Any, record: StepRecord, color: str, label: str | None = None) -> None:
    axes.axvline(record.index, linestyle="-.", linewidth=1.2, color=color, label=label)


def _skips(history: ScaleHistory) -> tuple[list[StepRecord], list[StepRecord]]:
    """Return the steps that were skipped because gradients overflowed, and because the loss was not finite."""
    skipped = [r for r in history if r.skipped]
    return [r for r in skipped if r.reason == "gradient"], [r for r in skipped if r.reason == "loss"]


def _mark(axes: Any, records: Sequence[StepRecord], marker: str, color: str, label: str | None = None) -> None:
    if records:
        axes.plot(
            [r.index for r in records],
            [r.scale for r in records],
            linestyle="none",
            marker=marker,
            markersize=6 if len(records) <= _MANY else 2,
            color=color,
            label=label,
        )


def _finish(figure: Figure, axes: Any, columns: int = 4) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.set_yscale("log", base=2)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda step, _: f"{step:,.0f}"))
    figure.legend(loc="outside lower center", ncols=columns, fontsize="small", markerscale=1.5, frameon=False)


def _named(figure: Figure, axes: Any, title: str, path: str | os.PathLike[str] | None) -> Figure:
    axes.set_xlabel("optimizer steps attempted")
    axes.set_ylabel("loss scale")
    axes.set_title(title, fontsize="medium")
    return saved(figure, path)
