"""The text of the error for a run in which too many steps in a row are skipped."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_amp._text import exact
from lightning_amp.findings import StepRecord


def by_losses(reasons: Sequence[str]) -> bool:
    """Return whether most of these skips had a non-finite loss, which no other precision prevents."""
    return reasons.count("loss") > len(reasons) // 2


def why(reasons: Sequence[str], limit: int | None, scale: float) -> str:
    """Return a sentence with the number of skipped steps, the loss scale of the last one, and the reasons."""
    losses = reasons.count("loss")
    return (
        f"{len(reasons)} optimizer steps in a row were skipped (the limit is {limit}), the last at loss scale"
        f" {exact(scale)}. Reasons: {losses} with a non-finite loss, {len(reasons) - losses} with non-finite gradients"
        " under a finite loss."
    )


def advice(reasons: Sequence[str], last: StepRecord, *, fallback: bool, is_located: bool) -> str:
    """Return sentences with advice if the cause was not found.

    `last` is the last skipped step. `fallback`: the plugin could continue in another precision if the user passes
    `fallback`.
    `is_located`: an `OverflowLocator` is attached.
    """
    look = [] if is_located else ["Attach `OverflowLocator()`: it finds the operation, and tries remedies."]
    if last.precision != "fp32":
        look.append("Run the module with precision 'fp32' to see whether it happens there too.")
    if by_losses(reasons):
        return " ".join(["The loss itself is not finite, which no loss scale can change.", *look])
    first = "The gradients are not finite although the loss is"
    if last.scale == last.next_scale == 1:
        roots = "look for roots, logarithms and quotients at 0, which want an epsilon."
        return " ".join([f"{first}, and no scale is to blame: {roots}", *look])
    also = "; with `fallback=['bf16']` a run that is stuck goes on in 'bf16' by itself" if fallback else ""
    if last.scale == last.next_scale > 1:
        smaller = "use a smaller static scale or `min_scale`, or leave `scaler` out for a dynamic one"
        return " ".join([f"{first}, and this scale does not fall: {smaller}{also}.", *look])
    large = "keep a module whose gradients are large in fp32, or use 'bf16', which has the range of fp32"
    return " ".join([f"{first}. If they overflow, {large}{also}.", *look])
