"""Write a report as Markdown, for a terminal or a pull request."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

from lightning_amp._plain_data import Table, code, line
from lightning_amp._text import counted, exact, memory, rounded
from lightning_amp.compare._arm import Arm, ArmMetric, mean
from lightning_amp.compare._company import shared_a_device
from lightning_amp.compare._judge import Judgement
from lightning_amp.compare._plan import CONTROL
from lightning_amp.compare._run import ArmRun

NONE = "-"
_CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\ud800-\udfff]")  # matches terminal colours and lone surrogates


def markdown(report: Judgement) -> str:
    """Write the text of :meth:`PrecisionReport.to_markdown`."""
    return _CONTROL.sub("\ufffd", "\n\n".join(map(str, blocks(report))) + "\n")


def blocks(report: Judgement) -> list[str | Table]:
    """Return the recommendation, the tables of metrics and arms, the errors, and notes on the measurements."""
    arms = list(report.arms.values())
    parts: list[str | Table] = [report.recommendation.sentence]
    rows = [metric_row(arm, arm.metrics[name]) for name in metric_names(report) for arm in arms if name in arm.metrics]
    if rows:
        parts.append(_one_line_table(METRIC_COLUMNS, rows))
    parts.append(_one_line_table(ARM_COLUMNS, [arm_row(arm) for arm in arms]))
    errors = [f"- {code(arm.label)}, seed {seed}: {line(text)}" for arm in arms for seed, text in arm.errors.items()]
    if errors:
        parts += ["Failed:", "\n".join(errors)]
    return [*parts, line(notes(report))]


def _one_line_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Return a table whose cells hold no line ends and no colours, even if the user's labels contain some."""
    return Table(header, [[_CONTROL.sub("\ufffd", " ".join(cell.split())) for cell in row] for row in rows])


def metric_names(report: Judgement) -> list[str]:
    """Return the names of all metrics, in the order in which they were logged."""
    return list(dict.fromkeys(name for arm in report.arms.values() for name in arm.metrics))


METRIC_COLUMNS = [
    "metric",
    "arm",
    "final",
    "best",
    "difference",
    "90 % interval",
    "verdict",
    "same weights, minus fp32",
]


def metric_row(arm: Arm, metric: ArmMetric) -> list[str]:
    """Write the cells of one metric of one arm, for `METRIC_COLUMNS`."""
    difference = metric.difference
    bounds = None if difference is None else difference.bounds()
    has_interval = bounds is not None and all(map(math.isfinite, bounds))
    return [
        metric.name,
        arm.label,
        figure(metric.final) if metric.finals else NONE,
        figure(metric.best) if metric.bests else NONE,
        NONE if difference is None or difference.mean is None else signed(difference.mean),
        f"{signed(bounds[0])} to {signed(bounds[1])}" if bounds is not None and has_interval else NONE,
        str(metric.verdict),
        signed(mean(metric.evaluation_diff.values())) if metric.evaluation_diff else NONE,
    ]


ARM_COLUMNS = [
    "arm",
    "ran as",
    "samples/s",
    "ms per step",
    "speed",
    "peak memory",
    "steps",
    "skipped",
    "loss scale",
    "products in",
]


def arm_row(arm: Arm) -> list[str]:
    """Write the cells of one arm, for `ARM_COLUMNS`."""
    times, speeds, peak = arm.step_s, arm.samples_per_s, arm.peak_memory_bytes
    in_ms = [] if times is None else [rounded(1e3 * time) for time in times]
    return [
        arm.label,
        arm.ran_as or NONE,
        NONE if speeds is None else f"{speeds.median:,.0f}" if speeds.median >= 100 else rounded(speeds.median),
        f"{in_ms[1]} ({in_ms[0]} to {in_ms[2]})" if in_ms else NONE,
        _speed(arm),
        NONE if peak is None else memory(peak),
        f"{arm.num_steps:,}",
        f"{arm.num_skipped:,}",
        ", ".join(dict.fromkeys(exact(scale) for scale in arm.final_scales)) or NONE,
        ", ".join(f"{100 * share:.0f} % {name}" for name, share in arm.matmul_flops.items()) or NONE,
    ]


def _speed(arm: Arm) -> str:
    if arm.speed is not None:
        return str(arm.speed)
    return f"not compared: {arm.not_compared}" if arm.not_compared else NONE


def notes(report: Judgement) -> str:
    """Write how the figures were measured, in sentences."""
    plan = report.plan
    arms = list(report.arms.values())
    runs = [run for arm in arms for run in arm.finished]
    seeds = f"seed {plan.seed}" if plan.num_seeds == 1 else f"seeds {plan.seeds[0]} to {plan.seeds[-1]}"
    lines = [f"{counted(len(plan.arms), 'arm')}, {seeds}, {code(plan.make_module)} on {code(plan.make_data)}."]
    if plan.control:
        has_speed = report.arms[CONTROL].speed is not None
        lines.append(
            "The control is the reference with its initial weights moved in their last bit. Its difference shows the"
            f" run-to-run noise{', and its speed shows how busy the machine was' if has_speed else ''}."
        )
    elif plan.num_seeds == 1:
        lines.append("One seed never decides: training is chaotic, and two runs of one precision differ as well.")
    if any(arm.step_s is not None for arm in arms):
        lines.append(
            "Times are medians of steady training steps, with their middle half. The first steps, compilation and"
            " validation do not count."
        )
        lines.append(_about_speed(report))
    lines += _about_workers([run for arm in arms for run in arm.runs])
    memory_of = {arm.memory_of for arm in arms} - {None}
    if memory_of:
        whose = "the device's own count" if memory_of == {"device"} else "the memory of tensors on the CPU"
        lines.append(f"Peak memory is {whose}, in training.")
    if runs:
        tf32 = "TF32 was allowed in fp32" if any(run.tf32 for run in runs) else "TF32 was off"
        found = dict.fromkeys(f"{name} {version}" for run in runs for name, version in run.versions.items())
        devices = dict.fromkeys(run.device for run in runs)
        lines.append(f"Ran on {' and '.join(devices)}; {tf32}; {', '.join(found)}.")
    return " ".join(filter(None, lines))


def _about_workers(runs: Sequence[ArmRun]) -> list[str]:
    """Write which runs shared devices, and which were repeated."""
    lines: list[str] = []
    if any(shared_a_device(run, runs) for run in runs):
        lines.append("Runs that shared a device have the same bits as alone, but other times.")
    hosts = {run.host for run in runs if run.host}
    if len(hosts) > 1:
        lines.append(f"They ran on {len(hosts)} machines.")
    lines += [
        f"{code(run.label)}, seed {run.seed} was repeated: {run.first_attempt}." for run in runs if run.first_attempt
    ]
    return lines


def _about_speed(report: Judgement) -> str:
    """Write how speeds were compared, and whether the control shows that the machine was busy."""
    if report.plan.measure_speed == "off":
        return "Speeds were not compared."
    rounds = max((len(arm.speed_runs) for arm in report.arms.values()), default=0)
    if report.plan.measure_speed == "alone":
        return f"Times and speeds are of {counted(rounds, 'short run')} of each arm, alone on one device."
    if not any(arm.speed is not None for arm in report.arms.values()):
        return ""
    text = (
        "A speed compares times of the same steps, seed by seed; in brackets is the 95 % interval over the seeds."
        if report.plan.num_seeds > 1
        else "With one seed, a speed is one run of each arm. More seeds show how much it varies."
    )
    control = report.arms[CONTROL].speed if report.plan.control else None
    if control is None or not control.differs:
        return text
    return (
        f"{text} The machine was busy: the control, which computes the same as the reference, was {control}. So every"
        " interval of a speed is wider by that factor."
    )


def figure(value: float) -> str:
    """Write a metric to five digits."""
    return f"{value:.5g}"


def signed(value: float) -> str:
    """Write a difference with its sign, to three digits; `0` if there is none."""
    return "0" if value == 0 else "nan" if math.isnan(value) else f"{value:+.3g}"
