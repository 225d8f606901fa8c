"""Write the page: the articles' claims beside the measurements, then all tables, one section for each machine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from benchmarks._machine import Machine
from benchmarks.headline import _words
from benchmarks.headline._arms import ARMS
from benchmarks.headline._plan import Run, plan
from benchmarks.headline._records import Outcome, Record
from benchmarks.headline.models import MODELS, Model
from lightning_amp._text import rounded

NOT_YET = "not yet measured"

_Outcomes = dict[Run, Outcome]


def page(records: Sequence[Record]) -> str:
    """Write the page in Markdown.

    Args:
        records: Records of any machines. Records of different machines are never compared.

    """
    machines = sorted({record.machine for record in records}, key=lambda machine: (machine.tiny, machine))
    parts = [_words.TITLE]
    for machine in machines:
        parts += [*_section(machine, [record for record in records if record.machine == machine]), ""]
    if machines:
        parts += [_words.WHY, "", *_fixed_memory(), "", _words.HOW, "", *_sizes(), "", _words.RUN]
    else:
        parts += [f"**{NOT_YET.capitalize()}**: no GPU was available so far.", "", *_claims(None, {}), "", _words.RUN]
    return "\n".join(parts).rstrip() + "\n"


def _section(machine: Machine, records: Sequence[Record]) -> Iterable[str]:
    dates = sorted({record.date for record in records})
    outcomes = {record.run: record.outcome for record in records}
    yield f"## {machine.device}"
    yield ""
    if machine.tiny:
        yield _words.TINY
        yield ""
    yield f"Measured {' to '.join(dict.fromkeys((dates[0], dates[-1])))} with {', '.join(machine.versions)}."
    yield ""
    yield from _claims(machine, outcomes)
    for model in MODELS.values():
        yield ""
        yield from _tables(machine, model, outcomes)


# -- claims ------------------------------------------------------------------------------------------------------------


def _claims(machine: Machine | None, outcomes: _Outcomes) -> Iterable[str]:
    """Write each claim beside the measurement in bf16 and in fp16, eager, at the usual batch."""
    yield "| model | claim of articles | measured speed against strict fp32, and against TF32 | measured peak memory |"
    yield "|---|---|---|---|"
    for model in MODELS.values():
        claim = f"{model.claim.speed:g}x as fast, {model.claim.memory}" if model.claim else "no claim"
        size = model.tiny if machine is not None and machine.tiny else model.sizes[0]
        case = Run(model.name, "", *size)
        speed = _each(case, outcomes, _speed_ups) or NOT_YET
        memory = _each(case, outcomes, _memory_change) or NOT_YET
        yield f"| {model.title} | {claim} | {speed} | {memory} |"


def _each(case: Run, outcomes: _Outcomes, write: Callable[[Run, Outcome, _Outcomes], str]) -> str:
    """Write a value for both half precisions; empty if neither has a record."""
    runs = [(arm.title, case._replace(arm=name)) for name, arm in ARMS.items() if name in ("bf16", "fp16")]
    return "; ".join(f"{title} {write(run, outcomes[run], outcomes)}" for title, run in runs if run in outcomes)


def _speed_ups(run: Run, outcome: Outcome, outcomes: _Outcomes) -> str:
    if outcome.samples_per_s is None:
        return outcome.status
    return ", ".join(ratio(run, arm, outcomes) or _missing(run, arm, outcomes) for arm in ("fp32", "tf32"))


def _memory_change(run: Run, outcome: Outcome, outcomes: _Outcomes) -> str:
    """Write how much smaller the peak and the activations are than in strict fp32."""
    if outcome.activations is None:
        return "-" if outcome.status == "measured" else outcome.status
    base = outcomes.get(run._replace(arm="fp32"))
    after = outcome.memory["peak"]
    if base is None or base.activations is None:
        return f"{gib(after)} GiB ({_missing(run, 'fp32', outcomes)})"
    before = base.memory["peak"]
    change = less(base.activations, outcome.activations)
    return f"{gib(before)} to {gib(after)} GiB, {less(before, after)} (activations {change})"


def _missing(run: Run, baseline: str, outcomes: _Outcomes) -> str:
    """Say why there is nothing to compare with: `fp32, strict: does not fit`."""
    outcome = outcomes.get(run._replace(arm=baseline))
    return f"{ARMS[baseline].title}: {NOT_YET if outcome is None else outcome.status}"


def less(before: int, after: int) -> str:
    """Write a change of memory: `42 % less`."""
    if before <= 0:
        return "-"
    change = round(100 * (1 - after / before))
    return f"{abs(change)} % {'less' if change >= 0 else 'more'}"


# -- tables ------------------------------------------------------------------------------------------------------------


def _tables(machine: Machine, model: Model, outcomes: _Outcomes) -> Iterable[str]:
    yield f"### {model.title}"
    runs = plan([model], tiny=machine.tiny)
    cases = dict.fromkeys(run.case for run in [*runs, *outcomes] if run.model == model.name)
    measured = [case for case in cases if any(run.case == case for run in outcomes)]
    if not measured:
        yield ""
        yield f"{NOT_YET.capitalize()}."
    for case in measured:
        arms = [arm for arm in ARMS if case._replace(arm=arm) in (*runs, *outcomes)]
        yield ""
        yield from _table(model, [case._replace(arm=arm) for arm in arms], outcomes)


def _table(model: Model, runs: Sequence[Run], outcomes: _Outcomes) -> Iterable[str]:
    mode = "compiled" if runs[0].compiled else "eager"
    yield f"**{model.size_text(runs[0].size)}, {mode}**"
    yield ""
    yield (
        "| precision | samples/s (middle half) | strict fp32 | TF32 | Lightning's own | peak, GiB |"
        " weights + gradients + states, GiB | activations, GiB | MFU | waits per step |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for run in runs:
        yield "| " + " | ".join(_cells(run, outcomes)) + " |"
    notes = [f"- {ARMS[run.arm].title}: {text}" for run in runs if (text := _note(outcomes.get(run)))]
    if notes:
        yield ""
        yield from notes


def _cells(run: Run, outcomes: _Outcomes) -> list[str]:
    outcome = outcomes.get(run)
    title = ARMS[run.arm].title
    if outcome is None or outcome.samples_per_s is None:
        return [title, NOT_YET if outcome is None else _status(outcome), *["-"] * 8]
    median, low, high = outcome.samples_per_s
    ratios = [ratio(run, baseline, outcomes) if baseline else "" for baseline in ("fp32", "tf32", ARMS[run.arm].stock)]
    parts = [outcome.memory.get(part) for part in ("weights", "gradients", "states")]
    return [
        title,
        f"{rounded(median)} ({rounded(low)} to {rounded(high)})",
        *(text or "-" for text in ratios),
        gib(outcome.memory.get("peak")),
        " + ".join(gib(part) for part in parts),
        gib(outcome.activations),
        "-" if outcome.mfu is None else f"{100 * outcome.mfu:.0f} %",
        "-" if outcome.waits is None else f"{outcome.waits:.3g}",
    ]


def _status(outcome: Outcome) -> str:
    """Write why a run was not measured, with the reason if training caused it."""
    return f"{outcome.status}: {outcome.reason}" if outcome.status == "not measured" else outcome.status


def _note(outcome: Outcome | None) -> str:
    """Write why a value was not measured, or what was unusual in a run."""
    if outcome is None or outcome.status == "not measured":
        return ""
    if outcome.samples_per_s is None:
        return f"{outcome.status}: {_escaped(outcome.reason)}" if outcome.reason else ""
    return f"the medians are over {outcome.num_steps} steps only" if outcome.num_steps < 10 else ""


def ratio(run: Run, baseline: str, outcomes: _Outcomes) -> str:
    """Write how many times as fast a run is as another arm of the same case; empty if one of them was not measured.

    It compares one process of each arm, and therefore has no interval: the page says so.
    """
    other = outcomes.get(run._replace(arm=baseline))
    own = outcomes.get(run)
    if run.arm == baseline or own is None or other is None or not (own.samples_per_s and other.samples_per_s):
        return ""
    return f"{own.samples_per_s[0] / other.samples_per_s[0]:.2f}x"


def gib(num_bytes: int | None) -> str:
    """Write bytes in GiB, without the unit: `12.3`; `-` for none."""
    return "-" if num_bytes is None else rounded(num_bytes / 2**30)


def _escaped(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "\\<")


# -- what does not depend on a machine ---------------------------------------------------------------------------------


def _fixed_memory() -> Iterable[str]:
    yield "| model | parameters | optimizer | weights + gradients + states, GiB, in every precision |"
    yield "|---|---|---|---|"
    for model in MODELS.values():
        number = f"{model.num_parameters / 1e6:,.0f} M"
        yield f"| {model.title} | {number} | {_words.OPTIMIZERS[model.optimizer]} | {gib(model.fixed_bytes)} |"


def _sizes() -> Iterable[str]:
    yield "| model | batch | reason |"
    yield "|---|---|---|"
    for model in MODELS.values():
        sizes = " and ".join(model.size_text(size) for size in model.sizes)
        yield f"| {model.title} | {sizes}; then twice as many | {model.why_sizes} |"
