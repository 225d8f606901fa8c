"""`channels-last`: convolutions whose images have the channels first."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_amp._text import percent
from lightning_amp.advice._gains import gain, is_worth_it
from lightning_amp.advice._record import CHANNELS_LAST as VARIANT
from lightning_amp.advice.findings._finding import Finding, Seen, StepRule
from lightning_amp.advice.findings._words import left, saved, tried


def _find(seen: Seen) -> Iterator[Finding]:
    recorded = seen.step.recorded
    share = min(1.0, recorded.convolution_flops / max(recorded.forward_flops, 1))
    if recorded.channels_last or share < 0.1:
        return
    found = gain(seen.step, VARIANT)
    clear = is_worth_it(found)
    text = (
        f"{percent(share)} of the FLOPs of the forward are convolutions whose images have the channels first;"
        f" {tried(seen.step, VARIANT, found)}."
    )
    action = "Write `self.to(memory_format=torch.channels_last)` at the end of the module's `__init__`."
    if not clear:
        action = left(found, "channels_last")
    yield Finding("warning" if clear else "note", "channels-last", text, action, saved(found))


CHANNELS_LAST = StepRule(_find)
