"""Compare the arms of a project, and decide whose fault a difference is.

Against plain fp32, per precision, ours and Lightning's own plugin: the gradients of the first step, the losses, the
metrics. An error of ours is *ours* where it is more than `FACTOR` times that of Lightning's plugin, plus a small floor.
Besides:

- ours in "fp32" is plain fp32, bit for bit, and our four callbacks change no bit in any precision
- a crash is ours, unless Lightning's plugin crashes in the same way: then it is autocast's; where both stop, an error
  of ours that says what to write instead is a note
- no more batches with a skipped step than with Lightning's plugin; losses and weights stay finite where they do in fp32
- learning rates, what a project observes (counts, names) and the dtypes of predictions are those of fp32
- after the run nothing of ours is left on the user's objects
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from projects.arms import Arm, Outcome, arms, finite
from projects.arms import run as run_arm
from projects.registry import Project
from projects.structure import differences

OURS, AUTOCASTS, STOCKS, NOTE, WRONG = "OURS", "autocast", "Lightning's plugin", "note", "WRONG PROJECT"
FACTOR = 1.5
FLOOR = {"bf16": 2.0**-10, "fp16": 2.0**-13}  # half of the rounding error of one number
LOWER_SCALE = 2.0**6


@dataclass
class Finding:
    """One difference to fp32."""

    precision: str
    whose: str
    text: str

    def __str__(self) -> str:
        return f"{self.precision}: {self.whose}: {self.text}"


@dataclass
class Errors:
    """Relative differences between an arm and plain fp32; NaN if there is nothing to compare."""

    gradient: float = math.nan
    worst: float = math.nan  # of a parameter whose gradient is not tiny
    worst_name: str = ""
    loss: float = math.nan  # of the first batch: same weights
    losses: float = math.nan  # the largest of all batches
    metrics: float = math.nan
    applied: int = 0
    failed: str = ""


@dataclass
class Result:
    """The judgement of one project."""

    project: str
    family: str
    description: str
    skipped: str = ""
    findings: list[Finding] = field(default_factory=list)
    errors: dict[str, dict[str, Errors]] = field(default_factory=dict)  # by precision and plugin
    same_bits_as_stock: dict[str, bool] = field(default_factory=dict)
    predicts: bool = False
    ours_predicts_half: bool = False
    stock_predicts_half: bool = False
    steps: int = 0

    @property
    def ours(self) -> list[Finding]:
        return [f for f in self.findings if f.whose in (OURS, WRONG)]

    def verdict(self, precision: str) -> str:
        """Return `"ok"`, `"OURS"`, or another owner of the worst finding."""
        kinds = [f.whose for f in self.findings if precision in f.precision]
        return next((kind for kind in (WRONG, OURS, AUTOCASTS, STOCKS) if kind in kinds), "ok")


def judge(
    project: Project,
    callbacks: bool = True,
    run: Callable[[Project, Arm], Outcome] = run_arm,
) -> Result:
    """Run all arms of a project and compare them."""
    result = Result(project.name, project.family, project.description, skipped=project.missing() or "")
    if result.skipped:
        return result
    outcomes: dict[Arm, Outcome] = {}
    for arm in arms(tuple(project.precisions), callbacks):
        outcomes[arm] = run(project, arm)
        if arm.whose == "plain" and wrong(outcomes[arm], result):
            return result
    plain = outcomes[Arm("plain")]
    result.steps = plain.steps
    exact(result, "fp32", "is not plain fp32", outcomes[Arm("ours")], plain)
    for arm, outcome in outcomes.items():
        if arm.whose == "ours":
            stock = outcomes.get(Arm("stock", arm.precision))
            left_as_found(result, arm, outcome, plain, stock)
            if arm.callbacks:
                alone = outcomes[Arm("ours", arm.precision)]
                exact(result, arm.precision, "callbacks change it", outcome, alone)
    for precision in project.precisions:
        ours, stock = outcomes[Arm("ours", precision)], outcomes[Arm("stock", precision)]
        compare(result, precision, plain, ours, stock, lower=lambda arm: run(project, arm))
    merge(result)
    return result


def merge(result: Result) -> None:
    """Join findings with the same words in several precisions."""
    found: dict[tuple[str, str], list[str]] = {}
    for f in result.findings:
        precisions = found.setdefault((f.whose, f.text), [])
        precisions += [f.precision] * (f.precision not in precisions)
    result.findings = [Finding(", ".join(precisions), *key) for key, precisions in found.items()]


def wrong(plain: Outcome, result: Result) -> bool:
    """Require that a project works in fp32, because otherwise there is nothing to compare with."""
    if plain.error:
        result.findings.append(Finding("fp32", WRONG, f"it fails without any plugin: {short(plain.error)}"))
    elif not plain.moved:
        result.findings.append(Finding("fp32", WRONG, "no batch was trained"))
    elif not plain.first_step_has_gradients and plain.steps:
        result.findings.append(Finding("fp32", WRONG, "no finite gradients of the first step were seen"))
    return bool(result.findings)


def exact(result: Result, precision: str, what: str, a: Outcome, b: Outcome) -> None:
    """Require that `a` is `b`, bit for bit."""
    if a.error or b.error:
        if (a.error or "") != (b.error or ""):
            text = f"{what}: {short(a.error or 'runs')} (without: {short(b.error or 'runs')})"
            result.findings.append(Finding(precision, OURS, text))
        return
    unlike = [n for n in b.weights if n not in a.weights or not same_bits(a.weights[n], b.weights[n])]
    parts = {
        f"weights ({', '.join(unlike[:3])})": bool(unlike),
        "losses": not same_numbers(a.losses, b.losses),
        "optimizer state": len(a.optimizers) != len(b.optimizers)
        or not all(map(same_bits, a.optimizers, b.optimizers)),
        "metrics": not same_numbers(a.metrics, b.metrics),
        "learning rates": not same_numbers(a.rates, b.rates),
        "what is observed": not same_numbers(a.observed, b.observed),
    }
    if any(parts.values()):
        result.findings.append(Finding(precision, OURS, f"{what}: {', '.join(n for n, bad in parts.items() if bad)}"))


def left_as_found(result: Result, arm: Arm, outcome: Outcome, plain: Outcome, stock: Outcome | None) -> None:
    if outcome.error:
        return
    left = differences(outcome.structure, plain.structure)
    if stock is not None and not stock.error:  # a library that looks at dtypes does so there, too
        theirs = set(differences(stock.structure, plain.structure))
        left = [line for line in left if line not in theirs]
    if left:
        extra = " (with callbacks)" * arm.callbacks
        more = f" and {len(left) - 3} more" * (len(left) > 3)
        text = f"left on the user's objects{extra}: {'; '.join(left[:3])}{more}"
        result.findings.append(Finding(arm.precision, OURS, text))


def compare(
    result: Result, precision: str, plain: Outcome, ours: Outcome, stock: Outcome, lower: Callable[[Arm], Outcome]
) -> None:
    """Compare ours and Lightning's plugin in half precision with plain fp32, then with each other."""

    def find(whose: str, text: str) -> None:
        result.findings.append(Finding(precision, whose, text))

    errors = {"ours": Errors(failed=short(ours.error)), "stock": Errors(failed=short(stock.error))}
    result.errors[precision] = errors
    for whose, outcome in (("ours", ours), ("stock", stock)):
        errors[whose].applied = outcome.steps
    if ours.error or stock.error:
        find(*whose_crash(ours, stock))
    if ours.error:
        return
    result.same_bits_as_stock[precision] = not stock.error and all(
        n in stock.weights and same_bits(w, stock.weights[n]) for n, w in ours.weights.items()
    )
    judge_steps(find, plain, ours, stock)
    if (
        any(skipped(ours, plain)) or not ours.first_step_has_gradients
    ):  # from here on, only runs that took all steps, since others train on other weights
        ours = lower(Arm("ours", precision, init_scale=LOWER_SCALE))
    if not stock.error and (any(skipped(stock, plain)) or not stock.first_step_has_gradients):
        stock = lower(Arm("stock", precision, init_scale=LOWER_SCALE))
    for whose, outcome in (("ours", ours), ("stock", stock)):
        if not outcome.error:
            measure(errors[whose], outcome, plain)
    result.predicts |= bool(ours.predicted)
    result.ours_predicts_half |= other_dtypes(ours, plain)
    result.stock_predicts_half |= bool(stock.predicted) and stock.predicted != plain.predicted
    still = any(skipped(ours, plain) + skipped(stock, plain))
    if stock.error and precision != "bf16" and "bf16" in result.errors:  # a coarser measure if there is no better one
        judge_numbers(find, "bf16", errors["ours"], result.errors["bf16"]["stock"], still, " in bf16")
    else:
        judge_numbers(find, precision, errors["ours"], errors["stock"], still)
    judge_run(find, plain, ours, stock, still)


def whose_crash(ours: Outcome, stock: Outcome) -> tuple[str, str]:
    if not ours.error:
        return STOCKS, f"fails: {short(stock.error)}"
    if stock.error and same_failure(ours.error, stock.error):
        return AUTOCASTS, f"both plugins fail: {short(ours.error)}"
    if stock.error and ours.error.startswith("ValueError: lightning_amp: "):
        return NOTE, f"both plugins raise an error; `AmpPrecision` raises {short(ours.error)}"
    return OURS, f"fails: {short(ours.error)} (Lightning's own plugin: {short(stock.error) or 'runs'})"


def judge_numbers(
    find: Callable[[str, str], None],
    precision: str,
    ours: Errors,
    stock: Errors,
    still_skipping: bool,
    where: str = "",
) -> None:
    """Measure by the errors of Lightning's plugin. If they are from another precision, `where`, judge only ours."""
    floor = FLOOR[precision]
    rows = [
        ("the first step's gradient", ours.gradient, stock.gradient, FACTOR, floor),
        (f"the gradient of `{ours.worst_name}`", ours.worst, stock.worst, 2 * FACTOR, 4 * floor),
        ("the first loss", ours.loss, stock.loss, FACTOR, floor),
    ]
    if not still_skipping:
        rows += [
            ("the losses", ours.losses, stock.losses, 2 * FACTOR, 8 * floor),
            ("the metrics", ours.metrics, stock.metrics, 2 * FACTOR, 16 * floor),
        ]
    for what, a, b, factor, least in rows:
        if math.isnan(b) and not math.isnan(a):
            continue  # Lightning's own fails: there is no measure
        if a > factor * b + least or (math.isnan(a) and not math.isnan(b)):
            find(OURS, f"the relative error of {what} is {a:.2g}, and {b:.2g} with Lightning's own plugin{where}")
        elif not where and b > factor * a + least:
            find(STOCKS, f"the relative error of {what} is {b:.2g}, and {a:.2g} with `AmpPrecision`")


def judge_steps(find: Callable[[str, str], None], plain: Outcome, ours: Outcome, stock: Outcome) -> None:
    """Judge a run from the default loss scale by its skipped steps, and by whether its weights are finite."""
    a, b, of = sum(skipped(ours, plain)), sum(skipped(stock, plain)), len(plain.moved)
    if not stock.error and a > b:
        find(OURS, f"`AmpPrecision` skips steps in {a} of {of} batches, Lightning's own plugin in {b}")
    elif not stock.error and b > a:
        find(STOCKS, f"it skips steps in {b} of {of} batches, `AmpPrecision` in {a}")
    elif a:
        find(NOTE, f"at the default loss scale, steps are skipped in {a} of {of} batches")
    bad = {n for n, w in plain.weights.items() if not is_finite(w)}
    nan = [n for n, w in ours.weights.items() if n not in bad and not is_finite(w)]
    if nan:
        find(OURS, f"{len(nan)} weights are inf or NaN, `{nan[0]}` first")


def judge_run(
    find: Callable[[str, str], None], plain: Outcome, ours: Outcome, stock: Outcome, still_skipping: bool
) -> None:
    """Compare values that do not depend on rounding."""

    def blame(what: str, get: Callable[[Outcome], Any]) -> None:
        expected = get(plain)
        a, b = get(ours), None if stock.error else get(stock)
        if a != expected:
            find(
                OURS if stock.error or b == expected else AUTOCASTS,
                f"{what}: {short(str(a))} instead of {short(str(expected))}",
            )
        elif not stock.error and b != expected:
            find(STOCKS, f"{what}: {short(str(b))} with Lightning's own plugin instead of {short(str(expected))}")

    if finite(plain.losses):
        blame("the losses are", lambda o: "finite" if finite(o.losses) else "inf or NaN")
    blame("other metrics are logged", lambda o: sorted(o.metrics))
    names = sorted(plain.gradients)
    blame("other parameters have a gradient", lambda o: sorted(o.gradients) or names)
    if other_dtypes(ours, plain):
        find(OURS, f"predictions are {ours.predicted} instead of {plain.predicted}")
    if not still_skipping:
        blame("other learning rates", lambda o: o.rates)
        for name, value in plain.observed.items():
            if not isinstance(value, float):
                blame(f"observed {name}", lambda o, n=name: o.observed.get(n))
    new = [w for w in ours.warnings if w not in plain.warnings and w not in stock.warnings]
    for text in new:
        find(NOTE, f"a warning only with `AmpPrecision`: {short(text)}")


def other_dtypes(outcome: Outcome, plain: Outcome) -> bool:
    return outcome.predicted not in (plain.predicted, in_float32(plain.predicted))


def in_float32(dtypes: list[str]) -> list[str]:
    """Allow float32 from a plugin where fp32 predicts in half precision, because the module itself is."""
    return sorted({d.replace("bfloat16", "float32").replace("float16", "float32") for d in dtypes})


def skipped(outcome: Outcome, plain: Outcome) -> list[bool]:
    """Count the batches in which fp32 took a step of any optimizer and this arm did not.

    Batches are counted, because our scale is per batch: an overflow also costs the other optimizers their steps.
    """
    batches = zip(plain.moved, outcome.moved, strict=False)
    return [any(p and not m for p, m in zip(*batch, strict=False)) for batch in batches]


def measure(errors: Errors, outcome: Outcome, plain: Outcome) -> None:
    if outcome.losses and plain.losses:
        size = max(1e-12, *map(abs, plain.losses))
        apart = [abs(a - b) / size for a, b in zip(outcome.losses, plain.losses, strict=False)]
        errors.loss = apart[0]
        errors.losses = math.nan if any(map(math.isnan, apart)) else max(apart)
    values = {**plain.metrics, **{k: v for k, v in plain.observed.items() if isinstance(v, float)}}
    got = {**outcome.metrics, **outcome.observed}
    apart = [abs(got[k] - v) / max(abs(v), 1e-2) for k, v in values.items() if k in got and math.isfinite(v)]
    errors.metrics = max(apart, default=math.nan)
    if outcome.first_step_has_gradients:
        measure_gradients(errors, outcome, plain)


def measure_gradients(errors: Errors, outcome: Outcome, plain: Outcome) -> None:
    reference = {n: g for n, g in plain.gradients.items() if n in outcome.gradients}
    total = norm(list(reference.values()))
    if not total or outcome.error or not outcome.first_step_has_gradients:
        return
    apart = {n: outcome.gradients[n] - g for n, g in reference.items()}
    errors.gradient = norm(list(apart.values())) / total
    sizes = {n: norm([g]) for n, g in reference.items()}
    largest = max(sizes.values())
    ratios = {n: norm([apart[n]]) / size for n, size in sizes.items() if size > 0.01 * largest}
    errors.worst_name = max(ratios, key=lambda n: ratios[n])
    errors.worst = ratios[errors.worst_name]


def norm(values: list[Tensor]) -> float:
    return math.sqrt(sum(float(v.square().sum()) for v in values))


def same_bits(a: Tensor, b: Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a, b) or (is_float(a) and bool(((a == b) | (a.isnan() & b.isnan())).all()))


def same_numbers(a: Any, b: Any) -> bool:
    """Compare two values; NaN equals NaN."""
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(same_numbers(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same_numbers, a, b))
    return a == b or (isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b))


def is_float(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def is_finite(tensor: Tensor) -> bool:
    return not is_float(tensor) or bool(tensor.isfinite().all())


def same_failure(a: str, b: str) -> bool:
    return without_numbers(a) == without_numbers(b)


def without_numbers(text: str) -> str:
    return re.sub(r"0x[0-9a-f]+|\d+", "#", text)[:200]


def short(text: str | None) -> str:
    """Return the first line, without paths. Only whole sentences of a long line are kept, if there is one."""
    line = (text or "").strip().split("\n")[0]
    line = re.sub(r"(/[\w.+-]+){2,}", "...", line)
    if len(line) < 220:
        return line
    sentences = re.match(r".*\. (?=[A-Z])", line[:217])
    return f"{sentences[0]}..." if sentences else f"{line[:217]}..."
