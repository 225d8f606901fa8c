"""What stands out in the arguments of an operation whose result is not finite: a divisor of 0, a row that is masked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from typing_extensions import final

Kind = Literal["", "empty", "ignored", "masked", "zero", "negative", "one", "cast", "literal", "infinite", "sum"]

ROOTS = {"sqrt", "rsqrt", "log", "log2", "log10", "log1p", "pow", "reciprocal", "div", "norm", "vector_norm", "std",
         "normalize", "cosine_similarity", "cdist", "pairwise_distance", "float_power", "acos", "asin", "atanh",
         "atan2", "xlogy", "logit", "sqrt_", "div_", "pow_", "log_", "rsqrt_", "reciprocal_"}  # fmt: skip
"""Operations that are not finite, or have no finite derivative, where an argument is 0 or at an end."""
_ENDS = {"acos", "asin", "atanh"}
"""Operations whose derivative is infinite at 1 and -1."""
_DOMAINS = {"sqrt", "rsqrt", "log", "log2", "log10", "log1p", "pow", "logit", *_ENDS}
"""Operations that are NaN on one side of their end."""
REDUCTIONS = {"mean", "std", "var", "max", "min", "amax", "amin", "nanmean", "median", "mse_loss", "l1_loss",
              "smooth_l1_loss", "huber_loss", "cross_entropy", "nll_loss", "binary_cross_entropy",
              "binary_cross_entropy_with_logits", "kl_div", "triplet_margin_loss", "norm"}  # fmt: skip
SOFTMAXES = {"softmax", "log_softmax", "logsumexp", "cross_entropy", "scaled_dot_product_attention",
             "multi_head_attention_forward", "softmin", "gumbel_softmax"}  # fmt: skip
_SUMS = {"sum", "cumsum", "nansum"}
LITERALS = {"masked_fill", "masked_fill_", "where", "full", "new_full", "full_like", "tensor", "as_tensor",
            "new_tensor", "fill_", "assignment", "index_fill", "index_fill_", "scatter", "scatter_", "pad",
            "fill"}  # fmt: skip
"""Operations that put a value somewhere: an infinity that comes from one was written there on purpose."""


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
    plain = name.removesuffix("_")
    if plain in _ENDS:
        return Domain("1 or -1", "beyond 1 or -1", "between -1 and 1", "-1 + eps, 1 - eps")
    if plain == "logit":
        return Domain("0 or 1", "below 0 or above 1", "between 0 and 1", "eps, 1 - eps")
    if plain == "log1p":
        return Domain("-1", "below -1", "above -1", "min=eps - 1")
    return Domain()


@final
@dataclass(frozen=True, slots=True)
class Facts:
    """What stands out.

    Attributes:
        kind: `"empty"`: it is taken over no values. `"ignored"`: each label of the batch is left out. `"masked"`: all
            of a row is minus infinity. `"zero"`: a divisor, or what is under a root or logarithm, is 0. `"negative"`:
            the latter is below 0. `"one"`: a spread over one value. `"cast"`: the value does not fit into the dtype.
            `"literal"`: an infinity was written there. `"infinite"`: one went into a product, sum or difference.
            `"sum"`: finite values were added up. Empty: nothing.
        index: Where, of the first: the index of a row or element.
        count: At how many places; of a sum, how many values were added up for each result.

    """

    kind: Kind = ""
    index: tuple[int, ...] = ()
    count: int = 0


def facts_of(name: str, args: Any, kwargs: Any) -> Facts:
    """Look at the arguments of an operation. Waits for the device."""
    tensors = [t for t in args if isinstance(t, Tensor)]
    first = tensors[0] if tensors else None
    if first is not None and name in REDUCTIONS and first.numel() == 0:
        return Facts("empty")
    if name in ("cross_entropy", "nll_loss") and _all_ignored(args, kwargs):
        return Facts("ignored")
    if name in SOFTMAXES:
        return _masked_row(name, args, kwargs)
    if name in ("std", "var") and first is not None:
        return Facts("one") if _num_reduced(first, args, kwargs) == 1 else Facts()
    if name in LITERALS:
        return Facts("literal")
    if name == "to":
        return Facts("cast")
    if name in ("mul", "mul_", "matmul", "bmm", "sub", "sub_", "add", "add_") and len(tensors) > 1:
        return Facts("infinite") if any(bool(torch.isinf(t.detach()).any()) for t in tensors) else Facts()
    if name in _SUMS and first is not None and bool(torch.isfinite(first.detach()).all()):
        return Facts("sum", (), _num_reduced(first, args, kwargs))
    return _root(name, args, kwargs)


def argument_of(name: str, args: Any, kwargs: Any) -> Any:
    """Return what must not be 0 in an operation: a divisor, what is under a root."""
    if name in ("div", "div_"):
        if len(args) > 1 and isinstance(args[0], Tensor):
            return args[1] if "other" not in kwargs else kwargs["other"]
        return kwargs.get("other", args[-1] if args else None)
    if name == "xlogy" and len(args) > 1:
        return args[1]
    return args[0] if args else kwargs.get("input")


def pole_of(name: str, args: Any, kwargs: Any) -> Tensor | None:
    """Return the tensor that must not be 0, or at another end; `None` for other operations."""
    if name not in ROOTS or not _has_roots(name, args, kwargs):
        return None
    value = argument_of(name, args, kwargs)
    return value if isinstance(value, Tensor) else None


def smallest_magnitude(name: str, args: Any, kwargs: Any) -> Tensor | None:
    """Return the smallest magnitude of what must not be 0, [], on its device; `None` for other operations."""
    value = pole_of(name, args, kwargs)
    if value is None or not value.numel() or not value.is_floating_point() or value.is_nested:
        return None
    return _distance(name.removesuffix("_"), value.detach()).abs().min()


def _distance(name: str, value: Tensor) -> Tensor:
    """Return how far each value is inside of the end."""
    if name in _ENDS:
        return 1 - value.abs()
    if name == "logit":
        return torch.minimum(value, 1 - value)
    return value + 1 if name == "log1p" else value


def _root(name: str, args: Any, kwargs: Any) -> Facts:
    plain = name.removesuffix("_")
    if plain not in ROOTS or not _has_roots(plain, args, kwargs):
        return Facts()
    value = argument_of(name, args, kwargs)
    if isinstance(value, (int, float)):
        return Facts("zero", (), 1) if value == 0 else Facts()
    if not isinstance(value, Tensor):
        return Facts()
    distance = value.detach().abs() if value.is_complex() else _distance(plain, value.detach())
    if plain in _DOMAINS and bool((distance < 0).any()):
        below = distance < 0  # to a power: that is no whole number
        return Facts("negative", _first(below), int(below.sum()))
    zero = distance == 0
    return Facts("zero", _first(zero), int(zero.sum())) if bool(zero.any()) else Facts()


def _has_roots(name: str, args: Any, kwargs: Any) -> bool:
    """Return whether 0 matters: to a power it does below 1."""
    if name not in ("pow", "float_power", "pow_"):
        return True
    exponent = kwargs.get("exponent", args[1] if len(args) > 1 else 2)
    return isinstance(exponent, Tensor) or exponent < 1 or exponent != int(exponent)


def _all_ignored(args: Any, kwargs: Any) -> bool:
    target = args[1] if len(args) > 1 else kwargs.get("target")
    ignored = kwargs.get("ignore_index", -100)
    if not isinstance(target, Tensor) or target.is_floating_point():
        return False
    return bool((target == ignored).all())


def _masked_row(name: str, args: Any, kwargs: Any) -> Facts:
    if name in ("scaled_dot_product_attention", "multi_head_attention_forward"):
        masks = [value for key, value in kwargs.items() if "mask" in key and isinstance(value, Tensor)]
        masks += [value for value in args[3:] if isinstance(value, Tensor) and value.dtype == torch.bool]
        padding = kwargs.get("key_padding_mask")
        for mask in masks:
            if mask.dtype == torch.bool:
                # scaled_dot_product_attention takes part where it is true, multi-head attention where it is false
                hidden = ~mask if name == "scaled_dot_product_attention" and mask is not padding else mask
            else:
                hidden = torch.isneginf(mask)
            rows = hidden.all(-1)
            if bool(rows.any()):
                return Facts("masked", _first(rows), int(rows.sum()))
        return Facts()
    value = args[0] if args else kwargs.get("input")
    if not isinstance(value, Tensor) or not value.dim():
        return Facts()
    dim = kwargs.get("dim", args[1] if len(args) > 1 and isinstance(args[1], int) else -1)
    if name == "cross_entropy":
        dim = 1 if value.dim() > 1 else 0
    dim = dim if isinstance(dim, int) else -1
    rows = torch.isneginf(value.detach()).all(dim)
    return Facts("masked", _first(rows), int(rows.sum())) if bool(rows.any()) else Facts()


def _num_reduced(value: Tensor, args: Any, kwargs: Any) -> int:
    """Return how many values a reduction takes for each of its results."""
    dim = kwargs.get("dim", args[1] if len(args) > 1 and not isinstance(args[1], bool) else None)
    if dim is None or not value.dim():
        return value.numel()
    count = 1
    for one in dim if isinstance(dim, (list, tuple)) else [dim]:
        count *= value.shape[one]
    return count


def _first(flags: Tensor) -> tuple[int, ...]:
    if not flags.dim():
        return ()
    return tuple(int(i) for i in flags.nonzero()[0].tolist())
