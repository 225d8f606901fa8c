"""Write the compatibility page: one table per family, then the findings."""

from __future__ import annotations

import math
import os
import platform
from collections import Counter
from importlib import metadata

import torch

from projects.judge import AUTOCASTS, NOTE, OURS, STOCKS, WRONG, Errors, Result

PACKAGES = (
    "torch",
    "lightning",
    "torchmetrics",
    "transformers",
    "peft",
    "lion-pytorch",
    "schedulefree",
    "pytorch_optimizer",
)

INTRODUCTION = """\
# Projects

This page lists small projects in the style of other people's code. Each is trained in fp32, with `AmpPrecision` and
with Lightning's own plugin, from one seed and for a few optimizer steps on the CPU. `make projects` writes this page.
The code is in `tests/projects/`, and `tests/projects/judge.py` compares the results.

Each number is an error against plain fp32, **with `AmpPrecision` / with Lightning's own plugin**:

- The error of the gradients is `||g - g32|| / ||g32||` in the first optimizer step.
- The error of the losses is the largest difference, relative to the largest loss.
- *bit-identical* means that the trained weights equal the weights with Lightning's own plugin, bit for bit.
- The applied steps are those with `AmpPrecision` / with Lightning's plugin / in fp32. With the
  default loss scale of 2^16 the first steps may be skipped. The errors of a run with skipped steps come from a second
  run that starts at 2^6.
- The fp32 verdict compares `AmpPrecision("fp32")` with no plugin at all. All precisions are also run with the four
  callbacks. Neither plugin nor callbacks may change a bit.

The verdict names the cause of a problem. It is *OURS* if `AmpPrecision` fails or is less exact than Lightning's own
plugin. It is *autocast* if both fail in the same way, and *Lightning's plugin* if only Lightning's plugin fails or is
less exact. Without a problem it is *ok*.
"""


def page(results: list[Result]) -> str:
    """Write the page in Markdown."""
    lines = [INTRODUCTION, summary(results), "", machine(), ""]
    for family in dict.fromkeys(r.family for r in results):
        rows = [r for r in results if r.family == family]
        lines += [f"## {family[0].upper()}{family[1:]}", "", *table(rows), ""]
        notes = [f"- `{r.project}`, {escape(str(f))}" for r in rows for f in r.findings]
        lines += [*notes, ""] if notes else []
    return "\n".join(lines).rstrip() + "\n"


def table(rows: list[Result]) -> list[str]:
    head = ["project", "fp32 verdict"]
    for precision in ("bf16", "fp16"):
        head += [
            f"{precision} gradient error",
            f"{precision} loss error",
            *(["fp16 applied steps"] if precision == "fp16" else []),
            f"{precision} verdict",
        ]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for r in rows:
        cells = [f"`{r.project}`: {escape(r.description)}"]
        if r.skipped:
            cells += [escape(f"not run: {r.skipped}"), *[""] * (len(head) - 3)]
        else:
            cells += [r.verdict("fp32"), *cells_of(r, "bf16"), *cells_of(r, "fp16")]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def cells_of(result: Result, precision: str) -> list[str]:
    columns = 4 if precision == "fp16" else 3
    if precision not in result.errors:
        return ["not run", *[""] * (columns - 1)]
    ours, stock = result.errors[precision]["ours"], result.errors[precision]["stock"]
    both_fail = bool(ours.failed and stock.failed)
    cells = [
        "both fail" if both_fail else f"{number(ours, name)} / {number(stock, name)}" for name in ("gradient", "losses")
    ]
    if precision == "fp16":
        cells += [f"{ours.applied} / {stock.applied} / {result.steps}"]
    same = ", bit-identical" * result.same_bits_as_stock.get(precision, False)
    return [*cells, result.verdict(precision) + same]


def number(errors: Errors, name: str) -> str:
    if errors.failed:
        return "fails"
    value = getattr(errors, name)
    if math.isnan(value):
        return "-"
    return "0" if value == 0 else f"{value:.2g}"


def summary(results: list[Result]) -> str:
    """Count the projects by the worst finding about each."""
    ran = [r for r in results if not r.skipped]
    kinds = Counter[str]()
    for r in ran:
        said = {f.whose for f in r.findings}
        kinds[next((k for k in (WRONG, OURS, AUTOCASTS, STOCKS, NOTE) if k in said), "ok")] += 1
    same = {p: sum(r.same_bits_as_stock.get(p, False) for r in ran) for p in ("bf16", "fp16")}
    counts = ", ".join(
        f"{kinds[kind]} {words}"
        for kind, words in (
            (WRONG, "wrong in themselves"),
            (OURS, "with something that is ours"),
            (AUTOCASTS, "where autocast fails"),
            (STOCKS, "where only Lightning's own plugin fails or is less exact"),
            (NOTE, "with a remark"),
            ("ok", "without a remark"),
        )
        if kinds[kind]
    )
    half = f"{sum(r.stock_predicts_half for r in ran)} of {sum(r.predicts for r in ran)} projects"
    return (
        f"**{len(results)} projects, {len(ran)} run here: {counts or 'none'}.** The trained weights are bit-identical"
        f" to Lightning's own plugin in {same['bf16']} projects in bf16, and in {same['fp16']} in fp16."
        f" `trainer.predict` returns half precision in {half} with Lightning's own plugin, and in"
        f" {sum(r.ours_predicts_half for r in ran)} with `AmpPrecision`."
    )


def machine() -> str:
    versions: list[str] = []
    for package in PACKAGES:
        try:
            versions.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            continue
    where = f"{platform.machine()}, {os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()}"
    return f"Python {platform.python_version()} on {platform.system()} ({where}); {', '.join(versions)}."


def escape(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "\\<").replace("*", "\\*")
