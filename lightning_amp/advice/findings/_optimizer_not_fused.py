"""`optimizer-not-fused`: an optimizer steps in several kernels, and has one."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_amp._text import percent
from lightning_amp.advice._gains import gain, is_worth_it
from lightning_amp.advice._record import FUSED
from lightning_amp.advice.findings._finding import Finding, Seen, StepRule
from lightning_amp.advice.findings._words import left, saved, tried
from lightning_amp.measure import OPTIMIZER


def _find(seen: Seen) -> Iterator[Finding]:
    step = seen.step
    share = step.share(OPTIMIZER)
    plain = [optimizer for optimizer in step.optimizers if optimizer.can_fuse]
    fused = gain(step, FUSED)
    clear = is_worth_it(fused)
    if not plain or (share < 0.05 and not clear):
        return
    name = plain[0].name
    text = f"`{name}` takes {percent(share)} of a step, in several kernels; {tried(step, FUSED, fused)}."
    action = f"Pass `fused=True`: `torch.optim.{name}(..., fused=True)`." if clear else left(fused, "`fused=True`")
    yield Finding("warning" if clear else "note", "optimizer-not-fused", text, action, saved(fused))


OPTIMIZER_NOT_FUSED = StepRule(_find)
