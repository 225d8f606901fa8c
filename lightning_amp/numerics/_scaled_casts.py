"""Casts to 8 bits that scale first, so that the largest value just fits: what they lose."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import final

from lightning_amp.numerics._limits import limits, widest_dtype
from lightning_amp.numerics._ranges import dense

_LEAST = 1e-12
"""What torchao takes the largest value for where it is smaller: such values are not scaled up to the format's range."""


@final
class ScaledCast(NamedTuple):
    """A cast with dynamic scaling, as torchao's recipes do it.

    Attributes:
        number_format: See :func:`limits`.
        rowwise: Whether each row (the last dimension) has a scale of its own, rather than the whole tensor one.
        power_of_two: Whether the scale is rounded down to one.

    """

    number_format: str
    rowwise: bool
    power_of_two: bool

    def losses(self, values: Tensor) -> Tensor:
        """Count the values that become zero, that are cut to the largest, and all that count: int64, shape [3].

        Counts of several tensors add up. Scaling leaves nothing to be cut, so the second is not zero only where values
        are not finite. Zeros do not count.

        Args:
            values: Of any shape and dtype.

        """
        values = dense(values).detach().float()
        if values.numel() == 0:
            return torch.zeros(3, dtype=torch.int64, device=values.device)
        fits = limits(self.number_format)
        magnitude = values.abs()
        whole = self.rowwise and values.dim() > 0
        top = magnitude.amax(-1, keepdim=True) if whole else magnitude.max()
        scale = fits.largest / top.to(widest_dtype(top.device)).clamp(min=_LEAST)
        if self.power_of_two:
            scale = torch.exp2(torch.floor(torch.log2(scale)))
        scaled = magnitude * scale  # in float64, too: an infinite value makes it NaN, as in torchao
        counted = values != 0
        to_zero = (counted & (scaled <= fits.rounds_to_zero)).count_nonzero()
        saturated = (~(scaled < fits.overflows_from)).count_nonzero()
        return torch.stack([to_zero, saturated, counted.count_nonzero()])
