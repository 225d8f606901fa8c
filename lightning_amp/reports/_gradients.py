"""Show the findings of `GradientMonitor`: its table, the heat map, and its sentences."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

from typing_extensions import final, override

from lightning_amp._text import counted, exact, listed, literal, percent, rounded
from lightning_amp.findings import TOTAL, GradientRow, GradientSample, bits_kept
from lightning_amp.reports._figures import new_figure, saved, say_empty
from lightning_amp.reports._table import MAX_ROWS, SampledTable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MAX_NUMBERS = 20  # columns in which numbers have room
_COLORS = ("#67000d", "#de2d26", "#fdae6b", "#fee6ce", "#f7fbff")  # from the worst to the best


@final
class GradientTable(SampledTable[GradientRow]):
    """All rows, oldest first. Prints the latest sample, the worst row first, and all gradients together last.

    .. code-block:: python

        monitor = GradientMonitor()
        L.Trainer(plugins=[AmpPrecision("fp16")], callbacks=[monitor], max_epochs=1).fit(model, data)
        print([row.name for row in monitor.table.last if row.underflow_fraction > 0.01])

    If there are more than 200 samples, every second one of the older half is dropped.
    """

    _header = tuple("length" if name == "norm_ratio" else name for name in GradientRow._fields)
    _called = "monitor.table"
    _name_at = 1

    @property
    def in_fp16(self) -> bool:
        """Return whether the latest sample ran in fp16, whose limits are shown."""
        return bool(self.last) and self.last[-1].precision == "fp16"

    def plot(self, path: str | os.PathLike[str] | None = None) -> Figure:
        """Return the figure of `GradientMonitor.plot`: the worst rows, by their worst step, as a heat map."""
        quantity, title, unit, low, high = "sqnr_db", "Mixed-precision gradient against fp32", "SQNR [dB]", 0.0, 40.0
        if self.in_fp16:
            title = "Headroom in fp16: doublings of the loss scale until a gradient overflows"
            quantity, unit, low, high = "headroom_bits", "bits", -1.0, 1.0
        samples = [{row.name: row for row in sample if row.name != TOTAL} for sample in self._samples]
        rows = [row for sample in samples for row in sample.values()]
        known = dict.fromkeys(row.name for row in rows)
        sick = list(dict.fromkeys(row.name for row in sorted(rows, key=self._badness, reverse=True)))
        names = [name for name in known if name in sick[:MAX_ROWS]]
        figure = new_figure(10, 3 + 0.25 * len(names))
        axes: Any = figure.add_subplot()
        axes.set_title(title if len(names) == len(known) else f"{title}\nthe {len(names)} worst of {len(known)} rows")
        if not names:
            say_empty(axes, "no sample yet")
            return saved(figure, path)
        from matplotlib.colors import LinearSegmentedColormap

        colors = LinearSegmentedColormap.from_list("", _COLORS).with_extremes(bad="0.8")
        grid = [[_value(sample.get(name), quantity) for sample in samples] for name in names]
        inside = [[min(max(value, low), high) for value in values] for values in grid]
        image = axes.imshow(inside, colors, vmin=low, vmax=high, aspect="auto", interpolation="nearest")
        for y, x in product(range(len(names)), range(len(samples))):
            if len(samples) <= _MAX_NUMBERS and not math.isnan(grid[y][x]):  # the colours tell only good from bad
                ink = "black" if sum(colors(image.norm(inside[y][x]))[:3]) > 1.5 else "white"
                axes.text(x, y, f"{grid[y][x]:.2g}", ha="center", va="center", fontsize="small", color=ink)
        figure.colorbar(image, ax=axes, extend="both", label=f"{unit}; grey: no gradient")
        axes.set_xlabel("optimizer step")
        axes.set_yticks(range(len(names)), names, fontsize="small")
        steps = [sample[0].step for sample in self._samples]
        every = math.ceil(len(steps) / 8)
        axes.set_xticks(range(0, len(steps), every), [f"{step:,}" for step in steps[::every]])
        return saved(figure, path)

    @override
    def _badness(self, row: GradientRow) -> float:
        if row.name == TOTAL or row.largest == 0:
            return -math.inf
        measures = [row.sqnr_db / 6.02]
        if self.in_fp16:
            measures += [row.headroom_bits, 10 * (1 - row.underflow_fraction)]
        return math.inf if any(map(math.isnan, measures)) else -min(measures)

    @property
    @override
    def _titles(self) -> Sequence[str]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return ("name", *(("to zero", "subnormal", "headroom") if self.in_fp16 else ()), "keeps", "SQNR", "cosine")

    @override
    def _written(self, row: GradientRow) -> Sequence[str]:
        """Write bits, SQNR and cosine. If they are not finite, write whether the fp32 gradient itself is."""
        keeps = "" if math.isnan(row.sqnr_db) or row.largest == 0 else bits_kept(row.sqnr_db, row.precision)
        if row.largest == 0:
            sqnr = "all zero"
        elif math.isnan(row.sqnr_db):
            sqnr = "overflow" if math.isfinite(row.largest) else "not finite in fp32"
        else:
            words = {math.inf: "equal", -math.inf: "zero in fp32"}
            sqnr = words.get(row.sqnr_db, f"{row.sqnr_db:.1f} dB")
        room = f"{round(row.headroom_bits, 1) + 0:.1f} bits" if math.isfinite(row.headroom_bits) else sqnr  # not -0.0
        limits = (f"{row.underflow_fraction:.1%}", f"{row.subnormal_fraction:.1%}", room) if self.in_fp16 else ()
        return row.name, *limits, keeps, sqnr, "" if math.isnan(row.cosine) else f"{row.cosine:.4f}"


def _value(row: GradientRow | None, quantity: str) -> float:
    """Return the value of a row: NaN without a gradient, minus infinity for an overflow."""
    if row is None or row.largest == 0:
        return math.nan
    value: float = getattr(row, quantity)
    return -math.inf if math.isnan(value) else value


# -- sentences ---------------------------------------------------------------------------------------------------------


def describe_gradient(sample: GradientSample, scale: float | None, found: str, before: Sequence[GradientRow]) -> str:
    """Describe a sample: what is lost, where, and what helps; or how well it fits.

    `scale` is the loss scale at which all gradients so far fit into fp16, and `found` says what was tried. `before` are
    the rows of the previous sample: a module keeps few bits if both samples show it.
    """
    total, bad = sample.rows[-1], sample.bad()
    if total.largest == 0 and sample.forward_is_finite:
        return f"GradientMonitor, step {total.step}: all gradients are zero."
    if not bad:
        return f"GradientMonitor, step {total.step}: {_healthy(sample, scale, before)}"
    at = f"loss scale {exact(total.scale)}" if total.precision == "fp16" else total.precision
    names = [f"`{row.name}`{_share(row)}" for row in bad if row is not total and sample.forward_is_finite]
    if sample.too_short is not None:
        found = (
            "fix: `lightning_amp.precision.unscale_(self.trainer, optimizer)` before code that clips gradients, or"
            " instead of a division by the loss scale (not tried)"
        )
    lines = (f"GradientMonitor, step {total.step}, {at}: {_what(sample, bad[0])}", listed(names, 4), found)
    return "\n  ".join(filter(None, lines))


def _what(sample: GradientSample, first: GradientRow) -> str:
    total = sample.rows[-1]
    if not math.isfinite(total.largest):
        what = "NaN" if math.isnan(total.largest) else "infinite"
        return f"the gradient is {what} in fp32 too: no precision and no loss scale helps"
    if math.isnan(total.sqnr_db):
        if sample.forward_is_finite:
            return "the gradient is infinite or NaN, and in fp32 it is not"
        return "the forward is infinite or NaN, and in fp32 it is not"
    short = sample.too_short
    if short is not None or (total.cosine > 0.99 and total.norm_ratio > 1.4):
        row = short or total
        about = "" if row.cosine > 0.99 else "about "
        text = f"the gradient has {about}the direction of fp32, but {rounded(row.norm_ratio)} times its length"
        why = "`training_step` or `on_after_backward` clips scaled gradients, or divides by the scale like the plugin"
        return f"{text}: {why}" if short is not None else text
    if first.rounds_to_zero:
        least = "at least " * (total.underflow_fraction < 0.99)  # in its backward, more values may round to zero
        return f"{least}{percent(total.underflow_fraction)} of the gradient rounds to zero"
    return f"the gradient keeps {bits_kept(total.sqnr_db, total.precision)} of fp32 as a whole"


def _share(row: GradientRow) -> str:
    if math.isnan(row.sqnr_db):
        return ""
    return f" {percent(row.underflow_fraction)}" if row.rounds_to_zero else f" {bits_kept(row.sqnr_db, row.precision)}"


def _healthy(sample: GradientSample, scale: float | None, before: Sequence[GradientRow]) -> str:
    *parts, total = sample.rows
    if math.isinf(total.sqnr_db):
        return "the gradient equals fp32."
    text = f"the gradient keeps {bits_kept(total.sqnr_db, total.precision)} ({total.sqnr_db:.0f} dB)"
    # A value near the kink of a ReLU may fall on its other side. In a small batch this costs a module many bits once.
    lower = {row.name for row in before if row.sqnr_db < total.sqnr_db}
    rows = [row for row in parts if row.largest and 0 < row.sqnr_db < total.sqnr_db and row.name in lower]
    if rows:
        least = min(rows, key=lambda row: row.sqnr_db)
        text += f", in `{least.name}` {bits_kept(least.sqnr_db, total.precision)}"
    if not total.keeps_three_bits:
        return f"{text}. `find_fp32_modules` searches for modules that need fp32."
    # a gradient in float32 may be too large for fp16
    if total.precision != "fp16" or round(total.headroom_bits, 1) < 0:
        return f"{text}."
    if total.underflow_fraction > 0.01 and scale is not None and scale > total.scale:
        how = "`self.manual_backward(loss)` with " if total.scale == 1 and sample.may_clip else ""
        advice = f"{how}`DynamicLossScaler(init_scale={literal(scale)})` (not tried) keeps more"
        return f"{text}. {percent(total.underflow_fraction)} of it rounds to zero; {advice}."
    room = counted(int(total.headroom_bits), "bit")
    return f"{text}. At the loss scale {exact(total.scale)} it fits, with {room} of room."
