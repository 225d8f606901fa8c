"""Write the compatibility page: a table, then the first finding about each project and precision."""

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

An error of the gradients is `||g - g32|| / ||g32||` in the first optimizer step, **with `AmpPrecision` / with
Lightning's own plugin**. The applied steps are those with `AmpPrecision` / with Lightning's plugin / in fp32. With the
default loss scale of 2^16 the first steps may be skipped. The errors of a run with skipped steps come from a second run
that starts at 2^6. `AmpPrecision("fp32")` is compared with no plugin at all. All precisions are also run with the four
callbacks. Neither plugin nor callbacks may change a bit.

The verdict names the cause of a problem. It is *OURS* if `AmpPrecision` fails or is less exact than Lightning's own
plugin. It is *autocast* if both fail in the same way, and *Lightning's plugin* if only Lightning's plugin fails or is
less exact.
"""
BY_WEIGHT = (WRONG, OURS, AUTOCASTS, STOCKS)
HEAD = ("project", "bf16 gradient error", "fp16 gradient error", "fp16 applied steps", "verdict")


def page(results: list[Result]) -> str:
    """Write the page in Markdown: a row per project with a verdict, and the names of the others."""
    shown = {r.project: r for r in results if r.skipped or any(r.verdict(p) != "ok" for p in ("fp32", "bf16", "fp16"))}
    rows = [HEAD, ["---"] * len(HEAD), *map(cells_of, shown.values())]
    others = [r for r in results if r.project not in shown]
    worst = {p: max(r.errors[p]["ours"].gradient for r in others if p in r.errors) for p in ("bf16", "fp16") if others}
    lines = [INTRODUCTION, summary(results), "", machine(), "", *(f"| {' | '.join(row)} |" for row in rows), ""]
    for r in shown.values():
        by_weight = sorted((f for f in r.findings if f.whose != NOTE), key=lambda f: BY_WEIGHT.index(f.whose))
        first = {f.precision: f for f in reversed(by_weight)}
        lines += [f"- `{r.project}`, {escape(str(first[precision]))}" for precision in sorted(first)]
    if others:
        errors = " and ".join(f"{error:.2g} in {p}" for p, error in worst.items())
        names = ", ".join(f"`{r.project}`" for r in others)
        lines += ["", f"Nothing fails in the other {len(others)}, whose errors are at most {errors}:", "", f"> {names}"]
    return "\n".join(lines).rstrip() + "\n"


def cells_of(r: Result) -> list[str]:
    name = f"`{r.project}`: {escape(r.description)}"
    if r.skipped:
        return [name, "", "", "", escape(f"not run: {r.skipped}")]
    gradients = [gradient_errors(r, precision) for precision in ("bf16", "fp16")]
    fp16 = r.errors.get("fp16")
    steps = f"{fp16['ours'].applied} / {fp16['stock'].applied} / {r.steps}" if fp16 else "not run"
    verdicts = [f"{p}: {r.verdict(p)}" for p in ("fp32", "bf16", "fp16") if r.verdict(p) != "ok"]
    return [name, *gradients, steps, ", ".join(verdicts) or "ok"]


def gradient_errors(result: Result, precision: str) -> str:
    if precision not in result.errors:
        return "not run"
    ours, stock = result.errors[precision]["ours"], result.errors[precision]["stock"]
    return "both fail" if ours.failed and stock.failed else f"{number(ours)} / {number(stock)}"


def number(errors: Errors) -> str:
    if errors.failed:
        return "fails"
    if math.isnan(errors.gradient):
        return "-"
    return "0" if errors.gradient == 0 else f"{errors.gradient:.2g}"


def summary(results: list[Result]) -> str:
    """Count the projects by the worst finding about each."""
    ran = [r for r in results if not r.skipped]
    kinds = Counter[str]()
    for r in ran:
        said = {f.whose for f in r.findings}
        kinds[next((k for k in BY_WEIGHT if k in said), "ok")] += 1
    same = {p: sum(r.same_bits_as_stock.get(p, False) for r in ran) for p in ("bf16", "fp16")}
    counts = ", ".join(
        f"{kinds[kind]} {words}"
        for kind, words in (
            (WRONG, "wrong in themselves"),
            (OURS, "with something that is ours"),
            (AUTOCASTS, "where autocast fails"),
            (STOCKS, "where only Lightning's own plugin fails or is less exact"),
            ("ok", "where nothing fails"),
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
