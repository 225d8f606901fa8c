"""Count the FLOPs of a step by the dtype of the numbers that it multiplies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from typing_extensions import final, override

from lightning_amp._compat._modules import RECURRENT, SAME_FLOPS, DispatchMode
from lightning_amp.measure._memory import inner_tensors


@final
class MatmulFlops(DispatchMode):
    """Counts the FLOPs of matrix products, convolutions and attention by the dtype of the numbers that they multiply.

    It uses the formulas of `torch.utils.flop_counter`, which also cover backward passes and products in fp8 (an
    emulated product counts as fp8). It adds formulas for attention on the CPU, and for LSTMs and GRUs that are one
    operation. `by_dtype` has the FLOPs by the name of the dtype.

    Cost: some microseconds per operation, and operations are not fused. Do not time a step with it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._formulas = flop_formulas()
        self.by_dtype = Counter[str]()

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        formula = self._formulas.get(getattr(func, "overloadpacket", func))
        if formula is not None:
            self.by_dtype[multiplied_dtype(args)] += formula(*args, **(kwargs or {}), out_val=out)
        return out


def flop_formulas() -> dict[Any, Callable[..., int]]:
    """Return for each matrix product the function that counts its FLOPs from its arguments and `out_val`."""
    from torch.utils.flop_counter import flop_registry

    return {
        **flop_registry,
        **{operation: flop_registry[known] for operation, known in SAME_FLOPS.items()},
        **{operation: partial(_recurrent, times) for operation, times in RECURRENT.items()},
        torch.ops.aten.convolution_backward: _convolution_backward,
    }


def multiplied_dtype(args: Any) -> str:
    """Return the name of the dtype in which the numbers are stored that an operation multiplies.

    The attribute `dtype` of a tensor of scaled fp8 values is a different one.
    """
    dtype = next((inner_tensors(a)[0].dtype for a in args if isinstance(a, torch.Tensor)), torch.float32)
    return str(dtype).removeprefix("torch.")


def _convolution_backward(gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *args: Any, **_: Any) -> int:
    """Return the FLOPs of a convolution's backward: as many as its forward for each requested gradient.

    Torch's own formula ignores groups, and counts a depthwise convolution as a dense one.
    """
    from torch.utils.flop_counter import flop_registry

    _, stride, padding, dilation, transposed, _, _, wanted = args
    forward = flop_registry[torch.ops.aten.convolution]
    once = forward(x, weight, None, stride, padding, dilation, transposed, out_val=gradient)
    return once * sum(wanted[:2])


def _recurrent(times: int, steps: torch.Tensor, *args: Any, **kwargs: Any) -> int:
    """Return the FLOPs of an LSTM or GRU: each row of each time step is multiplied by each of its weights."""
    weights = args[0] if isinstance(args[0], (list, tuple)) else args[:4]
    num_rows = steps.numel() // max(1, steps.shape[-1])
    return 2 * times * num_rows * sum(weight.numel() for weight in weights if weight.dim() == 2)
