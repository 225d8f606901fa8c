"""`slow-callback`: callbacks take a good part of a step."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_amp._text import percent
from lightning_amp.advice.findings._finding import Finding, Seen, StepRule, graded
from lightning_amp.advice.findings._words import in_ms
from lightning_amp.measure import CALLBACKS


def _find(seen: Seen) -> Iterator[Finding]:
    share = seen.step.share(CALLBACKS)
    if share < 0.1:
        return
    name, seconds = max(seen.step.callbacks.items(), key=lambda item: item[1])
    text = f"Callbacks take {percent(share)} of a step, most of it `{name}`: {in_ms(seconds)}."
    yield Finding(graded(share, 0.2), "slow-callback", text, "Let it work less often, or outside of training.", share)


SLOW_CALLBACK = StepRule(_find)
