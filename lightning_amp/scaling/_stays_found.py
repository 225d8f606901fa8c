"""A step whose gradients were not finite is skipped, whatever they are mended to before it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from typing_extensions import final

from lightning_amp.numerics import dense


@final
class StaysFound:
    """A flag that holds until the gradients in which it was found are dropped, set to zero, or stepped with.

    The plugin sees its own backward begin. A backward past the plugin (`loss.backward()`, which needs no plugin without
    loss scaling) shows itself by the hook of one parameter, which runs before autograd adds to its gradient.
    """

    def __init__(self) -> None:
        self._flag: Tensor | None = None  # 1.0, [], if the next step is skipped
        self._handle: Any = None

    def keep(self, flag: Tensor, parameters: list[Any]) -> None:
        """Keep a flag [] that was found in the gradients of these parameters."""
        self._flag = self.beside(flag)
        if self._handle is None:
            watched = next((p for p in parameters if p.grad is not None and p.requires_grad and p.is_leaf), None)
            if watched is not None:
                self._handle = watched.register_hook(lambda _: self._new_gradient(watched))

    def beside(self, found_inf: Tensor) -> Tensor:
        """Return 1.0, [], if this flag or the kept one is."""
        return found_inf if self._flag is None else torch.maximum(found_inf, self._flag.to(found_inf.device))

    def begin_backward(self, left: Tensor | None) -> None:
        """Forget it if nothing but zeros is left of the gradients: their largest value [] is 0, or there are none."""
        self._unwatch()
        self._only_if(left)

    def forget(self) -> None:
        """Begin anew."""
        self._flag = None
        self._unwatch()

    def _only_if(self, left: Tensor | None) -> None:
        if left is None:
            self.forget()
        elif self._flag is not None:
            self._flag = self._flag * (left != 0).to(self._flag)

    def _unwatch(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    @property
    def is_empty(self) -> bool:
        """Return whether nothing is kept."""
        return self._flag is None

    def _new_gradient(self, parameter: Any) -> None:
        self._only_if(None if parameter.grad is None else dense(parameter.grad.detach()).abs().max())
