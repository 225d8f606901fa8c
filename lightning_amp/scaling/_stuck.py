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


def advice(reasons: Sequence[str], scale: float, next_scale: float, *, fallback: bool) -> str:
    """Say what to try; a sentence.

    Args:
        reasons: Of the skips.
        scale: Of the last one.
        next_scale: That follows it.
        fallback: Whether the plugin could go on in another precision if it were told to.

    """
    if by_losses(reasons):
        return (
            "The forward pass itself is broken: look at the data and at the learning rate, or run the module with"
            " precision 'fp32' to see whether it happens there too."
        )
    if scale == next_scale == 1:
        return (
            "The gradients are not finite although the loss is, and no scale is to blame: look for roots, logarithms"
            " and quotients at 0, which want an epsilon, and run the module with precision 'fp32' to see whether it"
            " happens there too."
        )
    also = "; with `fallback=['bf16']` a run that is stuck goes on in 'bf16' by itself" if fallback else ""
    if scale == next_scale > 1:
        return (
            "The gradients overflow although the loss is finite, and this scale does not fall: use a smaller static"
            f" scale or `min_scale`, or leave `scaler` out for a dynamic one{also}."
        )
    return (
        "The gradients overflow although the loss is finite: look for a module whose gradients are unusually large,"
        f" keep it in fp32, clip its inputs, or use 'bf16', whose range is that of fp32{also}."
    )
