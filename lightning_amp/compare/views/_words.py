"""A judgement as text: Markdown that a terminal and a pull request show alike."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

from lightning_amp._plain_data import Table, code, line
from lightning_amp._text import counted, exact, named, rounded
from lightning_amp._text import memory as bytes_in_words
from lightning_amp.compare._arm import Arm, ArmMetric, mean
from lightning_amp.compare._judge import Judgement
from lightning_amp.compare._plan import CONTROL

NONE = "-"
_CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\ud800-\udfff]")  # colours of a terminal, halves of characters


def markdown(report: Judgement) -> str:
    """Write what :meth:`PrecisionReport.to_markdown` returns."""
    return _CONTROL.sub("\ufffd", "\n\n".join(map(str, blocks(report))) + "\n")


def blocks(report: Judgement) -> list[str | Table]:
    """Return the recommendation, the tables of metrics and arms, what failed, and how it was measured."""
    arms = list(report.arms.values())
    parts: list[str | Table] = [report.recommendation.sentence]
    names = metric_names(report)
    if names:
        rows = [metric_row(arm, arm.metrics[name]) for name in names for arm in arms if name in arm.metrics]
        parts.append(_one_line_table(METRIC_COLUMNS, rows))
    parts.append(_one_line_table(ARM_COLUMNS, [arm_row(arm) for arm in arms]))
    errors = [f"- {code(arm.label)}, seed {seed}: {line(text)}" for arm in arms for seed, text in arm.errors.items()]
    if errors:
        parts += ["Failed:", "\n".join(errors)]
    return [*parts, line(notes(report))]


def _one_line_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Return a table whose cells hold no line ends and no colours, whatever users name their arms."""
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
    interval = NONE
    low, high = (None, None) if difference is None else difference.bounds()
    if low is not None and high is not None and math.isfinite(low) and math.isfinite(high):
        interval = f"{signed(low)} to {signed(high)}"
    return [
        metric.name,
        arm.label,
        figure(metric.final) if metric.finals else NONE,
        figure(metric.best) if metric.bests else NONE,
        NONE if difference is None or difference.mean is None else signed(difference.mean),
        interval,
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
    times, speeds = arm.step_s, arm.samples_per_s
    return [
        arm.label,
        "; ".join(dict.fromkeys(run.precision for run in arm.finished)) or NONE,
        NONE if speeds is None else f"{speeds.median:,.0f}" if speeds.median >= 100 else rounded(speeds.median),
        NONE
        if times is None
        else f"{rounded(1e3 * times.median)} ({rounded(1e3 * times.q25)} to {rounded(1e3 * times.q75)})",
        NONE if arm.speed is None else str(arm.speed),
        memory(arm.peak_memory_bytes),
        f"{arm.num_steps:,}",
        f"{arm.num_skipped:,}",
        ", ".join(dict.fromkeys(exact(scale) for scale in arm.final_scales)) or NONE,
        products(arm),
    ]


def notes(report: Judgement) -> str:
    """Say how the figures were obtained, in sentences."""
    plan = report.plan
    arms = list(report.arms.values())
    runs = [run for arm in arms for run in arm.finished]
    seeds = f"seed {plan.seed}" if plan.num_seeds == 1 else f"seeds {plan.seeds[0]} to {plan.seeds[-1]}"
    lines = [f"{counted(len(plan.arms), 'arm')}, {seeds}, {code(plan.make_module)} on {code(plan.make_data)}."]
    if plan.control:
        lines.append(
            "The control repeats the reference with the initial weights moved in their last bit. Its difference is the"
            " least that two runs of the reference differ by, and its speed shows how busy the machine was."
        )
    elif plan.num_seeds == 1:
        lines.append("One seed never decides: training is chaotic, and two runs of one precision differ as well.")
    fell_back = [arm for arm in arms if any(run.fell_back for run in arm.finished)]
    if fell_back:
        several = plan.num_seeds > 1
        which = named([arm.label for arm in fell_back])
        where = f" with {'some of its' if len(fell_back) == 1 else 'some of their'} seeds" if several else ""
        lines.append(
            f"{which} was stuck{where} and fell back to another precision (`fallback`): the figures are of both"
            " precisions together."
        )
    if any(arm.step_s is not None for arm in arms):
        lines.append(
            "Times are of steady training steps, with their middle half: without the first steps, the compilation, and"
            " the validation."
        )
        lines.append(_about_speed(report))
    memory_of = {arm.memory_of for arm in arms} - {None}
    if memory_of:
        whose = "the device's own count" if memory_of == {"device"} else "what tensors held on the CPU"
        lines.append(f"Peak memory is {whose}, in training.")
    if runs:
        tf32 = "TF32 was allowed in fp32" if any(run.tf32 for run in runs) else "TF32 was off"
        found = dict.fromkeys(f"{name} {version}" for run in runs for name, version in run.versions.items())
        devices = dict.fromkeys(run.device for run in runs)
        lines.append(f"Ran on {' and '.join(devices)}; {tf32}; {', '.join(found)}.")
    return " ".join(lines)


def _about_speed(report: Judgement) -> str:
    """Say what a speed rests on, and what the control tells about the machine."""
    text = (
        "A speed compares times of the same steps, seed by seed; in brackets is the 95 % interval over the seeds."
        if report.plan.num_seeds > 1
        else "With one seed, a speed is one run of each arm: repeat it with more seeds to see how much it varies."
    )
    control = report.arms[CONTROL].speed if report.plan.control else None
    if control is None or not control.differs:
        return text
    return (
        f"{text} The machine was busy: the control, which computes what the reference computes, was {control}. Every"
        " interval of a speed is wider by that factor."
    )


def figure(value: float) -> str:
    """Write a metric to five digits."""
    return f"{value:.5g}"


def signed(value: float) -> str:
    """Write a difference with its sign, to three digits; `0` if there is none."""
    return "0" if value == 0 else "nan" if math.isnan(value) else f"{value:+.3g}"


def memory(value: int | None) -> str:
    """Write bytes in MiB or GiB."""
    return NONE if value is None else bytes_in_words(value)


def products(arm: Arm) -> str:
    """Write the shares of matrix products by dtype: `98 % float16, 2 % float32`."""
    return ", ".join(f"{100 * share:.0f} % {name}" for name, share in arm.matmul_flops.items()) or NONE
