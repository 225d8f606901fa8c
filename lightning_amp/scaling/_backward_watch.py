"""Distinguish gradients of a scaled backward from gradients of the user's own, unscaled backward."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from typing_extensions import final

from lightning_amp._compat import _torch
from lightning_amp.scaling._gradients import parameters


@final
class BackwardWatch:
    """Hooks on parameters that note the scale of each backward.

    They watch one parameter of each known optimizer, and every parameter that belongs to no known optimizer.

    Args:
        optimizers: The known optimizers.
        others: Parameters to watch unless they belong to a known optimizer.

    A gradient that the user assigns (`p.grad = ...`) counts as having the scale of the latest derivative by that
    parameter. `torch.autograd.grad` computes such a derivative without the loss scale.

    Cost: two Python calls per watched parameter and backward.

    """

    def __init__(self, optimizers: Iterable[Optimizer], others: Iterable[Any]) -> None:
        self._plugins_scale: Tensor | None = None  # the scale while the plugin's backward runs
        self._by_hand: tuple[int, Tensor] | None = None  # number and scale of the latest backward that the user scaled
        self._spokesmen: dict[int, Any] = {}  # the watched parameter of each known optimizer, by the optimizer's id
        # the scale of each parameter's latest backward, by the parameter's id
        self._scales: dict[int, Tensor | None] = {}
        # the gradient that this backward left, by the parameter's id
        self._left: dict[int, weakref.ref[Tensor] | None] = {}
        self._plain: set[int] = set()  # ids of parameters whose latest derivative was not scaled
        self._handles: dict[int, tuple[Any, Any]] = {}
        known: set[int] = set()
        for optimizer in optimizers:
            mine = list(parameters(optimizer))
            known.update(map(id, mine))
            first = next((p for p in mine if _can_be_watched(p)), None)
            if first is not None:
                self._spokesmen[id(optimizer)] = first
                self._watch(first)
        self.watch(parameter for parameter in others if id(parameter) not in known)

    def watch(self, others: Iterable[Any]) -> None:
        """Watch more parameters, of no known optimizer."""
        for parameter in others:
            self._watch(parameter)

    def _watch(self, parameter: Any) -> None:
        if id(parameter) in self._handles or not _can_be_watched(parameter):
            return

        key = id(parameter)

        def note_derivative(_: Tensor) -> None:
            # the plugin's backward is checked first, because it is the usual one
            if self._plugins_scale is None and self.scale is None:
                self._plain.add(key)
            else:
                self._plain.discard(key)

        def note_gradient(p: Any) -> None:
            scale = self._plugins_scale
            self._scales[key] = self.scale if scale is None else scale
            self._left[key] = None if p.grad is None else weakref.ref(p.grad)

        hooks = parameter.register_hook(note_derivative), parameter.register_post_accumulate_grad_hook(note_gradient)
        self._handles[key] = hooks

    def adopt(self, optimizer: Optimizer) -> None:
        """Watch one parameter of an optimizer that is known from now on, instead of all."""
        mine = [p for p in parameters(optimizer) if _can_be_watched(p)]
        first = next((p for p in mine if p.grad is not None), mine[0] if mine else None)
        if first is None:
            return
        self._spokesmen[id(optimizer)] = first
        self._watch(first)
        needed = {id(p) for p in self._spokesmen.values()}
        for key in {id(p) for p in mine} - needed:
            for handle in self._handles.pop(key, ()):
                handle.remove()
            self._scales.pop(key, None)  # nothing keeps it up to date any more
            self._left.pop(key, None)
            self._plain.discard(key)

    @property
    def scale(self) -> Tensor | None:
        """Return the scale of the current backward, []; `None` outside a backward, and in one without a scale."""
        if self._plugins_scale is None and self._by_hand is not None:
            number, scale = self._by_hand
            return scale if number == _torch.backward_number() else None
        return self._plugins_scale

    def begin(self, scale: Tensor) -> None:
        """Record that the plugin begins the backward of a loss that it has multiplied by `scale` []."""
        self._plugins_scale = scale

    def end(self) -> None:
        """Record the end of the plugin's backward."""
        self._plugins_scale = None

    @property
    def plugins_runs(self) -> bool:
        """Return whether the plugin's backward runs now."""
        return self._plugins_scale is not None

    def begin_by_hand(self, scale: Tensor) -> None:
        """Record, inside the user's own backward, that its loss was multiplied by `scale` []."""
        self._by_hand = _torch.backward_number(), scale

    def came_plain(self, optimizer: Optimizer) -> bool:
        """Return whether the latest gradients of a known optimizer came with an unscaled backward."""
        first = self._spokesmen.get(id(optimizer))
        return first is not None and first.grad is not None and self._scales.get(id(first), self) is None

    def scale_of(self, optimizer: Optimizer, known: Mapping[int, Tensor]) -> Tensor | None:
        """Return the scale [] of an unknown optimizer's gradients; `None` if these gradients are true gradients.

        `known` has the scale of each gradient that also belongs to a known optimizer, by the id of the parameter.
        """
        mine = [p for p in parameters(optimizer) if p.grad is not None]
        if mine and self.scale is not None:
            return self.scale
        assigned = {id(parameter) for parameter in mine if self._is_assigned_plain(parameter)}
        for parameter in mine:
            key = id(parameter)
            # only the first parameter of a known optimizer is watched, and represents the optimizer's other parameters
            is_scaled = key not in assigned and (key in self._left or not assigned)
            scale = known.get(key, self._scales.get(key)) if is_scaled else None
            if scale is not None:
                return scale
            self._watch(parameter)  # from now on
        return None

    def _is_assigned_plain(self, parameter: Any) -> bool:
        left = self._left.get(id(parameter))
        return id(parameter) in self._plain and (left is None or left() is not parameter.grad)

    @property
    def handles(self) -> list[Any]:
        """Return the handles of all hooks."""
        return list(chain.from_iterable(self._handles.values()))

    def detach(self) -> None:
        """Remove all hooks."""
        for handle in self.handles:
            handle.remove()
        self._handles.clear()
        self._scales.clear()
        self._left.clear()
        self._plain.clear()


def _can_be_watched(parameter: Any) -> bool:
    """Return whether torch accepts hooks; a lazy parameter takes none before its first forward."""
    return parameter.requires_grad and parameter.is_leaf and not is_lazy(parameter)
