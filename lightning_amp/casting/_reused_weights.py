"""Share one half-precision copy of a weight among all its uses in a step, and sum their gradients in fp32.

Autocast's own cache makes the copy one node of the graph. The gradients of all uses are then summed in half precision,
which is wrong by several per cent over 512 uses. A weight that is edited between two forwards is stale. Without the
cache each use casts the weight again and keeps its own copy. Here all uses share the copy, and each has a node of its
own. The summed gradients are bit-identical to those of one cast per use.

A shared copy is never stale, because on the CPU torch shows any write to the memory of the weight, for 2 us per use.
Nothing shows all writes on other devices: an edit through `.data` does not move the version counter, and comparing
values would wait for the device. There each use casts the weight, as with Lightning's own plugin.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from typing_extensions import final, override

from lightning_amp._compat import _modules, _torch
from lightning_amp.casting._method_override import MethodOverride, Overrides

_LAYERS = (
    *(nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    *(nn.RNNCell, nn.LSTMCell, nn.GRUCell, nn.MultiheadAttention),
)
"""Autocast runs all operations that these apply to their own weights in half precision, so handing over the cast weight
changes no bit. Subclasses are left alone, because they may apply other operations. Biases are left alone, because they
are small and no backward keeps them.
"""


@final
class ReusedWeights:
    """Context of a step in which all uses of a weight on the CPU share one half-precision copy.

    It concerns modules that one of the first two steps with gradients calls more than once, or a step before them. All
    other modules are left alone from the third step on. The first such step casts weights twice, because a module's
    first call is not known to be one of several.

    Each use casts the weight where the copy could not be shared. These are graphs of `torch.compile`, which merge equal
    casts, forwards that activation checkpointing runs again in the backward, `torch.func` transforms and tracing.
    Weights of other classes (DTensor, quantized), and weights whose memory another tensor or library uses, are cast
    for each use too.

    Cost: some 8 us per call of a reused module more than a cast of an empty weight; a cast of 100,000 elements takes
    longer.
    """

    def __init__(self, module: nn.Module, device_type: str) -> None:
        self._root = module if device_type == "cpu" else None  # until the first step; it may be compiled before
        self._copies: dict[tuple[int, torch.dtype], _Copy] = {}
        self._layers: list[_Layer] = []
        self._overrides = Overrides([])
        self._steps_to_watch = 2

    def __enter__(self) -> None:
        if torch.compiler.is_compiling():
            return
        if self._root is not None:
            self._layers = [_Layer(module, self._copies) for module in _layers_in(self._root)]
            self._overrides, self._root = Overrides(self._layers), None
        self._overrides.__enter__()

    def __exit__(self, *exc: object) -> None:
        if torch.compiler.is_compiling():
            return
        self._overrides.__exit__(*exc)
        if self._overrides.depth > 0:
            return
        for copy in self._copies.values():
            copy.parameter.data_ptr()  # takes the mark off
        self._copies.clear()
        if self._steps_to_watch and torch.is_grad_enabled() and any(layer.calls for layer in self._layers):
            self._steps_to_watch -= 1
            if self._steps_to_watch == 0:
                self._overrides = Overrides(layer for layer in self._layers if layer.is_reused)


def _layers_in(root: nn.Module) -> list[nn.Module]:
    """Return the submodules whose weights can be shared, except compiled modules and what is inside them."""
    compiled = {inner for outer in root.modules() if _modules.is_compiled(outer) for inner in outer.modules()}
    eager = [module for module in root.modules() if module not in compiled]
    return [module for module in eager if type(module) in _LAYERS and "forward" not in vars(module)]


class _Copy(NamedTuple):
    parameter: nn.Parameter
    place: _torch.Place
    value: Tensor  # the parameter in half precision


@final
class _Layer(MethodOverride):
    """The `forward` of a module, which reads half-precision copies instead of the module's weights."""

    def __init__(self, owner: nn.Module, copies: dict[tuple[int, torch.dtype], _Copy]) -> None:
        super().__init__(owner, "forward")
        self.calls, self.is_reused = 0, False  # in this step; in this or an earlier one
        self._copies = copies
        self._forward = type(owner).forward

    @override
    def install(self) -> None:
        """Install the replacement, unless other code has given the module another `forward` since."""
        self.calls = 0
        if "forward" not in vars(self.owner) and type(self.owner).forward is self._forward:
            super().install()

    @override
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not torch.is_autocast_enabled("cpu"):
            return self.inner(*args, **kwargs)
        in_backward = _torch.backward_number() != -1
        if not self.is_reused:
            self.calls += not in_backward
            self.is_reused = self.calls > 1
        if not self.is_reused or in_backward or _modules.is_transformed_or_traced() or _modules.is_replayed():
            return self.inner(*args, **kwargs)
        return self._forward(self._with_copies(self.owner), *args, **kwargs)

    def _with_copies(self, module: nn.Module) -> Any:
        """Return an object with the attributes of a module, whose weights are half-precision copies.

        The module itself stays as it is: another thread may call it meanwhile.
        """
        double = object.__new__(type(module))
        own = {name: self._half(p) if "weight" in name else p for name, p in _modules.own_parameters(module).items()}
        vars(double).update(vars(module), _parameters=own)
        if isinstance(module, nn.MultiheadAttention):  # its forward reads the projection's weight without a call
            vars(double)["_modules"] = {**vars(module)["_modules"], "out_proj": self._with_copies(module.out_proj)}
        return double

    def _half(self, parameter: Any) -> Any:
        """Return the shared copy, with a graph node of its own for this use; the parameter if it cannot be shared."""
        dtype = torch.get_autocast_dtype("cpu")
        if type(parameter) is not nn.Parameter:  # a DTensor, quantized, or placed there by `functional_call`
            return parameter
        if parameter.dtype is not torch.float32 or parameter.device.type != "cpu":
            return parameter
        copy = self._copies.get((id(parameter), dtype))
        if copy is None or not _torch.is_unwritten(parameter, copy.place):
            # a copy made in inference mode could not be used in training
            with torch.inference_mode(False), torch.no_grad():
                with _modules.outside_dispatch_modes():
                    place = _torch.watch_writes(parameter)
                if place is None:
                    return parameter
                copy = self._copies[id(parameter), dtype] = _Copy(parameter, place, parameter.to(dtype))
        is_differentiable = torch.is_grad_enabled() and parameter.requires_grad
        return _torch.cast_to(parameter, copy.value) if is_differentiable else copy.value
