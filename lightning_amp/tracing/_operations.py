"""The one table of operations: how they are called, where they end, and which of them mask, add up or explode."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import final

# -- names -------------------------------------------------------------------------------------------------------------

_PLAIN_NAMES = {
    "true_divide": "div", "divide": "div", "truediv": "div", "rdiv": "div", "rtruediv": "div", "multiply": "mul",
    "subtract": "sub", "rsub": "sub", "negative": "neg", "setitem": "assignment", "getitem": "indexing",
    "rpow": "pow", "rmul": "mul", "radd": "add", "rmatmul": "matmul", "iadd": "add", "isub": "sub", "imul": "mul",
    "itruediv": "div", "idiv": "div", "ipow": "pow", "concat": "cat", "concatenate": "cat", "type": "to",
    "half": "to", "bfloat16": "to",
}  # fmt: skip
_REVERSED = {"__rdiv__", "__rtruediv__"}
"""Divisions of a number by a tensor."""
_NOT_LOOKED_AT = {
    "get", "set", "size", "dim", "numel", "backward", "grad", "detach", "requires_grad", "is_floating_point",
    "is_complex", "stride", "data_ptr", "register_hook", "retain_grad", "item", "tolist", "isfinite", "isnan", "isinf",
    "len", "repr", "format", "bool", "set_grad_enabled", "is_inference", "element_size", "storage", "untyped_storage",
}  # fmt: skip

# -- kinds; by plain name, without the underscore of what works in place -----------------------------------------------

ROOTS = {"sqrt", "rsqrt", "log", "log2", "log10", "log1p", "pow", "reciprocal", "div", "norm", "vector_norm", "std",
         "normalize", "cosine_similarity", "cdist", "pairwise_distance", "float_power", "acos", "asin", "atanh",
         "atan2", "xlogy", "logit"}  # fmt: skip
"""Operations that are not finite, or have no finite derivative, where an argument is 0 or at an end."""
ENDS_AT_ONE = {"acos", "asin", "atanh"}
"""Operations whose derivative is infinite at 1 and -1."""
ONE_SIDED = {"sqrt", "rsqrt", "log", "log2", "log10", "log1p", "pow", "logit", *ENDS_AT_ONE}
"""Operations that are NaN on one side of their end."""
POLES = {"log", "log2", "log10", "logit", "xlogy", "div", "reciprocal"}
"""Operations whose negative infinity is no mask."""
NORMS = {"norm", "vector_norm"}
EXPONENTIALS = {"exp", "expm1", "exp2", "cosh", "sinh"}
REDUCTIONS = {"mean", "std", "var", "max", "min", "amax", "amin", "nanmean", "median", "mse_loss", "l1_loss",
              "smooth_l1_loss", "huber_loss", "cross_entropy", "nll_loss", "binary_cross_entropy",
              "binary_cross_entropy_with_logits", "kl_div", "triplet_margin_loss", "norm"}  # fmt: skip
SUMS = {"sum", "cumsum", "nansum"}
SUMMING = ("sum", "logsumexp", "mean")
"""Operations that add up what an exponential made."""
SOFTMAXES = {"softmax", "log_softmax", "logsumexp", "cross_entropy", "scaled_dot_product_attention",
             "multi_head_attention_forward", "softmin", "gumbel_softmax"}  # fmt: skip
ATTENTION = {"scaled_dot_product_attention", "multi_head_attention_forward"}
CASTS = {"to", "float"}
PRODUCTS_AND_SUMS = {"mul", "matmul", "bmm", "sub", "add"}
"""Operations of two tensors: 0 times infinity, and infinity minus infinity, are NaN."""
LITERALS = {"masked_fill", "where", "full", "new_full", "full_like", "tensor", "as_tensor", "new_tensor", "fill",
            "assignment", "index_fill", "scatter", "pad"}  # fmt: skip
"""Operations that put a value somewhere: an infinity that comes from one was written there on purpose."""
COMPARISONS_WITH_TARGETS = {"sub", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "pairwise_distance",
                            "cosine_similarity"}  # fmt: skip
"""A good prediction minus its target is small, and its error is a large part of it: nothing is wrong with that."""


@final
class Known(NamedTuple):
    """What is known of a function of torch.

    Attributes:
        name: As users know it: `"div"`, in place `"div_"`.
        known_as: The name by which its arguments are understood: `1 / x` is a division, and has those of `reciprocal`.
        written: As torch has it: `"__truediv__"`.
        is_in_place: Whether it writes into its first argument.

    """

    name: str
    known_as: str
    written: str
    is_in_place: bool


@functools.cache
def known_operation(func: Any) -> Known | None:
    """Look up a function of torch; `None` of what computes nothing."""
    written = str(getattr(func, "__name__", func))
    in_place = written.endswith("_") and not written.endswith("__")
    name = written.strip("_")
    name = _PLAIN_NAMES.get(name, name)
    if name in _NOT_LOOKED_AT or name.startswith(("empty", "new_empty")):
        return None
    name = f"{name}_" if in_place else name
    return Known(name, "reciprocal" if written in _REVERSED else name, written, in_place or name == "assignment")


def plain(name: str) -> str:
    """Return the name of an operation without the underscore of what works in place."""
    return name.removesuffix("_")


@final
class Domain(NamedTuple):
    """Where an operation ends, in words.

    Attributes:
        end: Where it, or its derivative, is not finite.
        outside: Where it is NaN.
        inside: Where it is neither.
        clamp: Arguments of `.clamp` that keep it there.

    """

    end: str = "0"
    outside: str = "below 0"
    inside: str = "from below 0"
    clamp: str = "min=eps"


def domain(name: str) -> Domain:
    """Return the words for an operation."""
    if plain(name) in ENDS_AT_ONE:
        return Domain("1 or -1", "beyond 1 or -1", "between -1 and 1", "-1 + eps, 1 - eps")
    if plain(name) == "logit":
        return Domain("0 or 1", "below 0 or above 1", "between 0 and 1", "eps, 1 - eps")
    if plain(name) == "log1p":
        return Domain("-1", "below -1", "above -1", "min=eps - 1")
    return Domain()


# -- arguments ---------------------------------------------------------------------------------------------------------


def argument_of(name: str, args: Any, kwargs: Any) -> Any:
    """Return what must not be 0 in an operation: a divisor, what is under a root."""
    if plain(name) == "div":
        if len(args) > 1 and isinstance(args[0], Tensor):
            return args[1] if "other" not in kwargs else kwargs["other"]
        return kwargs.get("other", args[-1] if args else None)
    if name == "xlogy" and len(args) > 1:
        return args[1]
    return args[0] if args else kwargs.get("input")


def pole_of(name: str, args: Any, kwargs: Any) -> Tensor | None:
    """Return the tensor that must not be 0, or at another end; `None` for other operations."""
    if plain(name) not in ROOTS or not has_roots(name, args, kwargs):
        return None
    value = argument_of(name, args, kwargs)
    return value if isinstance(value, Tensor) else None


def has_roots(name: str, args: Any, kwargs: Any) -> bool:
    """Return whether 0 matters: to a power it does below 1."""
    if plain(name) not in ("pow", "float_power"):
        return True
    exponent = kwargs.get("exponent", args[1] if len(args) > 1 else 2)
    return isinstance(exponent, Tensor) or exponent < 1 or exponent != int(exponent)


def distance_from_end(name: str, value: Tensor) -> Tensor:
    """Return how far each value is inside of the end."""
    if plain(name) in ENDS_AT_ONE:
        return 1 - value.abs()
    if plain(name) == "logit":
        return torch.minimum(value, 1 - value)
    return value + 1 if plain(name) == "log1p" else value
