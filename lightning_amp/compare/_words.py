"""Write a report: one sentence to act on, verdicts, one table of figures, errors and notes."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Mapping, Sequence
from statistics import median

from lightning_amp._plain_data import Table, code, line
from lightning_amp._text import counted, exact, listed, memory, rounded
from lightning_amp.compare._arm import Arm, ArmMetric, mean
from lightning_amp.compare._run import Plan, Run
from lightning_amp.compare._stats import INTERVAL, LEAST_PAIRS, Difference, in_words, seeds_for_speed
from lightning_amp.measure import SAME_WITHIN, times_as_fast

NONE = "-"

_SMALLER = 0.95
"""A peak of memory below this share of the reference's is called smaller: allocators round, and batches differ."""

_CONTROL = re.compile(r"\x1b\[[0-9;]*m|[\x00-\x09\x0b-\x1f\x7f-\x9f\ud800-\udfff]")  # colours, lone surrogates

# -- the parts of a report ---------------------------------------------------------------------------------------------


def markdown(plan: Plan, arms: Mapping[str, Arm]) -> str:
    """Write the text of :meth:`PrecisionReport.to_markdown`."""
    header, *rows = table(arms)
    parts = [
        " ".join(recommend(list(arms.values()))[1]),
        "\n".join(f"- {label_and_metric}: {text}" for label_and_metric, text in verdict_lines(arms)),
        str(Table(header, rows)),
        "\n".join(f"- failed: {code(run.name)}: {line(run.error or '')}" for run in failures(arms)),
        " ".join(notes(plan, arms)),
    ]
    return "\n\n".join(filter(None, (clean(part) for part in parts))) + "\n"


def clean(text: str) -> str:
    """Replace what neither a terminal nor a browser should get: colours, control characters, lone surrogates."""
    return _CONTROL.sub("\ufffd", text)


def failures(arms: Mapping[str, Arm]) -> list[Run]:
    """Return the runs that failed or left no record."""
    return [run for arm in arms.values() for run in arm.runs if not run.finished]


def verdict_lines(arms: Mapping[str, Arm]) -> list[tuple[str, str]]:
    """Return each arm and metric with a margin, and its verdict as a sentence."""
    return [
        (f"{code(arm.label)}, {code(metric.name)}", str(metric.verdict))
        for arm in arms.values()
        for metric in arm.judged()
        if not arm.is_reference
    ]


def table(arms: Mapping[str, Arm]) -> list[list[str]]:
    """Return the rows of the table of figures: a column for each arm, and its header first."""
    header = ["", *(f"{arm.label} (reference)" if arm.is_reference else arm.label for arm in arms.values())]
    rows: list[list[str]] = []
    for name in dict.fromkeys(name for arm in arms.values() for name in arm.metrics):
        found = [arm.metrics.get(name) for arm in arms.values()]
        cells = [_metric_cells(metric) for metric in found]
        rows += [[f"{name}{what and f': {what}'}", *(cell[what] for cell in cells)] for what in cells[0]]
    columns = [_arm_cells(arm) for arm in arms.values()]
    rows += [[what, *(column[what] for column in columns)] for what in columns[0]]
    return [header, *(row for row in rows if set(row[1:]) != {NONE})]


def _metric_cells(metric: ArmMetric | None) -> dict[str, str]:
    if metric is None:
        return dict.fromkeys(("", "best", "difference", "same weights, minus fp32", "time to the reference"), NONE)
    return {
        "": f"{metric.final:.5g}" if metric.finals else NONE,
        "best": f"{metric.best:.5g}" if metric.bests else NONE,
        "difference": NONE if metric.difference is None else difference_in_words(metric.difference),
        "same weights, minus fp32": signed(mean(metric.evaluation_diff.values())) if metric.evaluation_diff else NONE,
        "time to the reference": _time_to_quality(metric),
    }


def _arm_cells(arm: Arm) -> dict[str, str]:
    times, speeds, peak = arm.step_s, arm.samples_per_s, arm.peak_memory_bytes
    in_ms = [] if times is None else [rounded(1e3 * time) for time in times]
    return {
        "speed": str(arm.speed) if arm.speed else f"not compared: {arm.not_compared}" if arm.not_compared else NONE,
        "samples/s": NONE if speeds is None else rounded(speeds.median),
        "ms per step (middle half)": f"{in_ms[1]} ({in_ms[0]} to {in_ms[2]})" if in_ms else NONE,
        "peak memory": NONE if peak is None else memory(peak),
        "steps applied": f"{arm.num_steps:,}",
        "steps skipped": f"{arm.num_skipped:,}",
        "loss scale": ", ".join(dict.fromkeys(exact(scale) for scale in arm.final_scales)) or NONE,
        "products in": ", ".join(f"{100 * share:.0f} % {name}" for name, share in arm.matmul_flops.items()) or NONE,
        "ran as": "; ".join(dict.fromkeys(run.precision for run in arm.finished)) or NONE,
    }


def difference_in_words(difference: Difference) -> str:
    """Write a mean difference and its interval: `+0.0012 (-0.001 to +0.0034)`."""
    if difference.mean is None:
        return NONE
    if not math.isfinite(difference.mean):
        return "not finite"
    bounds = difference.bounds
    return signed(difference.mean) + ("" if bounds is None else f" ({signed(bounds[0])} to {signed(bounds[1])})")


def signed(value: float) -> str:
    """Write a difference with its sign, to three digits; `0` if there is none."""
    return "0" if value == 0 else "nan" if math.isnan(value) else f"{value:+.3g}"


def _time_to_quality(metric: ArmMetric) -> str:
    """Write the median time over the seeds that reached the reference's final value, and the number of these seeds."""
    times = list(metric.time_to_quality_s.values())
    reached = [time for time in times if math.isfinite(time)]
    if not reached:
        return "never" if times else NONE
    text = f"{rounded(median(reached))} s"
    return text if len(reached) == len(times) else f"{text}, {len(reached)} of {counted(len(times), 'seed')}"


def notes(plan: Plan, arms: Mapping[str, Arm]) -> list[str]:
    """Write how the figures were measured, in sentences."""
    runs = [run for arm in arms.values() for run in arm.finished]
    seeds = f"seed {plan.seed}" if plan.num_seeds == 1 else f"seeds {plan.seeds[0]} to {plan.seeds[-1]}"
    lines = [f"{counted(len(plan.arms), 'arm')}, {seeds}, {code(plan.make_module)} on {code(plan.make_data)}."]
    if plan.num_seeds > 1:
        lines.append(f"In brackets after a difference or a speed is its {INTERVAL} over the seeds.")
    if plan.control:
        lines.append(
            "The control is the reference with its initial weights moved in their last bit. Its difference is"
            " the run-to-run noise of the reference."
        )
        if busy := _busy(list(arms.values())):
            lines.append(f"The machine was busy: {busy}. So every interval of a speed is wider by that factor.")
    memory_of = {arm.memory_of for arm in arms.values()} - {None}
    if memory_of:
        whose = "the device's own count" if memory_of == {"device"} else "the memory of tensors on the CPU"
        lines.append(f"Peak memory is {whose}, in training.")
    if runs:
        tf32 = "TF32 was allowed in fp32" if any(run.tf32 for run in runs) else "TF32 was off"
        found = dict.fromkeys(f"{name} {version}" for run in runs for name, version in run.versions.items())
        devices = dict.fromkeys(run.device for run in runs)
        lines.append(f"Ran on {' and '.join(devices)}; {tf32}; {', '.join(found)}.")
    return [line(text) for text in lines]


# -- the recommendation ------------------------------------------------------------------------------------------------


def recommend(arms: Sequence[Arm]) -> tuple[str | None, list[str]]:
    """Recommend the fastest arm that was shown to be not worse in all metrics with a margin.

    An arm is faster if the interval of its speed shows it. Memory counts only if the speed is shown to be the same.

    Returns:
        Its label, or `None` if the runs do not show which arm to use, and sentences with the reason. The first sentence
        is the recommendation.

    """
    reference, others = arms[0], [arm for arm in arms[1:] if not arm.is_control]
    name, obstacle = code(reference.label), _obstacle(reference, others)
    if obstacle:
        return None, [f"No recommendation: {obstacle}."]
    gaining = {arm.label: (arm, gain) for arm in others if arm.is_fine and (gain := _gain(arm, reference))}
    busy = _busy(arms)
    open_ = {arm.label: question for arm in others if (question := _question(arm, reference, busy))}
    if gaining:
        best, gain = max(
            gaining.values(), key=lambda found: (_ratio(found[0]) or 0.0, -(found[0].peak_memory_bytes or 0))
        )
        reasons = f"{gain} and is not worse in {_names(best.judged())} within the margin"
        limits = [(metric.name, metric.verdict.bounds) for metric in best.judged()]
        known = [f"{rounded(bounds[1])} in {code(metric)}" for metric, bounds in limits if bounds and bounds[1] > 0]
        changes = f"A margin below {' or '.join(known)} would" if known else "Other data or longer training could"
        also = f"; {listed(list(map(code, open_)))} may be better, but this is not decided yet" if open_ else ""
        return best.label, [f"Use {code(best.label)}: it {reasons}.", f"{changes} change that{also}."]
    if open_:
        return None, [f"Stay with {name} for now: {'; '.join(open_.values())}."]
    reasons = "; ".join(_why_not(arm) for arm in others)
    if any(arm.is_fine for arm in others):
        remedy = "A larger model, or a device that computes in half precision, could change that."
    elif any(arm.finished for arm in others):
        remedy = "Larger margins could change that, or an arm with `fp32_modules`."
    else:
        remedy = "Failed runs are not judged: mend the error, and call again."
    return reference.label, [f"Stay with {name}: {reasons}.", remedy]


def _obstacle(reference: Arm, others: Sequence[Arm]) -> str:
    """Return why no arm can be recommended, whatever the results of the other arms are; empty without a reason."""
    name = code(reference.label)
    if not others:
        return f"{name} is the only arm; add a precision to compare it with"
    if not reference.finished:
        return f"the reference, {name}, {_failure(reference)}"
    if not reference.metrics:
        return f"the reference, {name}, logged no metric in validation, by which precisions could be compared"
    if not any(arm.judged() for arm in (reference, *others)):
        known = [metric.name for metric in reference.metrics.values() if metric.direction is not None]
        example = code((known or list(reference.metrics))[0])
        few = ", and run at least three seeds" if len(reference.runs) < LEAST_PAIRS else ""
        return f"no margin says what a precision may cost; give one, for example 0.01 for {example}{few}"
    return ""


def _busy(arms: Sequence[Arm]) -> str:
    """Write how busy the machine was, by the speed of the control; empty if that is as fast within 5 %."""
    speed = next((arm.speed for arm in arms if arm.is_control), None)
    if speed is None or 1 / SAME_WITHIN <= speed.ratio <= SAME_WITHIN:
        return ""
    return f"the control, which computes the same as the reference, was {times_as_fast(speed.ratio)}"


def _question(arm: Arm, reference: Arm, busy: str) -> str:
    """Write what is not known about an arm, and what would decide it; empty if the arm is decided."""
    name, undecided = code(arm.label), arm.judged("undecided")
    if not arm.finished or arm.judged("worse") or (not undecided and _ratio(arm) is not None):
        return ""
    if undecided:
        return f"{name} is undecided in {_names(undecided)}{_skipped(arm)}: {undecided[0].verdict.reason}"
    less = f" and {_memory(arm, reference)}" if _memory_ratio(arm, reference) < _SMALLER else ""
    if arm.speed is None:
        return f"{name} is not worse{less}, but its speed was not compared: {arm.not_compared}"
    interval = f" ({arm.speed.interval})" if arm.speed.interval else ""
    why = f"{busy}; run again on a quiet machine" if busy else f"run {in_words(seeds_for_speed(arm.speed))} seeds"
    return f"{name} is not worse{less}, but its speed is undecided{interval}: {why}"


def _why_not(arm: Arm) -> str:
    name, worse = code(arm.label), arm.judged("worse")
    if not arm.finished:
        return f"{name} {_failure(arm)}"
    if worse:
        return f"{name} is worse in {_names(worse)}{_skipped(arm)}"
    is_slower = arm.speed is not None and arm.speed.claim == "slower"
    return f"{name} is not worse, but {arm.speed if is_slower else 'neither faster nor smaller'}"


def _skipped(arm: Arm) -> str:
    steps = arm.num_skipped + arm.num_steps
    return f", and skipped {arm.num_skipped:,} of {steps:,} steps" if arm.num_skipped else ""


def _gain(arm: Arm, reference: Arm) -> str:
    """Write the gain of an arm in speed or memory; empty without one."""
    ratio, memory = _memory_ratio(arm, reference), _memory(arm, reference)
    speed = f"is {arm.speed.in_words('the reference')}" if arm.speed else ""
    if arm.speed is not None and arm.speed.claim == "faster":
        return f"{speed}, {memory}" if not _SMALLER < ratio < 1 / _SMALLER else speed
    return f"{memory}, {speed}" if arm.speed is not None and arm.speed.claim == "same" and ratio < _SMALLER else ""


def _memory(arm: Arm, reference: Arm) -> str:
    ratio = _memory_ratio(arm, reference)
    return f"needs {100 * abs(1 - ratio):.0f} % {'less' if ratio < 1 else 'more'} memory"


def _memory_ratio(arm: Arm, reference: Arm) -> float:
    own, theirs = arm.peak_memory_bytes, reference.peak_memory_bytes
    return own / theirs if own and theirs else 1.0


def _ratio(arm: Arm) -> float | None:
    """Return how many times as fast as the reference an arm is; `None` if that is undecided or was not measured."""
    return None if arm.speed is None else arm.speed.decided_ratio


def _failure(arm: Arm) -> str:
    text = textwrap.shorten(next(iter(arm.errors.values()), "it did not run"), 120, placeholder=" ...")
    return f"failed ({code(text)})"


def _names(metrics: Sequence[ArmMetric]) -> str:
    return listed([code(metric.name) for metric in metrics])
