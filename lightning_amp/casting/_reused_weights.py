"""Share one half-precision copy of a weight among all its uses in a step, and sum their gradients in fp32.

Autocast's own cache makes the copy one node of the graph. The gradients of all uses are then summed in half precision,
which is wrong by several per cent over 512 uses. A weight that is edited between two forwards is stale. Without the
cache each use casts the weight again and keeps its own copy. Here all uses share the copy, and each has a node of its
own. The summed gradients are bit-identical to those of one cast per use.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import final, override

from lightning_amp._compat import _modules, _torch
from lightning_amp.casting._method_override import InPlace, MethodOverride

# Autocast runs all operations that these modules apply to their own weights in half precision, so handing over the cast
# weight changes no bit. A subclass with its own `forward` is left alone, because it may apply other operations. Biases
# are left alone, because they are small and no backward keeps them.
_LAYERS = (
    *(nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)
_CELLS = (nn.RNNCell, nn.LSTMCell, nn.GRUCell)
_WEIGHTS: dict[Any, tuple[str, ...]] = {
    **{layer.forward: ("weight",) for layer in _LAYERS},
    **{cell.forward: ("weight_ih", "weight_hh") for cell in _CELLS},
    nn.MultiheadAttention.forward: ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"),
}

_DEVICES = ("cpu", "cuda")
"""Devices on which autocast casts every weight that `_WEIGHTS` lists."""

_STEPS_WATCHED = 2
"""Number of steps of each stage, at the start of an epoch, that are watched for modules that a step calls twice."""

_SAMPLE = 64
"""Number of elements of a weight that are compared to notice an edit through `.data`.

Such an edit does not change the version counter.
"""


@final
class ReusedWeights(InPlace):
    """Context in which the submodules of `module` that a step calls more than once share half-precision copies.

    Modules are watched in the first two steps of each stage of an epoch. A module that is called a second time in a
    step gets an override, which is in place inside of steps and backwards only. (Activation checkpointing calls modules
    again in the backward.) All other modules run unchanged.

    Compiled modules are left alone: a graph has its own casts, and the compiler merges equal ones. A module that is
    called in a compiled function is detected when the function is traced. That costs one more graph, once: an override
    that came and went with each epoch would need a new graph each time. Calls inside of `torch.func` transforms,
    tracing and selective activation checkpointing (which wants the same operations each time) are left alone too.
    Parameters of other classes (DTensor, quantized) are left alone as well.

    Cost: some 8 us per call of a reused module more than a cast of an empty weight; a cast of 100,000 elements takes
    longer. After the second step a module that is called once costs nothing.
    """

    def __init__(self, module: nn.Module, device_type: str, current_epoch: Callable[[], int]) -> None:
        self._module, self._device_type, self._current_epoch = module, device_type, current_epoch
        self._active = False
        self._epoch = -1
        self._steps: dict[str, int] = {}
        self._stage: str | None = None
        self._reused: dict[int, _Reused] = {}
        self._watched: list[_Reused] = []
        self._copies = _Copies(device_type)

    def activate(self) -> None:
        """Begin to watch modules and share copies from the next step on.

        Not needed where nothing runs under autocast.
        """
        self._active = self._device_type in _DEVICES

    def forget(self) -> None:
        """Drop the copies, since weights may have changed."""
        self._copies.by_parameter.clear()

    def begin(self, stage: str | None) -> None:
        """Enter a step of this stage; `None` for a backward or a hook, whose calls do not count as uses of a step."""
        if stage is None:
            self._copies.pause_counting(1)
        self._stage = stage
        self.__enter__()

    def end(self, stage: str | None) -> None:
        """Leave the context that :meth:`begin` entered last."""
        if stage is None:
            self._copies.pause_counting(-1)
        self.__exit__()

    @override
    def install(self) -> None:
        if not self._active:
            return
        if self._stage is not None:
            self._watch(self._stage)
        for reused in self._reused.values():
            reused.install()

    def _watch(self, stage: str) -> None:
        epoch = self._current_epoch()
        if epoch != self._epoch:
            self._epoch, self._steps = epoch, {}
        steps = self._steps.get(stage, 0)
        if steps < _STEPS_WATCHED:
            self._steps[stage] = steps + 1
            modules = {id(m): m for m in _eager_modules(self._module)}
            self._reused = {key: r for key, r in self._reused.items() if key in modules}  # other modules may be gone
            unknown = [m for key, m in modules.items() if key not in self._reused]
            self._watched = [_Reused(m, self._copies, _COMPILED.setdefault(m, _modules.Flag())) for m in unknown]
            for reused in self._watched:
                reused.install()

    @override
    def restore(self) -> None:
        if not self._reused and not self._watched:
            return
        for reused in (*self._watched, *self._reused.values()):
            reused.restore()
        self._reused.update((id(r.owner), r) for r in self._watched if r.calls > 1)
        self._reused = {key: r for key, r in self._reused.items() if not r.compiled.is_set}
        self._watched = []
        self.forget()


@final
class SharedCopies:
    """Context of one stage of :class:`ReusedWeights`, which can be entered any number of times."""

    def __init__(self, weights: ReusedWeights, stage: str | None = None) -> None:
        self._weights, self._stage = weights, stage

    def __enter__(self) -> None:
        self._weights.begin(self._stage)

    def __exit__(self, *exc: object) -> None:
        self._weights.end(self._stage)


def _eager_modules(module: nn.Module) -> list[nn.Module]:
    """Return the submodules whose parameters can be shared, except modules that are known to be compiled."""
    modules = list(module.modules())
    compiled = {id(inner) for outer in modules if _modules.is_compiled(outer) for inner in outer.modules()}
    compiled |= {id(inner) for inner in modules if inner in _COMPILED and _COMPILED[inner].is_set}
    return [m for m in modules if id(m) not in compiled and type(m).forward in _WEIGHTS and "forward" not in vars(m)]


_COMPILED: weakref.WeakKeyDictionary[nn.Module, _modules.Flag] = weakref.WeakKeyDictionary()
"""Set once a compiler has traced a call of the module inside a compiled function.

It stays set after a fit, because the compiled graph also stays, and is only valid if the module still has its override.
"""


@final
class _Reused(MethodOverride):
    """The `forward` of a module, which reads half-precision copies instead of the module's parameters."""

    def __init__(self, owner: nn.Module, copies: _Copies, compiled: _modules.Flag) -> None:
        super().__init__(owner, "forward")
        self._forward = type(owner).forward
        self.calls = 0  # in a watched step
        self.compiled = compiled
        self._copies = copies
        self._places: list[tuple[nn.Module, tuple[str, ...]]] = [(owner, _WEIGHTS[type(owner).forward])]
        if isinstance(owner, nn.MultiheadAttention):  # its forward reads the projection's weight without a call
            self._places.append((owner.out_proj, ("weight",)))

    @override
    def install(self) -> None:
        """Install the replacement, unless other code has given the module another `forward` since."""
        if "forward" not in vars(self.owner) and type(self.owner).forward is self._forward:
            super().install()

    @override
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        copies = self._copies
        if torch.compiler.is_compiling():
            self.compiled.set()
            return self.inner(*args, **kwargs)
        if (
            not torch.is_autocast_enabled(copies.device_type)
            or _modules.is_transformed_or_traced()
            or _modules.is_replayed()
        ):
            return self.inner(*args, **kwargs)
        if self.calls < 2:
            self.calls += copies.paused == 0
            if self.calls < 2:
                return self.inner(*args, **kwargs)
        originals: list[tuple[nn.Module, dict[str, Any]]] = []
        try:
            for module, names in self._places:
                parameters = _modules.own_parameters(module)
                originals.append((module, parameters))
                _modules.set_own_parameters(module, copies.in_place_of(parameters, names))
            return self.inner(*args, **kwargs)
        finally:
            for module, parameters in originals:
                _modules.set_own_parameters(module, parameters)


@final
class _Copies:
    """The half-precision copies of one step."""

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type
        self.paused = 0
        self.by_parameter: dict[tuple[int, torch.dtype], _Copy] = {}

    def pause_counting(self, by: int) -> None:
        """Do not count calls while `paused` is above 0: a backward calls checkpointed modules again."""
        self.paused += by

    def in_place_of(self, parameters: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
        """Return the parameters of a module, with a half-precision copy for each of these names.

        Each copy has its own graph node.
        """
        dtype = torch.get_autocast_dtype(self.device_type)
        train = torch.is_grad_enabled()
        result = dict(parameters)
        for name in names:
            parameter = parameters.get(name)
            if parameter is None:
                continue
            copy = self.by_parameter.get((id(parameter), dtype))
            if copy is None or not copy.is_current():
                if not self._takes(parameter):
                    continue
                copy = self.by_parameter[id(parameter), dtype] = _Copy(parameter, dtype)
            differentiable = train and parameter.requires_grad
            result[name] = _torch.cast_to(parameter, copy.value) if differentiable else copy.value
        return result

    def _takes(self, parameter: Any) -> bool:
        """Return whether autocast would cast this parameter, and the parameter has no special class."""
        return (
            type(parameter) is nn.Parameter  # not a DTensor, not quantized, not placed there by `functional_call`
            and parameter.dtype is torch.float32
            and parameter.device.type == self.device_type
            and not parameter.is_inference()
            and 0 not in parameter.stride()  # an expanded tensor has less memory than elements
        )


@final
class _Copy:
    """One parameter in half precision, with marks that show a later edit of the parameter."""

    def __init__(self, parameter: nn.Parameter, dtype: torch.dtype) -> None:
        self._parameter = parameter  # this reference also keeps the `id` from being reused
        self._edits = _modules.version(parameter)
        self._address = parameter.data_ptr()
        # a copy made in inference mode could not be used in training
        with torch.inference_mode(False), torch.no_grad():
            plain = parameter.detach()
            self.value = plain.to(dtype)
            self._now: Tensor | None = None
            if plain.device.type == "cpu" and plain.numel():
                count = min(plain.numel(), _SAMPLE)
                step = plain.numel() // count
                # otherwise only one column would be sampled, perhaps of an input that is always 0
                while math.gcd(step, plain[0].numel()) > 1:
                    step -= 1
                self._now = plain.as_strided((count,), (step,), plain.storage_offset())
                self._then = self._now.clone()

    def is_current(self) -> bool:
        """Return whether the parameter has not been edited.

        An edit through `.data` changes only the values. On the CPU a sample of them is compared. On other
        devices that would wait for the device, so such an edit is seen after the next backward or optimizer step only.
        """
        parameter = self._parameter
        return (
            _modules.version(parameter) == self._edits
            and parameter.data_ptr() == self._address
            and (self._now is None or torch.equal(self._now, self._then))
        )
