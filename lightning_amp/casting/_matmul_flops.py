"""How much of the work is done in which dtype."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from typing_extensions import final, override

from lightning_amp._compat._modules import RECURRENT, SAME_FLOPS, DispatchMode


@final
class MatmulFlops(DispatchMode):
    """Counts the FLOPs of matrix products, convolutions and attention by the dtype of what they multiply.

    .. code-block:: python

        from lightning_amp.casting import MatmulFlops

        batch = next(iter(data.train_dataloader()))
        with MatmulFlops() as flops, torch.autocast("cpu", torch.bfloat16):
            model.loss(batch).backward()
        print(flops.by_dtype)  # Counter({'bfloat16': 1966080, 'float32': 4096})

    With the formulas of `torch.utils.flop_counter`, which also knows backward passes and products in fp8 (emulated ones
    count as what they stand for); and with our own for what it does not know: attention on the CPU, and LSTMs and GRUs
    that are one operation.

    Attributes:
        by_dtype: FLOPs by the name of the dtype.

    Cost: some microseconds per operation, and no fusion of operations: it is not for a step whose time counts.

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
    """Return the FLOPs of operations that are matrix products: functions of their arguments and `out_val`."""
    from torch.utils.flop_counter import flop_registry

    return {
        **flop_registry,
        **{operation: flop_registry[known] for operation, known in SAME_FLOPS.items()},
        **{operation: partial(_recurrent, times) for operation, times in RECURRENT.items()},
        torch.ops.aten.convolution_backward: _convolution_backward,
    }


def multiplied_dtype(args: Any) -> str:
    """Return the name of the dtype that an operation multiplies."""
    dtype = next((_stored_dtype(a) for a in args if isinstance(a, torch.Tensor)), torch.float32)
    return str(dtype).removeprefix("torch.")


def _stored_dtype(tensor: torch.Tensor) -> torch.dtype:
    """Return what the values are stored in: of a tensor that scales values in fp8 this is not its own dtype."""
    inner: Any = tensor
    while hasattr(type(inner), "__tensor_flatten__"):
        inner = getattr(inner, inner.__tensor_flatten__()[0][0])
    return inner.dtype


def _convolution_backward(gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *args: Any, **_: Any) -> int:
    """Return the FLOPs of a convolution's backward: as many as its forward for each gradient that is asked for.

    Torch's own formula leaves the groups of the convolution out; a depthwise one came out as dense.
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
