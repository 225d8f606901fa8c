"""Notice what goes past :class:`OptimizerSteps`: backwards by hand, with the loss scale or without it, and steps."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any, Literal

from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from typing_extensions import final

from lightning_amp._compat import _torch
from lightning_amp.scaling._gradients import has_gradients, parameters

THREAD = threading.local()
"""Its `in_step` is true while a step of any :class:`OptimizerSteps` runs outside of its closure in this thread."""

_WATCHES: set[BackwardWatch] = set()


@final
class BackwardWatch:
    """Hooks that note where gradients come from, and that refuse a step past `steps` on scaled ones.

    They note whether a parameter got its latest gradient from a scaled backward or from a plain one. They watch the
    first parameter of each known optimizer, and others, for which there may be optimizers that nobody passed on. A
    gradient that the user assigns (`p.grad = ...`) counts as a true one, and an error is raised if it may be the
    gradient of a copy. `scaler.scale(loss).backward()` during a run is answered here too.

    Torch's public registry of step hooks calls it before and after each step of any optimizer. A step past `steps`
    would move weights by the gradients times the scale. The check after a step is needed because its closure may have
    run a scaled backward. Steps on gradients that are not scaled pass.

    Cost: one Python call per watched parameter and backward, and two per optimizer step. Without loss scaling, it is
    not installed.
    """

    only_looks = True  # a step without other hooks may still be decided on the device

    def __init__(self, steps: Any) -> None:
        # Nothing tells when a loop of the user's own ends, so the next watch removes the hooks of loops that are gone.
        # A finalizer cannot: torch may be iterating over the hooks when the garbage collector runs.
        for watch in [watch for watch in _WATCHES if watch._steps() is None]:
            watch.close()
        self._steps = weakref.ref(steps)
        self._by_hand = False  # whether a backward runs whose loss the user has scaled
        self.in_scaled_backward = False  # whether a scaled backward runs now
        self.count = 0  # of the scaled backwards so far
        self._latest: dict[int, int] = {}  # the number of the latest scaled backward, by parameter
        self._scaled: dict[int, weakref.ref[Any]] = {}  # the gradient that a scaled backward left, by parameter
        self._plain: set[int] = set()  # parameters whose latest backward was not scaled
        self._handles: dict[int, Any] = {}
        self._first: dict[int, Any] = {}  # the watched parameters of the optimizers
        self._before: list[Any] = []  # their gradients when a scaled backward began
        self._elsewhere = -1  # the number of the latest scaled backward that reached no watched parameter
        self._on_steps = [register_optimizer_step_pre_hook(self), register_optimizer_step_post_hook(self)]
        _WATCHES.add(self)

    def __enter__(self) -> None:
        """Begin the backward of a loss that carries the loss scale."""
        self.in_scaled_backward = True
        self.count += 1
        self._before = [p.grad for p in self._first.values()]

    def __exit__(self, *exc: object) -> None:
        for p, before in zip(self._first.values(), self._before, strict=False):
            if p.grad is not None and p.grad is not before:  # FSDP assigns gradients, so that no hook sees them
                self._note(p)
        if self.count not in self._latest.values():
            self._elsewhere = self.count
        self.in_scaled_backward, self._before = False, []

    def watch(self, params: Iterable[Any]) -> None:
        """Watch parameters; a lazy one takes no hook before its first forward."""
        for p in params:
            if p.requires_grad and p.is_leaf and id(p) not in self._handles and not is_lazy(p):
                self._handles[id(p)] = p.register_post_accumulate_grad_hook(self._note)

    def watch_first(self, optimizer: Optimizer, *, is_scaled: bool = False) -> Any:
        """Watch one parameter of an optimizer, instead of all, and return it; `is_scaled`: its gradients are."""
        mine = [p for p in parameters(optimizer) if p.requires_grad]
        if len(set(map(id, mine))) < len(mine):
            raise ValueError(
                f"A parameter stands twice in a group of `{type(optimizer).__name__}`: its gradient would be divided by"
                " the loss scale twice. Pass each parameter once: `list(dict.fromkeys(parameters))`."
            )
        first = next((p for p in mine if p.grad is not None), mine[0] if mine else None)
        for p in mine:
            if p is not first and id(p) in self._handles:
                self._handles.pop(id(p)).remove()
                self._plain.discard(id(p))
        if first is not None:
            self.watch([first])
            self._first[id(first)] = first
            if is_scaled and first.grad is not None:
                self._scaled[id(first)] = weakref.ref(first.grad)
        return first

    def _note(self, p: Any) -> None:
        if self.in_scaled_backward and p.grad is not None:
            self._scaled[id(p)], self._latest[id(p)] = weakref.ref(p.grad), self.count
            self._plain.discard(id(p))
        elif not self.in_scaled_backward:
            self._plain.add(id(p))

    def origin(self, optimizer: Optimizer) -> Literal["scaled", "plain", "unknown"]:
        """Return where the gradients of an optimizer come from; unknown if none of its parameters is watched."""
        found = {self.origin_of(p) for p in parameters(optimizer)}
        return "scaled" if "scaled" in found else "plain" if "plain" in found else "unknown"

    def origin_of(self, p: Any) -> Literal["scaled", "plain", "unknown"]:
        """Return where the gradient of a parameter comes from; unknown without a gradient, or if it is not watched."""
        if p is None or p.grad is None or id(p) not in self._handles:
            return "unknown"
        return "scaled" if id(p) in self._scaled and self._scaled[id(p)]() is p.grad else "plain"

    def was_assigned(self, state: Any) -> bool:
        """Return whether the user has assigned the gradients of a :class:`GradientState` since its last step.

        No backward has reached its watched parameter since, and the gradient is not one that was there before.

        Raises:
            RuntimeError: If a scaled backward since that step has reached no watched parameter. The gradients may then
                come from a copy of the module, and carry the scale.
        """
        p = state.watched
        if state.scale is None:
            return False
        carried = None if state.carried is None else state.carried()
        if self.origin_of(p) == "unknown" or id(p) in self._plain or p.grad is carried:
            return False
        is_assigned = self.origin_of(p) == "plain" if state.folded else self._latest.get(id(p), 0) <= state.since
        if is_assigned and self._elsewhere > state.since:
            raise RuntimeError(
                f"Gradients of `{type(state.optimizer).__name__}` were assigned after a scaled backward of other"
                " tensors: do they carry the loss scale? Call `unscale_` before you assign true ones. Call"
                " `loss.backward()` for gradients of a copy."
            )
        return is_assigned

    def came_plain(self, optimizer: Optimizer) -> bool:
        """Return whether a backward without the loss scale has added to the gradients of an optimizer."""
        return any(p.grad is not None and id(p) in self._plain for p in parameters(optimizer))

    # -- backward by hand ----------------------------------------------------------------------------------------------

    def scale(self, loss: Tensor) -> Tensor:
        """Multiply a loss whose backward the user runs."""
        self._by_hand = self.in_scaled_backward = False  # after an error inside a backward
        steps: Any = self._steps()
        steps.begin_backward()
        scaled = steps.scaler.multiply(loss)
        if scaled.requires_grad:
            scaled.register_hook(partial(self._begin, loss.detach(), steps.scaler.scale_tensor))
        return scaled

    def _begin(self, loss: Tensor, scale: Tensor, gradient: Tensor) -> None:
        """Bring gradients to the scale of the backward that has reached a scaled loss."""
        steps: Any = self._steps()
        if self.in_scaled_backward and not self._by_hand:
            raise RuntimeError(
                "The loss was multiplied by the loss scale twice: by `scaler.scale(loss)`, and by the plugin. Call"
                f" `{steps.calls.backward}` without `scaler.scale`."
            )
        if not self._by_hand:  # otherwise the same backward has begun with another loss
            self._by_hand = True
            self.__enter__()
            _torch.call_after_backward(self._end)
            steps.carry(scale)
        steps.add_loss(loss)

    def _end(self) -> None:
        steps: Any = self._steps()
        self._by_hand = False
        self.__exit__()
        for state in steps.states.values():
            if not has_gradients(state.optimizer):  # it was a `torch.autograd.grad`
                state.release()

    # -- steps past the owner ------------------------------------------------------------------------------------------

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Check a step."""
        steps = self._steps()
        if steps is None or getattr(THREAD, "in_step", False) or _torch.is_wrapper(optimizer):
            return  # the step of a wrapper calls another one
        state = steps.states.get(id(optimizer))
        inside = self.in_scaled_backward and _torch.backward_number() != -1  # not in another thread
        if state is None:
            refused = inside or self.origin(optimizer) == "scaled"
        else:
            refused = state.is_scaled or (state.found_inf is not None and not state.folded)
        if not refused or not has_gradients(optimizer):
            return
        if inside:
            fix = f"It was called inside the backward: call {steps.calls.step} after it, or use precision 'bf16'"
        else:
            fix = f"Call {steps.calls.step}" if state is not None else steps.calls.unknown
        raise RuntimeError(
            f"`{type(optimizer).__name__}.step()` was called past {steps.calls.owner}, which therefore could neither"
            f" divide its gradients by the loss scale ({steps.scaler.get_scale():.10g}) nor skip it. {fix}."
        )

    def close(self) -> None:
        """Remove all hooks."""
        for handle in (*self._on_steps, *self._handles.values()):
            handle.remove()
        _WATCHES.discard(self)
