"""`large-logits`: the inputs of the loss hold a good part of the memory."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_amp._text import memory, percent
from lightning_amp.advice._record import Loss, Step
from lightning_amp.advice.findings._finding import Finding, Seen, StepRule

_LARGE_BYTES = 16 * 2**20


def largest_loss(step: Step) -> Loss | None:
    """Return the largest loss over classes; `None` without any."""
    return max(step.recorded.losses, key=lambda loss: loss.numel, default=None)


def _find(seen: Seen) -> Iterator[Finding]:
    held, peak = seen.step.memory.logits, max(seen.step.memory.peak, 1)
    share, loss = held / peak, largest_loss(seen.step)
    if loss is None or share < 0.1 or loss.classes < 256:
        return
    text = (
        f"The logits, {loss.rows:,} x {loss.classes:,}, hold {memory(held)} at the peak, {percent(share)} of it:"
        " autocast computes the loss in fp32, so there are copies in both formats, and their gradients."
    )
    action = (
        "Compute the loss in chunks of rows, each under activation checkpointing: `sum(checkpoint(chunk_loss, h, t,"
        " use_reentrant=False) for h, t in zip(hidden.chunk(8), targets.chunk(8))) / len(targets)`, where `chunk_loss`"
        ' is `F.cross_entropy(head(h), t, reduction="sum")`: an eighth of it is there at a time.'
    )
    scarce = share >= 0.25 and held >= 0.02 * seen.machine.memory_gib * 2**30 > 0
    large = scarce or (share >= 0.5 and held >= _LARGE_BYTES)
    yield Finding("warning" if large else "note", "large-logits", text, action, share)


LARGE_LOGITS = StepRule(_find, {"logits": largest_loss})
