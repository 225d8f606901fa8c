"""A loss as a witness: one scalar that is finite exactly while all losses since the last step were."""

from __future__ import annotations

from torch import Tensor

from lightning_amp.numerics import nonfinite


def merge_losses(probe: Tensor | None, loss: Tensor) -> Tensor:
    """Return a probe [] that is finite exactly if `probe` [] and all of `loss` are; the first loss costs nothing."""
    loss = loss.detach()
    if loss.dim() != 0:
        loss = (loss.float() * 0).sum()
    if probe is None:
        return loss
    return probe.float() * 0 + loss.to(probe.device).float() * 0


def held_by(probe: Tensor, found_inf: Tensor) -> Tensor:
    """Return whether an overflow, `found_inf` [], is that of the loss, so that the scale stays; bool, [], beside it."""
    return nonfinite(probe).to(found_inf.device).logical_and(found_inf)
