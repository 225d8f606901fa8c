"""The one table of operations: their names, their poles, and which of them mask, add up or overflow."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from typing_extensions import final

from lightning_amp.findings import OpKind

SpecialKind = OpKind | Literal["pole"]

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
_COMPUTES_NOTHING = {
    "get", "set", "size", "dim", "numel", "backward", "grad", "detach", "requires_grad", "is_floating_point",
    "is_complex", "stride", "data_ptr", "register_hook", "retain_grad", "item", "tolist", "isfinite", "isnan", "isinf",
    "len", "repr", "format", "bool", "set_grad_enabled", "is_inference", "element_size", "storage", "untyped_storage",
}  # fmt: skip

# -- kinds, by plain name: without the underscore of operations in place ----------------------------------------------

ROOTS = {"sqrt", "rsqrt", "log", "log2", "log10", "log1p", "pow", "reciprocal", "div", "norm", "vector_norm", "std",
         "normalize", "cosine_similarity", "cdist", "pairwise_distance", "float_power", "acos", "asin", "atanh",
         "atan2", "xlogy", "logit"}  # fmt: skip
"""Operations whose result or derivative is not finite where an argument is 0 or at another pole."""
ONE_SIDED = {"sqrt", "rsqrt", "log", "log2", "log10", "log1p", "pow", "logit", "acos", "asin", "atanh"}
"""Operations whose result is NaN on one side of their pole."""
EXPONENTIALS = {"exp", "expm1", "exp2", "cosh", "sinh"}
REDUCTIONS = {"mean", "std", "var", "max", "min", "amax", "amin", "nanmean", "median", "mse_loss", "l1_loss",
              "smooth_l1_loss", "huber_loss", "cross_entropy", "nll_loss", "binary_cross_entropy",
              "binary_cross_entropy_with_logits", "kl_div", "triplet_margin_loss", "norm"}  # fmt: skip
SUMS = {"sum", "cumsum", "nansum"}
SPREADS = {"std", "var"}
SUMMING = {"sum", "logsumexp", "mean", "div"}
"""Operations that add up exponentials, or divide by their sum."""
SOFTMAXES = {"softmax", "log_softmax", "logsumexp", "cross_entropy", "scaled_dot_product_attention",
             "multi_head_attention_forward", "softmin", "gumbel_softmax"}  # fmt: skip
CASTS = {"to", "float"}
PRODUCTS = {"mul", "matmul", "bmm", "sub", "add"}
"""Operations of two tensors: 0 times infinity, and infinity minus infinity, are NaN."""
LITERALS = {"masked_fill", "where", "full", "new_full", "full_like", "tensor", "as_tensor", "new_tensor", "fill",
            "assignment", "index_fill", "scatter", "pad"}  # fmt: skip
"""Operations that write a given value: if it is infinite, the code wrote it on purpose."""
_ALWAYS: dict[str, SpecialKind] = {"to": "cast", **dict.fromkeys(SUMS, "sum"), **dict.fromkeys(LITERALS, "literal")}


@final
class Known(NamedTuple):
    """One function of torch in this table.

    Attributes:
        name: The name in user code: `"div"`, in place `"div_"`.
        known_as: The operation that has its arguments: `1 / x` is a `"div"` with the arguments of `"reciprocal"`.
        is_collective: Its result depends on values of other ranks, and may not be there when it returns.

    """

    name: str
    known_as: str
    is_in_place: bool
    is_collective: bool = False


@functools.cache
def known_operation(func: Any) -> Known | None:
    """Look up a function of torch; `None` if the function computes nothing."""
    written = str(getattr(func, "__name__", func))
    in_place = written.endswith("_") and not written.endswith("__")
    name = written.strip("_")
    name = _PLAIN_NAMES.get(name, name)
    if name in _COMPUTES_NOTHING or name.startswith(("empty", "new_empty")):
        return None
    name = f"{name}_" if in_place else name
    known_as = "reciprocal" if written in _REVERSED else name
    return Known(name, known_as, in_place or name == "assignment", _takes_values_of_others(func))


def plain(name: str) -> str:
    """Return the name of an operation without the underscore of operations in place."""
    return name.removesuffix("_")


@final
class Domain(NamedTuple):
    """The domain of an operation, in words.

    Attributes:
        end: Arguments where the result, or the derivative, is not finite.
        outside: Arguments where the result is NaN.
        inside: Arguments where the result and the derivative are finite.
        distance: Returns how far each value is from the end; negative outside of the domain.
    """

    end: str
    outside: str
    inside: str
    distance: Callable[[Tensor], Tensor]


_DOMAINS = {
    **dict.fromkeys(
        ("acos", "asin", "atanh"), Domain("1 or -1", "beyond 1 or -1", "between -1 and 1", lambda x: 1 - x.abs())
    ),
    "logit": Domain("0 or 1", "below 0 or above 1", "between 0 and 1", lambda x: torch.minimum(x, 1 - x)),
    "log1p": Domain("-1", "below -1", "above -1", lambda x: x + 1),
}


def domain(name: str) -> Domain:
    """Return the domain of an operation."""
    return _DOMAINS.get(plain(name), Domain("0", "below 0", "above 0", lambda x: x))


# -- arguments ---------------------------------------------------------------------------------------------------------


def argument_of(name: str, args: Any, kwargs: Any) -> Any:
    """Return the argument that must not be 0: a divisor, or the argument of a root or logarithm; `None` without one.

    An argument of 0 matters to a power only if the exponent is below 1 or fractional.
    """
    name = plain(name)
    if name in ("div", "xlogy"):
        return kwargs.get("other", args[1] if len(args) > 1 else None)
    if name in ("pow", "float_power"):
        exponent = kwargs.get("exponent", args[1] if len(args) > 1 else 2)
        if not isinstance(exponent, Tensor) and exponent >= 1 and exponent == int(exponent):
            return None
    return (args[0] if args else kwargs.get("input")) if name in ROOTS else None


def count_of(name: str, args: Any, kwargs: Any) -> int:
    """Return how many values a sum or a spread combines into each result; 0 for other operations."""
    value = next((t for t in args if isinstance(t, Tensor)), None)
    if value is None or name not in (*SUMS, *SPREADS):
        return 0
    dim = kwargs.get("dim", args[1] if len(args) > 1 and not isinstance(args[1], bool) else None)
    if dim is None or not value.dim():
        return value.numel()
    return math.prod(value.shape[one] for one in (dim if isinstance(dim, (list, tuple)) else [dim]))


def special_values(name: str, args: Any, kwargs: Any) -> list[tuple[SpecialKind, list[Tensor] | None]]:
    """Return what may be special about the arguments of an operation, each with scalars on the device.

    For the kinds, see :class:`~lightning_amp.findings.Op`. A kind applies if its scalar is above 0, or if it has
    none. `"pole"` has the least distance from 0, or another pole, with its sign, and its least magnitude.
    """
    value = next((t for t in args if isinstance(t, Tensor)), None)
    if value is not None and name in REDUCTIONS and not value.numel():
        return [("empty", None)]
    if name in SPREADS and count_of(name, args, kwargs) == 1:
        return [("one", None)]
    if plain(name) in _ALWAYS:
        return [(_ALWAYS[plain(name)], None)]
    found: list[tuple[SpecialKind, list[Tensor] | None]] = []
    target = args[1] if len(args) > 1 else kwargs.get("target")
    if name in ("cross_entropy", "nll_loss") and isinstance(target, Tensor) and not target.is_floating_point():
        found.append(("ignored", [(target == kwargs.get("ignore_index", -100)).all().float()]))
    if name in SOFTMAXES:
        return [*found, *(("masked", [rows.any().float()]) for rows in _masked_rows(name, args, kwargs))]
    pole = argument_of(name, args, kwargs)
    if isinstance(pole, (int, float)):
        pole = torch.tensor(float(pole))
    if isinstance(pole, Tensor) and pole.numel() and not pole.is_nested:
        distance = pole.detach().abs() if pole.is_complex() else domain(name).distance(pole.detach())
        signed = distance if plain(name) in ONE_SIDED else distance.abs()
        found.append(("pole", [signed.min(), distance.abs().min()]))
    return found


def _masked_rows(name: str, args: Any, kwargs: Any) -> list[Tensor]:
    """Return flags, for each mask or input: which rows are hidden, or minus infinity, throughout."""
    if "attention" in name:
        masks = [value for key, value in kwargs.items() if "mask" in key and isinstance(value, Tensor)]
        masks += [value for value in args[3:] if isinstance(value, Tensor) and value.dtype == torch.bool]
        # True means "attend" in scaled_dot_product_attention, and "do not attend" in multi-head attention
        is_reversed = name == "scaled_dot_product_attention"
        hidden = [torch.isneginf(m) if m.dtype != torch.bool else ~m if is_reversed else m for m in masks]
        return [mask.all(-1) for mask in hidden]
    value = args[0] if args else kwargs.get("input")
    if not isinstance(value, Tensor) or not value.dim():
        return []
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    if not isinstance(dim, int):
        dim = min(1, value.dim() - 1) if name == "cross_entropy" else -1
    return [torch.isneginf(value.detach()).all(dim)]


def _takes_values_of_others(operation: Any) -> bool:
    """Return whether the result of an operation depends on values of other ranks.

    Remove when torch tags collective operations.
    """
    module, name = str(getattr(operation, "__module__", "")), str(getattr(operation, "__name__", ""))
    is_collective = module.startswith(("torch._ops._c10d_functional", "torch.distributed.distributed_c10d"))
    return is_collective and not name.startswith(("wait_tensor", "_wrap_tensor"))
