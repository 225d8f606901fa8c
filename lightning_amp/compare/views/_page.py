"""A report as one HTML page that loads nothing from elsewhere: what is said, and in which order.

Jinja2 escapes what users name; `report.html.j2` is the page, `report.css` its style sheet.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Sequence
from importlib import resources
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from lightning_amp._text import counted, rounded
from lightning_amp.compare._arm import Arm, ArmMetric, mean
from lightning_amp.compare._judge import Judgement
from lightning_amp.compare._run import ArmRun
from lightning_amp.compare.views import _charts, _words
from lightning_amp.compare.views._svg import swatch
from lightning_amp.compare.views._words import NONE, figure, metric_names, signed

if TYPE_CHECKING:
    from markupsafe import Markup

_MARKS = {
    "not worse": ("\N{CHECK MARK}", "good"),
    "worse": ("\N{MULTIPLICATION X}", "bad"),
    "undecided": ("?", "open"),
    "failed": ("!", "bad"),
}
"""What stands before a verdict, and its class in the style sheet; not by colour alone."""

_READING = (
    "An arm is `not worse` in a metric if its mean cost, paired by seed, is shown to be below the margin (a one-sided"
    " t-test at 5 %, corrected after Holm for all arms and metrics together), and `worse` if it is shown to be above."
    " Everything else is `undecided`: too few seeds, or seeds that differ too much; fewer than three never decide."
)
_READING_OF_CONTROL = (
    " A cost no larger than the control's is run-to-run noise: only the last bit of the initial weights differs there."
)

_LONGEST_REASON = 150  # characters of an error that are shown beside a verdict; the table has all

_NUMBER, _WHOLE = re.compile(r"[-+]?\d[\d.]*e[-+]\d+"), r'<span class="whole">\g<0></span>'

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_CONTROLS = dict.fromkeys((*range(9), 11, 12, *range(14, 32), 127))


def page(report: Judgement) -> str:
    """Write the page.

    Raises:
        ModuleNotFoundError: Without Jinja2, which torch brings.

    """
    try:
        from jinja2 import Environment, StrictUndefined
        from markupsafe import Markup
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("The page needs Jinja2, which is not installed. Run `pip install jinja2`.") from error

    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    environment.filters |= {"code": _code, "svg": Markup}
    text = environment.from_string(_resource("report.html.j2")).render(
        css=Markup(_resource("report.css")), swatch=swatch, **_content(report)
    )
    # What an error may hold: a terminal's colours, which no browser shows, and lone surrogates, which no file takes.
    return _COLOURS.sub("", text).translate(_CONTROLS).encode("utf-8", "replace").decode("utf-8")


def _resource(name: str) -> str:
    return resources.files("lightning_amp.compare.views").joinpath(name).read_text(encoding="utf-8")


def _code(text: str) -> Markup:
    """Escape a text, turn what stands between backticks into code, and keep numbers on one line."""
    from markupsafe import Markup, escape

    parts = re.split(r"`([^`]+)`", text)
    return Markup("").join(
        Markup("<code>{}</code>").format(part) if i % 2 else Markup(_NUMBER.sub(_WHOLE, str(escape(part))))
        for i, part in enumerate(parts)
    )


def _content(report: Judgement) -> dict[str, Any]:
    """Return what the template takes."""
    lead, *rest = report.recommendation.sentences
    names = metric_names(report)
    return {
        "report": report,
        "arms": list(report.arms.values()),
        "styles": _charts.styles(report),
        "legend": _legend(report),
        "lead": lead,
        "rest": " ".join(rest),
        "cards": [_card(report, name) for name in names],
        "quality_columns": _QUALITY_COLUMNS,
        "quality": [_quality(report, name) for name in names],
        "cost_columns": _words.ARM_COLUMNS[1:],
        "cost": {arm.label: _words.arm_row(arm)[1:] for arm in report.arms.values()},
        "failures": {arm.label: _failures(arm) for arm in report.arms.values()},
        "differences": _charts.difference_charts(report),
        "curves": _charts.curve_charts(report),
        "rounding": [table for name in names if (table := _rounding(report, name)).rows],
        "scales": _charts.scale_charts(report),
        "facts": _facts(report),
        "notes": _words.notes(report),
        "reading": _READING + (_READING_OF_CONTROL if report.plan.control else ""),
    }


def _legend(report: Judgement) -> dict[str, list[str]]:
    """Return the arms that have curves, by style; two have the same one only where there are very many."""
    found: dict[str, list[str]] = {}
    for label, style in _charts.styles(report).items():
        if any(run.loss or run.curves for run in report.arms[label].finished):
            found.setdefault(style, []).append(label)
    return found


# -- verdicts ----------------------------------------------------------------------------------------------------------


class Line(NamedTuple):
    """A verdict: what it begins with, which decides its mark, and why."""

    label: str
    mark: str
    kind: str
    head: str
    why: str


class Card(NamedTuple):
    """The verdicts on one metric, and how far two runs of the reference are apart."""

    name: str
    note: str
    lines: list[Line]
    control: str


def _card(report: Judgement, name: str) -> Card:
    lines: list[Line] = []
    control = ""
    for arm in report.arms.values():
        metric = arm.metrics.get(name)
        if arm.is_control:
            words = NONE if metric is None else _charts.difference_in_words(metric)
            control = "" if words == NONE else words
        elif not arm.is_reference:
            lines.append(_verdict(arm, metric))
    return Card(name, _charts.describe(report, name), lines, control)


def _verdict(arm: Arm, metric: ArmMetric | None) -> Line:
    if not arm.finished:
        why = " ".join(next(iter(arm.errors.values()), "it did not run").split())
        head, why = "failed", textwrap.shorten(why, _LONGEST_REASON, placeholder=" ...")
    elif metric is None:
        head, why = "no margin", "this arm did not log it"
    else:
        head = metric.verdict.claim
        why = metric.verdict.reason or f"difference {_charts.difference_in_words(metric)}"
    mark, kind = _MARKS.get(head, ("\N{EN DASH}", "none"))
    return Line(arm.label, mark, kind, head, why)


# -- tables ------------------------------------------------------------------------------------------------------------


_QUALITY_COLUMNS = [
    "final",
    "best",
    "difference (90 % interval)",
    "time to the reference's quality (within the margin)",
]


class Table(NamedTuple):
    """Rows of one metric: the label of an arm, and its cells."""

    name: str
    note: str
    rows: dict[str, list[str]]


def _quality(report: Judgement, name: str) -> Table:
    rows: dict[str, list[str]] = {}
    for label, metric in _charts.metrics_of(report, name).items():
        difference = "reference" if report.arms[label].is_reference else _charts.difference_in_words(metric)
        best = figure(metric.best) if metric.bests else NONE
        rows[label] = [figure(metric.final), best, difference, _time_to_quality(metric)]
    return Table(name, _charts.describe(report, name), rows)


def _time_to_quality(metric: ArmMetric) -> str:
    """Write the median time over seeds, and how many of them got there."""
    times = list(metric.time_to_quality_s.values())
    reached = [time for time in times if math.isfinite(time)]
    if not reached:
        return "never" if times else NONE
    text = _duration(median(reached))
    return text if len(reached) == len(times) else f"{text}, {len(reached)} of {counted(len(times), 'seed')}"


def _rounding(report: Judgement, name: str) -> Table:
    """Divide the difference to the reference into what rounding in the evaluation does, and what training did."""
    metrics = _charts.metrics_of(report, name)
    reference = metrics.get(report.plan.reference)
    rows: dict[str, list[str]] = {}
    for label, metric in metrics.items():
        found = list(metric.evaluation_diff.values())
        if not found or report.arms[label].is_control:
            continue
        spread = f" ({signed(min(found))} to {signed(max(found))})" if min(found) < max(found) else ""
        trained = "reference"
        if label != report.plan.reference:
            trained = NONE if reference is None else _trained(report.arms[label], metric, reference)
        rows[label] = [f"{signed(mean(found))}{spread}", trained]
    return Table(name, _charts.describe(report, name), rows)


def _trained(arm: Arm, metric: ArmMetric, reference: ArmMetric) -> str:
    """Write the mean difference of the last weights, both evaluated in fp32; nothing if those were not compared."""
    left: list[float] = []
    for run in arm.finished:
        seed = run.seed
        if seed not in metric.evaluation_diff or seed not in reference.evaluation_diff:
            continue
        if run.same_weights[metric.name][0] != metric.finals[seed]:
            return NONE  # an earlier validation was compared
        own = metric.finals[seed] - metric.evaluation_diff[seed]
        left.append(own - (reference.finals[seed] - reference.evaluation_diff[seed]))
    return signed(mean(left)) if left else NONE


class Failure(NamedTuple):
    """An error, the seeds that it ended, and what the first of them printed."""

    seeds: str
    error: str
    log: str


def _failures(arm: Arm) -> list[Failure]:
    """Return the failed runs of an arm, those with the same error together."""
    by_error: dict[str, list[ArmRun]] = {}
    for run in arm.runs:
        if run.error is not None:
            by_error.setdefault(run.error, []).append(run)
    return [
        Failure(f"seed{'s' * (len(runs) > 1)} {', '.join(str(run.seed) for run in runs)}", error, runs[0].log)
        for error, runs in by_error.items()
    ]


# -- what ran where ----------------------------------------------------------------------------------------------------


class Fact(NamedTuple):
    """A word and what there is to say about it, a line each."""

    name: str
    lines: Sequence[str]


def _facts(report: Judgement) -> list[Fact]:
    plan, arms = report.plan, list(report.arms.values())
    runs = [run for arm in arms for run in arm.runs]
    found = [
        Fact("Arms", [f"`{arm.label}`: {_description(arm)}" for arm in arms]),
        Fact("Trainer", [", ".join(f"`{name}={value}`" for name, value in plan.trainer_kwargs.items()) or "defaults"]),
    ]
    if runs:
        training, total = sum(run.train_s for run in runs), sum(run.total_s for run in runs)
        text = f"{len(runs):,}, each in a fresh process: {_duration(training)} of training, {_duration(total)} in all"
        found.append(Fact("Runs", [text]))
    return found


def _description(arm: Arm) -> str:
    ran_as = "; ".join(dict.fromkeys(run.precision for run in arm.finished))
    return f"{arm.description}, ran as {ran_as}" if ran_as else arm.description


def _duration(seconds: float) -> str:
    unit = _charts.unit_of_time(seconds)
    return f"{rounded(seconds / unit.seconds)} {unit.name}"
