"""Torch operations below autograd, by which the doctor knows what a step does. Their names have an underscore."""

from __future__ import annotations

import torch

_aten = torch.ops.aten

COPIES = {_aten._to_copy, _aten.copy_}
"""Operations that cast, also inside autocast. Remove when `_to_copy` has a public name."""

SOFTMAX = {_aten._log_softmax}
"""The operation of a loss over classes. Remove when it has a public name."""

CONVOLUTIONS = {_aten.convolution, _aten._convolution}
"""Forwards of convolutions. Remove when `_convolution` does."""

PRODUCTS = {_aten.mm: (0, 1), _aten.addmm: (1, 2), _aten.bmm: (0, 1), _aten.baddbmm: (1, 2)}
"""Products of two matrices, with the places of the matrices among the arguments. Remove with `CONVOLUTIONS`."""


def scaled_product(
    left: torch.Tensor, right: torch.Tensor, left_scale: torch.Tensor, right_scale: torch.Tensor
) -> torch.Tensor:
    """Multiply matrices in fp8, to bfloat16. Remove when torch 2.10, whose `scaled_mm` is public, is the oldest."""
    return _aten._scaled_mm(left, right, left_scale, right_scale, out_dtype=torch.bfloat16)
