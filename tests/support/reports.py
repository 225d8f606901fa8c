"""Make reports of `compare_precisions` without training, as varied as real ones, for pages and texts."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lightning_amp.compare import CONTROL, Margin, Plan, Point, PrecisionReport, Run
from lightning_amp.findings import StepRecord

ARMS = {
    "fp32": "AmpPrecision('fp32')",
    "bf16": "AmpPrecision('bf16')",
    "fp16": "AmpPrecision('fp16')",
    "fp16, head in fp32": "AmpPrecision('fp16', fp32_modules=['head'])",
    "bf16, evaluated in fp32": "AmpPrecision('bf16', eval_precision='fp32')",
    "fp8": "AmpPrecision('fp8')",
}
STEP_S = {"fp32": 0.0105, "bf16": 0.0062, "fp16": 0.0058, "fp8": 0.0051}
MEMORY = {"fp32": 7.9, "bf16": 4.6, "fp16": 4.7, "fp8": 4.4}  # GiB
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp8": "float8_e4m3fn"}
COST = {"fp32": 0.0, "bf16": 0.002, "fp16": 0.0005, "fp8": 0.03}
LEVELS = {"val_loss": (2.3, 0.31), "val_acc": (0.11, 0.934), "val_perplexity": (61.0, 8.2)}
MARGINS = {"val_loss": Margin(0.02), "val_acc": Margin(0.01), "val_perplexity": Margin(0.2)}
VERSIONS = {"torch": "2.13.0+cu130", "lightning": "2.6.6", "lightning_amp": "0.9.0", "Python": "3.12.4"}

SCRIPT = "<script>document.documentElement.id = 'attacked'</script>"
IMAGE = "<img src=x onerror=\"document.documentElement.id = 'attacked'\">"
HOSTILE = {
    f"{SCRIPT}": f"AmpPrecision({SCRIPT!r})",
    "a|b \"quoted\" & 'single' `code` </svg></title></style>": "AmpPrecision('bf16')",
    "fp16_" + "a_name_without_any_space_" * 8: "AmpPrecision('fp16', fp32_modules=["
    + "'encoder.layers.*', " * 12
    + "])",
    "\u202eright to left\u202c, 半精度 🔥\x00\x1b[31m": "AmpPrecision('bf16')",
}


def make_report(
    arms: Mapping[str, str] | int = 3,
    num_seeds: int = 3,
    *,
    metrics: Sequence[str] = ("val_loss", "val_acc"),
    margins: Mapping[str, Margin] | None = None,
    num_validations: int = 20,
    num_losses: int = 200,
    failing: Collection[tuple[str, int]] = (),
    not_finite: Collection[tuple[str, int]] = (),
    error: str = "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
    **fields: Any,
) -> PrecisionReport:
    """Return a report without any training.

    `failing` and `not_finite` name runs by label and seed. `fields` are set in every finished run.
    """
    named = dict(list(ARMS.items())[:arms]) if isinstance(arms, int) else dict(arms)
    plan = Plan(
        make_module="make_classifier",
        make_data="make_images",
        arms=named,
        trainer_kwargs={"max_epochs": "20", "accelerator": "'gpu'", "gradient_clip_val": "1.0"},
        num_seeds=num_seeds,
        control=num_seeds > 1,
        margins={name: MARGINS[name] for name in metrics if name in MARGINS} if margins is None else margins,
    )
    runs: list[Run] = []
    for label, seed in plan.runs():
        if (label, seed) in failing:
            log = f"Epoch 3: 41%\nTraceback (most recent call last):\n  ...\n{error}"
            runs.append(Run(label, seed, error=error, device="cuda: NVIDIA H200", versions=VERSIONS, log=log))
            continue
        run = _run(plan, label, seed, metrics, num_validations, num_losses)
        runs.append(replace(_spoiled(run) if (label, seed) in not_finite else run, **fields))
    return PrecisionReport(plan, runs)


def _run(plan: Plan, label: str, seed: int, metrics: Sequence[str], num_validations: int, num_losses: int) -> Run:
    kind = _kind(plan, label)
    rng = random.Random(f"{label} {seed}")
    shared = random.Random(seed)  # the noise that all arms of one seed share
    step_s, num_steps = STEP_S[kind] * rng.uniform(0.98, 1.02), 4000
    curves = {
        name: tuple(
            Point(step, step * step_s, _value(name, step / num_steps, kind, shared, rng))
            for step in (num_steps * (i + 1) // num_validations for i in range(num_validations))
        )
        for name in metrics
    }
    loss = tuple(
        Point(step, step * step_s, _value("val_loss", step / num_steps, kind, shared, rng, noise=0.2))
        for step in (num_steps * i // num_losses for i in range(num_losses))
    )
    scale = _scale(num_steps, rng) if kind == "fp16" else ()
    skipped = sum(record.skipped for record in scale)
    last = {name: points[-1].value for name, points in curves.items()}
    low = 0.0 if kind == "fp32" else 1e-4
    return Run(
        label,
        seed,
        precision=kind,
        device="cuda: NVIDIA H200",
        versions=VERSIONS,
        curves=curves,
        loss=loss,
        same_weights={name: (value, value - rng.gauss(low, low / 2)) for name, value in last.items()},
        step_s=tuple(step_s * rng.uniform(0.96, 1.06) for _ in range(60)),
        timed_steps=tuple(range(60)),
        samples_per_s=tuple(256 / step_s * rng.uniform(0.96, 1.02) for _ in range(60)),
        train_s=num_steps * step_s,
        total_s=num_steps * step_s + 9,
        peak_memory_bytes=int(MEMORY[kind] * 2**30),
        memory_of="device",
        num_steps=num_steps - skipped,
        num_skipped=skipped,
        scale=scale,
        matmul_flops={"float32": 1.0} if kind == "fp32" else {DTYPES[kind]: 0.977, "float32": 0.023},
    )


def _kind(plan: Plan, label: str) -> str:
    text = plan.arms.get(label, plan.arms[plan.reference])
    return next((kind for kind in ("bf16", "fp16", "fp8") if f"({kind!r}" in text), "fp32")


def _value(
    name: str, part: float, kind: str, shared: random.Random, rng: random.Random, *, noise: float = 0.01
) -> float:
    """Return a value of a curve towards its last level, with noise of the seed and noise of the run."""
    first, last = LEVELS.get(name, (1.0, 0.2))
    drift = math.exp(shared.gauss(0, noise) + rng.gauss(0, noise) * 0.4) - 1 + COST[kind] * part
    return last + (first - last) * (math.exp(-6 * part) * (1 + drift) + 0.2 * drift)


def _scale(num_steps: int, rng: random.Random) -> tuple[StepRecord, ...]:
    """Return a scale history: three skips at first, then growth every 500 steps, and an occasional skip."""
    records: list[StepRecord] = []
    scale, applied = 2.0**16, 0
    for index in range(num_steps):
        overflows = index < 3 or rng.random() < (0.002 if scale >= 2**15 else 0.0)
        applied = 0 if overflows else applied + 1
        following = scale / 2 if overflows else scale * 2 if applied % 500 == 0 else scale
        if overflows or following != scale or index in (0, num_steps - 1):
            records.append(StepRecord(index, 0, scale, following, overflows, "gradient" if overflows else "none"))
        scale = following
    return tuple(records)


def _spoiled(run: Run) -> Run:
    """Return the run with NaN in its last third."""

    def spoiled(points: tuple[Point, ...]) -> tuple[Point, ...]:
        return tuple(p if 3 * i < 2 * len(points) else p._replace(value=math.nan) for i, p in enumerate(points))

    return replace(
        run,
        curves={name: spoiled(points) for name, points in run.curves.items()},
        loss=spoiled(run.loss),
        same_weights={},
    )


REPORTS: dict[str, Callable[[], PrecisionReport]] = {
    "usual": make_report,
    "one seed": lambda: make_report(2, 1),
    "many": lambda: make_report(6, 8, num_validations=500, num_losses=500),
    "failing": lambda: make_report(4, 3, failing={("fp16", 0), ("fp16", 1), ("fp16", 2), ("bf16", 1)}),
    "reference failed": lambda: make_report(failing={("fp32", 0), ("fp32", 1), ("fp32", 2)}),
    "all failed": lambda: make_report(2, 1, failing={("fp32", 0), ("bf16", 0)}),
    "nothing ran": lambda: PrecisionReport(make_report().plan, []),
    "not finite": lambda: make_report(
        4, 3, not_finite={("fp16", 0), ("fp16", 1), ("fp16", 2), ("fp16, head in fp32", 1)}
    ),
    "hostile": lambda: make_report(
        HOSTILE,
        2,
        metrics=("val_loss", f"loss {IMAGE} of `a|b`", "val_acc/" + "a_very_long_metric_" * 8),
        failing={(list(HOSTILE)[1], 1)},
        error=f"RuntimeError: {SCRIPT} \x1b[31m{IMAGE}\n  second | line `of` \udcff {'x' * 300}",
        device=f"cpu: {IMAGE}",
        versions={SCRIPT: IMAGE},
    ),
    "one validation": lambda: make_report(num_validations=1, num_losses=1),
    "no metrics": lambda: make_report(metrics=()),
    "no margins": lambda: make_report(2, 3, margins={}),
    "no scaling": lambda: make_report(2, 3, peak_memory_bytes=None, memory_of=None, samples_per_s=(), matmul_flops={}),
    "no times": lambda: make_report(2, 1, step_s=(), timed_steps=(), samples_per_s=(), loss=(), memory_of="tensors"),
    "three metrics": lambda: make_report(5, 3, metrics=("val_loss", "val_acc", "val_perplexity")),
}
"""Reports by their special property."""

assert CONTROL not in ARMS
