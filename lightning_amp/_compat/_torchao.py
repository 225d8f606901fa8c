"""Names of torchao that fp8 needs, beyond the documented ones. torchao is optional."""

from __future__ import annotations

import functools
import importlib.metadata
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import final, override

from lightning_amp._compat._modules import is_batched, is_transformed_or_traced

_OLDEST = (0, 18)
_INSTALL = "Run `pip install 'torchao>=0.18'`, or use precision 'bf16', which needs no other package."


def torchao_float8() -> Any:
    """Return the module `torchao.float8`, or raise an `ImportError`.

    Older releases lack the workaround for a bug of Triton: code that torch 2.13 compiles together with fp8 gives NaN in
    about every fourth run (pytorch/ao#4652). Remove when no supported torch needs the check.

    Raises:
        ModuleNotFoundError: Without torchao.
        ImportError: If it is too old, or cannot be imported.

    """
    try:
        version = importlib.metadata.version("torchao")
    except importlib.metadata.PackageNotFoundError as error:
        raise ModuleNotFoundError(f"precision 'fp8' needs torchao, which is not installed. {_INSTALL}") from error
    if tuple(int(part) for part in version.split(".")[:2] if part.isdigit()) < _OLDEST:
        raise ImportError(f"precision 'fp8' needs torchao 0.18 or later; torchao {version} is installed. {_INSTALL}")
    try:
        with warnings.catch_warnings():
            # hides torchao's own deprecation warnings, because our users cannot act on them
            warnings.simplefilter("ignore")
            import torchao.float8  # pyright: ignore[reportMissingImports]
    except Exception as error:
        raise ImportError(
            f"precision 'fp8' needs torchao, and torchao {version} cannot be imported with torch {torch.__version__}:"
            f" {type(error).__name__}: {error}. Install releases of the two that fit each other (torchao 0.18 wants"
            " torch 2.11 or later), or use precision 'bf16'."
        ) from error
    return torchao.float8


def float8_twin(linear: nn.Linear, config: Any) -> nn.Module:
    """Return a layer that computes `linear` in fp8, and shares its dictionary of parameters.

    `convert_to_float8_training` returns such a layer, but with parameters of its own. Remove when torchao has a
    function that takes an input and a weight.
    """
    has_bias = vars(linear)["_parameters"]["bias"] is not None
    plain = nn.Linear(linear.in_features, linear.out_features, bias=has_bias, device="meta")
    twin = torchao_float8().convert_to_float8_training(plain, config=config)
    vars(twin)["_parameters"] = vars(linear)["_parameters"]
    return twin


@functools.cache
def _product() -> Any:
    from torchao.float8.float8_linear import matmul_with_hp_or_float8_args  # pyright: ignore[reportMissingImports]

    @final
    class Product(matmul_with_hp_or_float8_args):
        @staticmethod
        @override
        def forward(ctx: Any, *args: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
            output = matmul_with_hp_or_float8_args.forward(ctx, *args)
            base = output._base  # a view would make autograd refuse an edit in place
            return output if base is None or base.shape != output.shape else base

        @staticmethod
        @override
        def backward(ctx: Any, grad_output: Tensor) -> Any:
            if not (torch.is_grad_enabled() or is_transformed_or_traced() or is_batched(grad_output)):
                return matmul_with_hp_or_float8_args.backward(ctx, grad_output)
            values, weight_t = ctx.saved_tensors
            weight_t = weight_t.to(grad_output.dtype)
            rows = grad_output.reshape(-1, grad_output.shape[-1])
            return grad_output @ weight_t.t(), values.reshape(-1, values.shape[-1]).t() @ rows, None, None

    return Product


def float8_linear(twin: Any, values: Tensor) -> Tensor:
    """Compute the output of the twin for rows of bf16 values.

    Unlike with torchao's own product, the result can be edited in place. Its gradient can be differentiated again, and
    can be computed for many directions at once; such gradients use bf16 products. Remove when torchao supports all
    three.
    """
    out = _product().apply(values, twin.weight.t(), twin.linear_mm_config, twin.config)
    return out if twin.bias is None else out + twin.bias.to(out.dtype)
