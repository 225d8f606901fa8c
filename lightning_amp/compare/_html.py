"""Write a report as one self-contained HTML page, with charts of matplotlib as inline SVG.

`report.html.j2` is the page, and `report.css` its style sheet. Jinja2 escapes the names that users chose.
"""

from __future__ import annotations

import io
import math
import re
import textwrap
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import resources
from typing import TYPE_CHECKING, Any

from lightning_amp.compare import _words
from lightning_amp.compare._arm import Arm
from lightning_amp.compare._run import Plan, Point, Run
from lightning_amp.compare._stats import INTERVAL

if TYPE_CHECKING:
    from markupsafe import Markup
    from matplotlib.axes import Axes

_INK, _RULE, _BAD, _CONTROL = "#000001", "#000002", "#000003", "#0000ff"
_ARMS = [f"#0000a{i}" for i in range(8)]
"""Colours of the charts. The page replaces each with a variable of its style sheet, which is light or dark."""

_VARIABLES = {_INK: "soft", _RULE: "rule", _BAD: "bad", _CONTROL: "control"} | {
    c: f"arm-{i}" for i, c in enumerate(_ARMS)
}

_DASHES = ["-", "--", ":", "-."]
_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "lightning_amp",  # the same page for the same report
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9,
    "text.parse_math": False,  # names of users may hold dollar signs
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.formatter.useoffset": False,
    **dict.fromkeys(["text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"], _INK),
    "grid.color": _RULE,
}

_MOST_POINTS = 150  # of a drawn line
_LOG_FROM = 30  # ratio of the largest to the smallest value from which on an axis is logarithmic
_FAR = 20  # a difference of more margins than this is cut off; on its scale all others would be one dot


def page(plan: Plan, arms: Mapping[str, Arm]) -> str:
    """Write the page.

    Raises:
        ModuleNotFoundError: If Jinja2 (torch installs it) or matplotlib is not installed.

    """
    try:
        import matplotlib as mpl
        from jinja2 import Environment, StrictUndefined
        from markupsafe import Markup
    except ModuleNotFoundError as error:
        text = f"The page needs {error.name}, which is not installed. Run `pip install matplotlib jinja2`."
        raise ModuleNotFoundError(text) from error

    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    environment.filters["code"] = _code
    files = resources.files("lightning_amp.compare")
    template, css = (files.joinpath(name).read_text(encoding="utf-8") for name in ("report.html.j2", "report.css"))
    with mpl.rc_context(_STYLE), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a font without the letters of a label: the browser has others
        charts = {name: [(note, Markup(svg)) for note, svg in found] for name, found in _charts(arms)}
    lead, *rest = _words.recommend(list(arms.values()))[1]
    text = environment.from_string(template).render(
        css=Markup(css),
        title=", ".join(plan.arms),
        lead=lead,
        rest=" ".join(rest),
        verdicts=_words.verdict_lines(arms),
        table=_words.table(arms),
        failures=_words.failures(arms),
        legend=[(label, _VARIABLES[_colour(label, arms)]) for label in arms],
        charts=charts,
        notes=" ".join(_words.notes(plan, arms)),
        plugins={label: arm.description for label, arm in arms.items()},
        trainer=", ".join(f"{name}={value}" for name, value in plan.trainer_kwargs.items()) or "defaults",
    )
    return _words.clean(text)


def _code(text: str) -> Markup:
    """Escape a text, and turn the parts between backticks into code."""
    from markupsafe import Markup

    parts = re.split(r"`([^`]+)`", text)
    return Markup("").join(Markup("<code>{}</code>").format(part) if i % 2 else part for i, part in enumerate(parts))


# -- charts ------------------------------------------------------------------------------------------------------------


def _charts(arms: Mapping[str, Arm]) -> Iterable[tuple[str, list[tuple[str, str]]]]:
    """Return the sections of charts: a heading, and SVG with a note for each chart."""
    names = dict.fromkeys(name for arm in arms.values() for name in arm.metrics)
    differences = [(name, _difference_chart(name, arms)) for name in names]
    yield (
        f"Differences to the reference, {INTERVAL} (dashed: the margin)",
        [(name, svg) for name, svg in differences if svg],
    )
    curves: list[tuple[str, str]] = []
    for name in names:
        curves += _curves(name, arms, lambda run, name=name: run.curves.get(name, ()))
    yield "Curves", curves + _curves("training loss", arms, lambda run: run.loss)
    scaled = [arm for arm in arms.values() if arm.final_scales]
    yield "Loss scale", [(f"{a.label}: {a.num_skipped:,} steps skipped (crosses)", _scale(a, arms)) for a in scaled]


def _difference_chart(name: str, arms: Mapping[str, Arm]) -> str:
    """Draw each arm's mean difference with its interval, the seeds as small dots, and the margin; empty without one."""
    found = [(arm, arm.metrics[name].difference) for arm in arms.values() if name in arm.metrics]
    rows = [(arm, d, d.mean) for arm, d in found if d is not None and d.mean is not None and math.isfinite(d.mean)]
    if not rows:
        return ""
    one = rows[0][0].metrics[name]

    def draw(axes: Axes) -> None:
        for row, (arm, difference, mean) in enumerate(rows):
            colour, bounds = _colour(arm.label, arms), difference.bounds
            below = [row + 0.25] * len(difference.values)
            axes.plot(difference.values, below, "o", color=colour, alpha=0.5, markersize=3)
            axes.plot([mean], [row], "o", color=colour, markersize=6)
            if bounds is not None:
                axes.plot(bounds, [row, row], "-", color=colour, linewidth=2)
        labels = [textwrap.shorten(arm.label, 24, placeholder="...") or arm.label[:24] for arm, _, _ in rows]
        axes.set_yticks(range(len(rows)), labels)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.locator_params(axis="x", nbins=5)
        axes.axvline(0, color=_INK, linewidth=1)
        if one.margin is not None and one.direction is not None:
            limit = one.margin if one.direction == "min" else -one.margin
            axes.axvline(limit, color=_BAD, linestyle="--")
            if one.margin > 0:
                low, high = axes.get_xlim()
                axes.set_xlim(max(low, -_FAR * one.margin), min(high, _FAR * one.margin))

    return _svg(draw, f"{name}: differences to the reference", 0.8 + 0.3 * len(rows))


def _curves(name: str, arms: Mapping[str, Arm], of: Callable[[Run], Sequence[Point]]) -> list[tuple[str, str]]:
    """Draw the curves of all runs over steps and over training time; nothing without a finite value."""
    lines = [(arm.label, of(run)) for arm in arms.values() for run in arm.finished if of(run)]
    values = [p.value for _, points in lines for p in points if math.isfinite(p.value)]
    if not values:
        return []
    is_log = min(values) > 0 and max(values) > _LOG_FROM * min(values)
    longest = max(point.train_s for _, points in lines for point in points)
    unit, seconds = ("s", 1.0) if longest < 300 else ("min", 60.0)

    def over(what: str, x: Callable[[Point], float]) -> tuple[str, str]:
        def draw(axes: Axes) -> None:
            for label, points in lines:
                kept = points[:: math.ceil(len(points) / _MOST_POINTS)]
                kept = kept if kept[-1] is points[-1] else [*kept, points[-1]]
                drawn = [p.value if abs(p.value) < 1e250 else math.nan for p in kept]
                style: dict[str, Any] = {
                    "zorder": 1 + (not arms[label].is_control),
                    "color": _colour(label, arms),
                    "linestyle": _DASHES[list(arms).index(label) % len(_DASHES)],
                }
                axes.plot([x(p) for p in kept], drawn, linewidth=1.2, marker="." if len(kept) == 1 else "", **style)
            if is_log:
                axes.set_yscale("log")
                axes.yaxis.set_major_formatter("{x:g}")
            axes.set_xlabel(what)

        return f"{name} over {what}", _svg(draw, f"{name} over {what}")

    return [
        over("training steps", lambda point: point.step),
        over(f"training time, {unit}", lambda point: point.train_s / seconds),
    ]


def _scale(arm: Arm, arms: Mapping[str, Arm]) -> str:
    def draw(axes: Axes) -> None:
        for run in arm.finished:
            corners = [(i, s) for r in run.scale for i, s in ((r.index, r.scale), (r.index + 1, r.next_scale))]
            axes.plot(*zip(*corners, strict=True), color=_colour(arm.label, arms), linewidth=1.2)
            skips = [(r.index, r.scale) for r in run.scale if r.skipped]
            if skips:
                axes.plot(*zip(*skips, strict=True), "x", color=_BAD, markersize=4)
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter(lambda value, _: f"2**{math.log2(value):.0f}")
        axes.set_xlabel("optimizer steps attempted")

    return _svg(draw, f"Loss scale of {arm.label}")


def _colour(label: str, arms: Mapping[str, Arm]) -> str:
    return _CONTROL if arms[label].is_control else _ARMS[list(arms).index(label) % len(_ARMS)]


def _svg(draw: Callable[[Axes], None], title: str, height: float = 2.2) -> str:
    """Return a chart as inline SVG; a screen reader reads the title."""
    from markupsafe import escape
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.4, height), layout="constrained")
    figure.patch.set_visible(False)
    axes = figure.subplots()
    axes.patch.set_visible(False)
    draw(axes)
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    svg = file.getvalue()
    svg = re.sub(r'<g id="[^"]*"', "<g", svg[svg.index("<svg ") :])
    svg = re.sub(r">[^<]*<|(\d\.\d\d)\d+", lambda found: found[1] or found[0], svg)  # hundredths of a pixel, no labels
    svg = re.sub(r"#0000[0af][0-7f]", lambda found: f"var(--{_VARIABLES.get(found[0], 'soft')})", svg)
    start = f'<svg role="img" aria-label="{escape(title)}" viewBox'
    svg = re.sub(r"<svg [^>]*viewBox", lambda _: start, svg, count=1)
    return svg.replace(">", f"><title>{escape(title)}</title>", 1)
