"""`optimizer-not-fused` and `channels-last`: changes that are advised only if they were tried and gained something."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_amp._text import percent
from lightning_amp.advice._gains import gain, is_worth_it, measured, most_gain
from lightning_amp.advice._record import CHANNELS_LAST, FUSED, Label, Step
from lightning_amp.advice.findings._finding import Evidence, Finding
from lightning_amp.measure import OPTIMIZER, times_as_fast


def optimizer_not_fused(evidence: Evidence) -> Iterator[Finding]:
    """Yield the finding if the optimizer takes 5 % of a step, or if `fused=True` was faster."""
    share = evidence.step.share(OPTIMIZER)
    name = next((optimizer.name for optimizer in evidence.step.optimizers if optimizer.can_fuse), None)
    if name is not None and (share >= 0.05 or is_worth_it(gain(evidence.step, FUSED))):
        text = f"`{name}` takes {percent(share)} of a step, in several kernels"
        action = f"Pass `fused=True`: `torch.optim.{name}(..., fused=True)`."
        yield _tried(evidence.step, FUSED, "optimizer-not-fused", text, action)


def channels_last(evidence: Evidence) -> Iterator[Finding]:
    """Yield the finding if convolutions of images with the channels first are a tenth of the FLOPs."""
    recorded = evidence.step.recorded
    share = min(1.0, recorded.convolution_flops / max(recorded.forward_flops, 1))
    if share >= 0.1 and not recorded.channels_last:
        text = f"{percent(share)} of the FLOPs of the forward are convolutions whose images have the channels first"
        action = "Write `self.to(memory_format=torch.channels_last)` at the end of the module's `__init__`."
        yield _tried(evidence.step, CHANNELS_LAST, "channels-last", text, action)


def _tried(step: Step, label: Label, code: str, text: str, action: str) -> Finding:
    """Return a warning with the action if the change gained enough here, else a note with its gain."""
    found = gain(step, label)
    if found is not None:
        text += f"; with `{label}`, tried here: {found}."
    elif measured(step, label) is None:
        text += f"; `{label}` was not timed."
    else:
        most = times_as_fast(most_gain(step, label))
        text += f"; `{label}` can make a step {most} at most, and its rounds show more, which is noise."
    if found is not None and is_worth_it(found):
        return Finding("warning", code, text, action, 1 - 1 / found.ratio)
    if found is None or found.claim in ("undecided", "one run"):
        return Finding("note", code, text, f"The race is undecided. Time `{label}` by itself, on a quiet machine.")
    gains = "little" if found.claim == "faster" else "less than 5 %"
    return Finding("note", code, text, f"Leave it as it is: `{label}` gains {gains} here.")
