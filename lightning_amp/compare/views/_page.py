"""Write a report as one self-contained HTML page.

`report.html.j2` is the page, and `report.css` its style sheet. Jinja2 escapes the names that users chose.
"""

from __future__ import annotations

import math
import re
import textwrap
from importlib import resources
from statistics import median
from typing import TYPE_CHECKING, Any

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
"""The mark before a verdict, so that colour is not the only sign, and its class in the style sheet."""

_READING = (
    "The cost of an arm in a metric is its mean difference to the reference, paired by seed; a positive cost is worse."
    " The arm is `not worse` if its cost is shown to be below the margin, and `worse` if its cost is shown to be above."
    " The test is a one-sided t-test at 5 %, corrected after Holm for all arms and metrics together. Every other arm is"
    " `undecided`: there are too few seeds, or the seeds differ too much. Fewer than three seeds never decide."
)
_READING_OF_CONTROL = (
    " A cost no larger than the control's is run-to-run noise: only the last bit of the initial weights differs there."
)

_LONGEST_REASON = 150
"""Number of characters of an error that are shown next to a verdict; the table shows the whole error."""

_NUMBER, _WHOLE = re.compile(r"[-+]?\d[\d.]*e[-+]\d+"), r'<span class="whole">\g<0></span>'

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_CONTROLS = dict.fromkeys((*range(9), 11, 12, *range(14, 32), 127))


def page(report: Judgement) -> str:
    """Write the page.

    Raises:
        ModuleNotFoundError: If Jinja2 is not installed (torch installs it).

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
    # An error may hold a terminal's colours, which no browser shows, and lone surrogates, which cannot be written.
    return _COLOURS.sub("", text).translate(_CONTROLS).encode("utf-8", "replace").decode("utf-8")


def _resource(name: str) -> str:
    return resources.files("lightning_amp.compare.views").joinpath(name).read_text(encoding="utf-8")


def _code(text: str) -> Markup:
    """Escape a text, turn the parts between backticks into code, and keep numbers on one line."""
    from markupsafe import Markup, escape

    parts = re.split(r"`([^`]+)`", text)
    return Markup("").join(
        Markup("<code>{}</code>").format(part) if i % 2 else Markup(_NUMBER.sub(_WHOLE, str(escape(part))))
        for i, part in enumerate(parts)
    )


def _content(report: Judgement) -> dict[str, Any]:
    """Return the variables of the template."""
    lead, *rest = report.recommendation.sentences
    names = metric_names(report)
    styles = _charts.styles(report)
    legend: dict[str, list[str]] = {}  # two arms share a style only if there are many arms
    for label, arm in report.arms.items():
        if any(run.loss or run.curves for run in arm.finished):
            legend.setdefault(styles[label], []).append(label)
    return {
        "report": report,
        "arms": list(report.arms.values()),
        "notes_of": {name: _charts.describe(report, name) for name in names},
        "styles": styles,
        "legend": legend,
        "lead": lead,
        "rest": " ".join(rest),
        "cards": {name: _card(report, name) for name in names},
        "quality_columns": _QUALITY_COLUMNS,
        "quality": {name: _quality(report, name) for name in names},
        "cost_columns": _words.ARM_COLUMNS[1:],
        "cost": {arm.label: _words.arm_row(arm)[1:] for arm in report.arms.values()},
        "failures": {arm.label: _failures(arm) for arm in report.arms.values()},
        "differences": _charts.difference_charts(report),
        "curves": _charts.curve_charts(report),
        "rounding": {name: rows for name in names if (rows := _rounding(report, name))},
        "scales": _charts.scale_charts(report),
        "facts": _facts(report),
        "notes": _words.notes(report),
        "reading": _READING + (_READING_OF_CONTROL if report.plan.control else ""),
    }


# -- verdicts ----------------------------------------------------------------------------------------------------------


def _card(report: Judgement, name: str) -> dict[str, Any]:
    """Return the verdicts on one metric, and the difference between two runs of the reference."""
    control = next((arm.metrics[name] for arm in report.arms.values() if arm.is_control and name in arm.metrics), None)
    words = NONE if control is None else _charts.difference_in_words(control)
    compared = [arm for arm in report.arms.values() if not (arm.is_reference or arm.is_control)]
    return {
        "lines": [_verdict(arm, arm.metrics.get(name)) for arm in compared],
        "control": "" if words == NONE else words,
    }


def _verdict(arm: Arm, metric: ArmMetric | None) -> dict[str, str]:
    details = ""
    if not arm.finished:
        error = " ".join(next(iter(arm.errors.values()), "it did not run").split())
        head, why = "failed", textwrap.shorten(error, _LONGEST_REASON, placeholder=" ...")
    elif metric is None:
        head, why = "no margin", "this arm did not log it"
    else:
        head, details = metric.verdict.claim, metric.verdict.details
        why = metric.verdict.reason or f"difference {_charts.difference_in_words(metric)}"
    mark, kind = _MARKS.get(head, ("\N{EN DASH}", "none"))
    return {"label": arm.label, "mark": mark, "kind": kind, "head": head, "why": why, "details": details}


# -- tables: rows of cells, by the label of an arm ---------------------------------------------------------------------

_QUALITY_COLUMNS = [
    "final",
    "best",
    "difference (90 % interval)",
    "time to the reference's quality (within the margin)",
]


def _quality(report: Judgement, name: str) -> dict[str, list[str]]:
    rows: dict[str, list[str]] = {}
    for label, metric in _charts.metrics_of(report, name).items():
        difference = "reference" if report.arms[label].is_reference else _charts.difference_in_words(metric)
        best = figure(metric.best) if metric.bests else NONE
        rows[label] = [figure(metric.final), best, difference, _time_to_quality(metric)]
    return rows


def _time_to_quality(metric: ArmMetric) -> str:
    """Write the median time over the seeds that reached the target, and the number of these seeds."""
    times = list(metric.time_to_quality_s.values())
    reached = [time for time in times if math.isfinite(time)]
    if not reached:
        return "never" if times else NONE
    text = _duration(median(reached))
    return text if len(reached) == len(times) else f"{text}, {len(reached)} of {counted(len(times), 'seed')}"


def _rounding(report: Judgement, name: str) -> dict[str, list[str]]:
    """Split the difference from the reference into the effect of rounding in evaluation and the effect of training."""
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
    return rows


def _trained(arm: Arm, metric: ArmMetric, reference: ArmMetric) -> str:
    """Write the mean difference of the final weights, both evaluated in fp32, if those were compared with fp32."""
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


def _failures(arm: Arm) -> list[tuple[str, str, str]]:
    """Return the seeds, the error and the first log of each error of an arm."""
    by_error: dict[str, list[ArmRun]] = {}
    for run in arm.runs:
        if run.error is not None:
            by_error.setdefault(run.error, []).append(run)
    return [
        (f"seed{'s' * (len(runs) > 1)} {', '.join(str(run.seed) for run in runs)}", error, runs[0].log)
        for error, runs in by_error.items()
    ]


def _facts(report: Judgement) -> dict[str, list[str]]:
    """Return lines about the arms, the Trainer and the runs."""
    plan, runs = report.plan, [run for arm in report.arms.values() for run in arm.runs]
    trainer = ", ".join(f"`{name}={value}`" for name, value in plan.trainer_kwargs.items())
    found = {
        "Arms": [
            f"`{arm.label}`: {arm.description}{f', ran as {arm.ran_as}' if arm.ran_as else ''}"
            for arm in report.arms.values()
        ],
        "Trainer": [trainer or "defaults"],
    }
    if runs:
        training, total = sum(run.train_s for run in runs), sum(run.total_s for run in runs)
        times = f"{_duration(training)} of training, {_duration(total)} in all"
        text = f"{len(runs):,}, each in a process of its own: {times}"
        found["Runs"] = [text]
    return found


def _duration(seconds: float) -> str:
    unit = _charts.unit_of_time(seconds)
    return f"{rounded(seconds / unit.seconds)} {unit.name}"
