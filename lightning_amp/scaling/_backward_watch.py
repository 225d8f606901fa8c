"""Which gradients came with a scaled backward, and which with one of the user's own."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import final

from lightning_amp._compat import _torch
from lightning_amp.scaling._gradients import parameters


@final
class BackwardWatch:
    """Tells them apart by hooks on parameters: one of each known optimizer, and all that none of them has.

    Args:
        optimizers: That are known.
        others: Parameters, of which those of the optimizers are left out.

    A gradient that the user assigns (`p.grad = ...`) is one that no backward left there. It came with the scale of the
    latest derivative by its parameter: `torch.autograd.grad` computes one that nobody scaled.

    Cost: two Python calls per watched parameter and backward.

    """

    def __init__(self, optimizers: Iterable[Optimizer], others: Iterable[Any]) -> None:
        self._plugins_scale: Tensor | None = None  # while its backward runs
        self._by_hand: tuple[int, Tensor] | None = None  # the latest that the user scaled: its number, its scale
        self._spokesmen: dict[int, Any] = {}  # by id of a known optimizer: the parameter that speaks for it
        self._scales: dict[int, Tensor | None] = {}  # by id of the parameter: that of its latest backward
        self._left: dict[int, weakref.ref[Tensor] | None] = {}  # the gradient that this backward left
        self._plain: set[int] = set()  # ids of parameters whose latest derivative nobody scaled
        self._handles: dict[int, tuple[Any, Any]] = {}
        known: set[int] = set()
        for optimizer in optimizers:
            mine = list(parameters(optimizer))
            known.update(map(id, mine))
            first = next((p for p in mine if p.requires_grad and p.is_leaf), None)
            if first is not None:
                self._spokesmen[id(optimizer)] = first
                self._watch(first)
        for parameter in others:
            if id(parameter) not in known:
                self._watch(parameter)

    def _watch(self, parameter: Any) -> None:
        if id(parameter) in self._handles or not parameter.requires_grad or not parameter.is_leaf:
            return

        key = id(parameter)

        def note_derivative(_: Tensor) -> None:
            if self._plugins_scale is None and self.scale is None:  # read first: as a rule it is the plugin's
                self._plain.add(key)
            else:
                self._plain.discard(key)

        def note_gradient(p: Any) -> None:
            scale = self._plugins_scale
            self._scales[key] = self.scale if scale is None else scale
            self._left[key] = None if p.grad is None else weakref.ref(p.grad)

        hooks = parameter.register_hook(note_derivative), parameter.register_post_accumulate_grad_hook(note_gradient)
        self._handles[key] = hooks

    @property
    def scale(self) -> Tensor | None:
        """Return that of the backward that runs now, []; `None` in one that nobody scaled, and outside of any."""
        if self._plugins_scale is None and self._by_hand is not None:
            number, scale = self._by_hand
            return scale if number == _torch.backward_number() else None
        return self._plugins_scale

    def begin(self, scale: Tensor) -> None:
        """Note that the backward of a loss begins that was multiplied by `scale` []."""
        self._plugins_scale = scale

    def end(self) -> None:
        """Note that it is over."""
        self._plugins_scale = None

    @property
    def plugins_runs(self) -> bool:
        """Return whether a backward is between :meth:`begin` and :meth:`end`."""
        return self._plugins_scale is not None

    def begin_by_hand(self, scale: Tensor) -> None:
        """Note, inside of it, that the user's own backward is that of a loss times `scale` []. It ends by itself."""
        self._by_hand = _torch.backward_number(), scale

    def came_plain(self, optimizer: Optimizer) -> bool:
        """Return whether the latest gradients of a known optimizer came with a backward of the user's own."""
        first = self._spokesmen.get(id(optimizer))
        return first is not None and first.grad is not None and self._scales.get(id(first), self) is None

    def scale_of(self, optimizer: Optimizer, known: Mapping[int, Tensor]) -> Tensor | None:
        """Return what the gradients of an optimizer that is not known are multiplied by, []; `None` if by nothing.

        Args:
            optimizer: Whose.
            known: By id of the parameter, the scale of gradients that it shares with an optimizer that is known.

        """
        mine = [p for p in parameters(optimizer) if p.grad is not None]
        if mine and self.scale is not None:
            return self.scale
        assigned = {id(parameter) for parameter in mine if self._is_assigned_plain(parameter)}
        for parameter in mine:
            key = id(parameter)
            # nobody has seen the others of a known optimizer: its first parameter speaks for them
            is_scaled = key not in assigned and (key in self._left or not assigned)
            scale = known.get(key, self._scales.get(key)) if is_scaled else None
            if scale is not None:
                return scale
            self._watch(parameter)  # from now on
        return None

    def _is_assigned_plain(self, parameter: Any) -> bool:
        left = self._left.get(id(parameter))
        return id(parameter) in self._plain and (left is None or left() is not parameter.grad)

    def detach(self) -> None:
        """Take all hooks off."""
        for handle in chain.from_iterable(self._handles.values()):
            handle.remove()
        self._handles.clear()
        self._scales.clear()
        self._left.clear()
        self._plain.clear()
