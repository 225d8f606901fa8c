"""Run a sharded module a second time as its own shadow: exchange its attributes for copies, and put them back.

A sharded module cannot be copied: FSDP2 swaps classes and keeps state for each module, and the parameters of a tensor
parallel one belong to a device mesh. All ranks must run the second pass, because it gathers parameters.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import ExitStack, contextmanager
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from torch import nn
from typing_extensions import final

from lightning_amp._compat import _sharding
from lightning_amp.shadow._fsdp1 import Replaced
from lightning_amp.shadow._fsdp2 import units_of
from lightning_amp.shadow._module_copy import copy_attributes
from lightning_amp.shadow._ranks import together

_GRADIENT_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


@final
class Exchange:
    """The second set of attributes of a sharded module. The parameters are shared, and restored after each use.

    Args:
        trainer: The trainer.
        module: The module, between two steps.
        model: The module, or the unit of FSDP1 around it.
        parameters: All parameters that the step may reach; their gradients are set aside.
        memo: The memo of `copy.deepcopy`: by `id`, the object that replaces another, for example the trainer.
        in_fp32: Gather parameters in their own dtype, for a run in fp32.

    Cost: copies of buffers, metric states and other attributes; while it is active, of this rank's part of the weights.
    """

    def __init__(
        self,
        trainer: Trainer,
        module: LightningModule,
        model: nn.Module,
        parameters: Iterable[nn.Parameter],
        memo: dict[int, Any],
        *,
        in_fp32: bool,
    ) -> None:
        self._trainer = trainer
        self._in_fp32 = in_fp32
        self._fsdp = units_of(model)
        with together(trainer, wait=True), self._set_aside():
            self._own = copy_attributes(module, model, memo, in_fp32=in_fp32)
            self._parameters = list({id(p): p for p in (*module.parameters(), *parameters)}.values())
        self._is_active = False

    @property
    def gathers_in_half(self) -> bool:
        """Return whether only a second exchange, with `in_fp32`, gathers parameters in their own dtype."""
        return self._fsdp.casts and not self._in_fp32

    @contextmanager
    def active(self) -> Generator[None]:
        """Give the module its second set of attributes inside. All ranks must enter it. A second entry does nothing."""
        if self._is_active:
            yield
            return
        with ExitStack() as undo:
            self._is_active = True
            undo.callback(setattr, self, "_is_active", False)
            undo.enter_context(self._set_aside())
            undo.enter_context(self._attributes())
            undo.enter_context(_without_gradients(self._parameters))
            undo.enter_context(_restored(self._parameters))
            for parameter, values in self._fsdp.parts_in_use():
                _sharding.local(parameter.detach()).copy_(values)
            if self._in_fp32 and self._fsdp.casts:
                undo.enter_context(self._fsdp.gathering_in_full())
            undo.callback(self._fsdp.settle)
            yield

    @contextmanager
    def running(self) -> Generator[None]:
        """Run user code inside: all ranks succeed or fail together.

        At the end, gathered parameters are freed: the parameters of the module are its shards again.
        """
        with together(self._trainer, wait=True):
            try:
                yield
            finally:
                self._fsdp.settle()

    @contextmanager
    def _set_aside(self) -> Generator[None]:
        self._fsdp.set_aside()
        try:
            yield
        finally:
            self._fsdp.put_back()

    @contextmanager
    def _attributes(self) -> Generator[None]:
        real = [(module, dict(vars(module))) for module in self._own]
        _set_attributes(self._own.items())
        try:
            yield
        finally:
            self._fsdp.reshard()
            self._own = {module: dict(vars(module)) for module in self._own}
            _set_attributes(real)


def _set_attributes(attributes: Iterable[tuple[nn.Module, dict[str, Any]]]) -> None:
    for module, values in attributes:
        present = vars(module)
        present.clear()
        present.update(values)


@contextmanager
def _without_gradients(parameters: list[nn.Parameter]) -> Generator[None]:
    """Set gradients aside, and hooks on them: a hook that steps an optimizer must not run a second time."""
    aside = Replaced()
    for parameter in parameters:
        hooks = [name for name in _GRADIENT_HOOKS if getattr(parameter, name, None)]
        aside.replace(parameter, grad=None, **dict.fromkeys(hooks))
    try:
        yield
    finally:
        aside.restore()


@contextmanager
def _restored(parameters: list[nn.Parameter]) -> Generator[None]:
    """Restore this rank's part of each parameter at the end, because a step may edit weights."""
    parts = [_sharding.local(parameter).data for parameter in parameters]  # `data` counts its changes by itself
    values = [part.clone() for part in parts]
    try:
        yield
    finally:
        for part, value in zip(parts, values, strict=True):
            part.copy_(value)
