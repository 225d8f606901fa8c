"""What is said of a run in which one step after the other is skipped."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_amp._text import exact


def by_losses(reasons: Sequence[str]) -> bool:
    """Return whether more than half of these skips had a non-finite loss, against which no precision helps."""
    return reasons.count("loss") > len(reasons) // 2


def why(reasons: Sequence[str], limit: int | None, scale: float) -> str:
    """Say how many steps were skipped, the last one at this loss scale, and for which reasons; a sentence."""
    losses = reasons.count("loss")
    return (
        f"{len(reasons)} optimizer steps in a row were skipped (the limit is {limit}), the last at loss scale"
        f" {exact(scale)}: {losses} with a non-finite loss, {len(reasons) - losses} with non-finite gradients under a"
        " finite loss."
    )


def advice(
    reasons: Sequence[str], scale: float, next_scale: float, *, precision: str, fallback: bool, is_located: bool
) -> str:
    """Say what to try where nobody has found the cause; sentences.

    Args:
        reasons: Of the skips.
        scale: Of the last one.
        next_scale: That follows it.
        precision: Of the last one.
        fallback: Whether the plugin could go on in another precision if it were told to.
        is_located: Whether an `OverflowLocator` is attached.

    """
    look = [] if is_located else ["Attach `OverflowLocator()`: it looks for the operation, and tries what may help."]
    if precision != "fp32":
        look.append("Run the module with precision 'fp32' to see whether it happens there too.")
    if by_losses(reasons):
        return " ".join(["The loss itself is not finite, which no loss scale can change.", *look])
    first = "The gradients are not finite although the loss is"
    if scale == next_scale == 1:
        roots = "look for roots, logarithms and quotients at 0, which want an epsilon."
        return " ".join([f"{first}, and no scale is to blame: {roots}", *look])
    also = "; with `fallback=['bf16']` a run that is stuck goes on in 'bf16' by itself" if fallback else ""
    if scale == next_scale > 1:
        smaller = "use a smaller static scale or `min_scale`, or leave `scaler` out for a dynamic one"
        return " ".join([f"{first}, and this scale does not fall: {smaller}{also}.", *look])
    large = "keep a module whose gradients are large in fp32, or use 'bf16', whose range is that of fp32"
    return " ".join([f"{first}. If they overflow, {large}{also}.", *look])
