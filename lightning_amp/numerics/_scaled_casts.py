"""Count the values that a scaled cast to 8 bits loses."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import final

from lightning_amp.numerics._limits import FORMATS, widest_dtype
from lightning_amp.numerics._ranges import dense

_LEAST = 1e-12
"""Torchao treats a smaller largest value as this one, so it does not scale such values up to the format's range."""


@final
class ScaledCast(NamedTuple):
    """A cast with dynamic scaling, as in torchao's recipes: the largest value becomes the largest of the format.

    Attributes:
        number_format: A key of `FORMATS`.
        rowwise: Whether each row (the last dimension) has its own scale, rather than one for the whole tensor.
        power_of_two: Whether the scale is rounded down to a power of two.

    """

    number_format: str
    rowwise: bool
    power_of_two: bool

    def losses(self, values: Tensor) -> Tensor:
        """Count the values that become zero, that are cut to the largest, and all that count: int64 [3].

        Zeros do not count. After scaling only non-finite values are cut. The counts of several tensors add up.
        """
        values = dense(values).detach().float()
        if values.numel() == 0:
            return torch.zeros(3, dtype=torch.int64, device=values.device)
        fits = FORMATS[self.number_format]
        magnitude = values.abs()
        whole = self.rowwise and values.dim() > 0
        top = magnitude.amax(-1, keepdim=True) if whole else magnitude.max()
        scale = fits.largest / top.to(widest_dtype(top.device)).clamp(min=_LEAST)
        if self.power_of_two:
            scale = torch.exp2(torch.floor(torch.log2(scale)))
        scaled = magnitude * scale  # with an infinite value this is NaN, as in torchao
        counted = values != 0
        to_zero = (counted & (scaled <= fits.rounds_to_zero)).count_nonzero()
        saturated = (~(scaled < fits.overflows_from)).count_nonzero()
        return torch.stack([to_zero, saturated, counted.count_nonzero()])
