"""Detect whether the code of a training step clips scaled gradients, or takes derivatives that do not fit into fp16.

It watches a copy of the step, so the real step is not slowed down.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad
from torch.overrides import TorchFunctionMode
from typing_extensions import final, override

from lightning_amp._compat import _modules
from lightning_amp._user_line import Place, is_users, owner_of
from lightning_amp.findings import InaccurateDerivative
from lightning_amp.numerics import fidelity, fidelity_sums

_CLIPPING = clip_grad.__file__
_FUNCTIONS = ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_", "get_total_norm")
_ZERO_SHARE, _FAITHFUL_DB = 1e-3, 40.0  # derivatives that fit into fp16 have a share of 0 and an SQNR of some 60 dB


@final
class StepWatch(TorchFunctionMode):
    """Context in which a copy of a training step runs.

    Args:
        module: The copy, with its own parameters.
        scale: The loss scale of the run.

    Attributes:
        unscaled: Gradients that are not scaled, as long as they are the parameter's.
        before_backward: Called before each backward.
    """

    def __init__(self, module: nn.Module, scale: float = 1.0) -> None:
        super().__init__()
        # lines and results of `torch.autograd.grad(..., create_graph=True)`, without calls of `scaled_grad`
        self.derivatives: list[tuple[Place, list[Tensor | None]]] = []
        self.clippings: dict[Place, str] = {}  # functions that clipped scaled gradients, by the line that called them
        self.unscaled: Mapping[nn.Parameter, Tensor] = {}
        self.before_backward: Callable[[], None] = lambda: None
        self._parameters = list(module.parameters())
        self._factor = scale

    @override
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        caller: FrameType | None = getattr(inspect.currentframe(), "f_back", None)
        if func is Tensor.backward:
            self.before_backward()
        elif caller is not None and caller.f_code.co_filename == _CLIPPING and self._factor != 1:
            self._clip(caller, args)
        result = func(*args, **kwargs)
        is_derivative = func is torch.autograd.grad and bool(kwargs.get("create_graph"))
        line = _calling_line(caller) if is_derivative else None
        if line is not None and not _modules.is_transformed_or_traced():  # `torch.func` lets no result be kept
            self.derivatives.append((line, [None if g is None else g.detach() for g in result]))
        return result

    def _clip(self, frame: FrameType | None, args: tuple[Any, ...]) -> None:
        scaled = {id(p.grad) for p in self._parameters if p.grad is not None and self.unscaled.get(p) is not p.grad}
        given = args[0] if args and isinstance(args[0], (list, tuple)) else args
        line = _calling_line(frame)
        if line is None or not any(id(gradient) in scaled for gradient in given):
            return
        name = _FUNCTIONS[0]
        while frame is not None and not is_users(frame.f_code.co_filename):
            name = frame.f_code.co_name if frame.f_code.co_name in _FUNCTIONS else name
            frame = frame.f_back
        self.clippings.setdefault(line, name)


def inaccurate_derivatives(fp32_run: StepWatch, amp_run: StepWatch) -> list[InaccurateDerivative]:
    """Compare the derivatives of two runs of a step, and return the inaccurate ones. This waits for the device."""
    found: dict[str, InaccurateDerivative] = {}
    for (_, exact), (line, half) in zip(fp32_run.derivatives, amp_run.derivatives, strict=False):
        pairs = [
            (a, b)
            for a, b in zip(exact, half, strict=False)
            if a is not None and b is not None and a.shape == b.shape and a.layout is torch.strided
        ]
        if not pairs or not all(bool(torch.isfinite(a).all()) for a, _ in pairs):
            continue
        zero = sum(int(((b == 0) & (a != 0)).sum()) for a, b in pairs)
        sums = torch.stack([fidelity_sums(a, b) for a, b in pairs]).sum(0)
        share = zero / max(sum(int(a.count_nonzero()) for a, _ in pairs), 1)
        derivative = InaccurateDerivative(str(line), share, float(fidelity(sums)[0]))
        if share > _ZERO_SHARE or not derivative.sqnr_db > _FAITHFUL_DB:
            found.setdefault(derivative.line, derivative)
    return list(found.values())


def _calling_line(frame: FrameType | None) -> Place | None:
    """Return the innermost line of the user's code in a frame or its callers.

    It is `None` if a frame of this package is reached first.
    """
    while frame is not None:
        file = frame.f_code.co_filename
        if owner_of(file) == "ours":
            return None
        if is_users(file):
            return Place(file, frame.f_lineno)
        frame = frame.f_back
    return None
