"""Torch operations below autograd. They are used to analyse a recorded step. Their names have an underscore."""

from __future__ import annotations

import functools
from typing import Any

import torch

_aten = torch.ops.aten

WAITS = {
    _aten._local_scalar_dense: "reads a value",
    _aten.nonzero: "nonzero",
    _aten.masked_select: "masked_select",
    _aten.equal: "equal",
    _aten._unique2: "unique",
    _aten.unique_dim: "unique",
    _aten.unique_consecutive: "unique_consecutive",
}
"""Operations that make the host wait for their result, or for its size. Remove when torch tags them as such."""

INDEXING = {_aten.index, _aten.index_put, _aten.index_put_}
"""Operations that wait if an index is a mask, since they count its rows. Remove with `WAITS`."""

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


@functools.cache
def written(operation: Any) -> tuple[int | str, ...]:
    """Return the arguments that an operation writes to: by position, keyword-only ones by name.

    Remove with `viewed_or_written`.
    """
    schema = getattr(operation, "_schema", None)  # a higher-order operator has no schema
    arguments = [] if schema is None else enumerate(schema.arguments)
    changed = [(i, one) for i, one in arguments if one.alias_info is not None and one.alias_info.is_write]
    return tuple(one.name if one.kwarg_only else i for i, one in changed)


@functools.cache
def viewed_or_written(operation: Any) -> frozenset[int | str]:
    """Return the arguments, by position and by name, whose memory an operation returns or writes to.

    Remove when an operation's schema has a public name.
    """
    schema = getattr(operation, "_schema", None)  # a higher-order operator has no schema
    arguments = [] if schema is None else enumerate(schema.arguments)
    return frozenset(key for i, one in arguments if one.alias_info is not None for key in (i, one.name))
