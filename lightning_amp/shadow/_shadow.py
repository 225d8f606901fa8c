"""Make a shadow of a LightningModule: a copy with a view of the trainer that cannot change the trainer.

Steps and hooks of the shadow run user code a second time. Its logs, counters, lists, random numbers and settings of the
trainer stay in the shadow. Its other effects (prints, files, globals) happen twice.

A sharded module cannot be copied: FSDP2 swaps classes and keeps state for each module, and the parameters of a tensor
parallel one belong to a device mesh. Such a module is its own shadow: its attributes are exchanged for copies, and put
back. All ranks must run the second pass, because it gathers parameters.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from copy import deepcopy
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import nn
from typing_extensions import final

from lightning_amp._compat import _sharding
from lightning_amp._compat._names import LightningModule, Trainer, is_param_in_hook_signature
from lightning_amp.shadow._fsdp import is_sharded, replace, units_of
from lightning_amp.shadow._module_copy import copy_attributes, copy_module
from lightning_amp.shadow._ranks import together
from lightning_amp.shadow._views import NOTHING, View, replaying

_GRADIENT_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


@final
class Shadow:
    """A copy of a module that runs in addition to the real module.

    It has its own parameters, because a step may edit them, even in validation: the momentum encoder of MoCo.

    Args:
        trainer: The real trainer, inside a loop. The values that the trainer has collected in this loop are copied too.
        module: The real module. Neither is changed.
        strategy_attributes: Attributes of the view of `trainer.strategy`.
        upcast: Convert half-precision parameters and buffers to float32, for a run in fp32.
        parameters: Parameters outside of the module that its step may reach.
        replaced: By `id`, the objects that replace others in the copy.

    A sharded module has its second set of attributes inside of :meth:`active`. All ranks must enter that context
    together.

    Cost: building it copies parameters, buffers, metric states and other attributes: some 0.1 ms of host time per
    submodule. Building it does not wait for the device.
    """

    def __init__(
        self,
        trainer: Trainer,
        module: LightningModule,
        *,
        strategy_attributes: Mapping[str, Any] | None = None,
        upcast: bool = False,
        parameters: Iterable[nn.Parameter] = (),
        replaced: Mapping[int, Any] | None = None,
    ) -> None:
        own = {"precision_plugin": replaying(trainer.precision_plugin), **(strategy_attributes or {})}
        strategy = View(trainer.strategy, **own)
        loggers = [View(logger, calls=NOTHING) for logger in trainer.loggers]
        bar = SimpleNamespace(is_enabled=True, print=NOTHING)
        self.view: Any = View(
            trainer, strategy=strategy, loggers=loggers, progress_bar_callback=bar, save_checkpoint=NOTHING
        )
        memo: dict[int, Any] = {id(trainer): self.view, id(trainer.strategy): strategy, **(replaced or {})}
        memo.update(zip(map(id, trainer.loggers), loggers, strict=True))
        self.exchange: Exchange | None = None
        self._redirecting: Any = None  # a strategy whose model is not the module
        if is_sharded(trainer):
            self.module = module
            self.exchange = Exchange(trainer, module, parameters, memo, in_fp32=upcast)
            self._redirecting = trainer.strategy if trainer.strategy.model is not module else None
        else:
            self.module = copy_module(module, memo, upcast=upcast)
            vars(strategy).update(model=self.module)
        vars(strategy).update(lightning_module=self.module)
        own_results(self.view, trainer, memo)
        with self.active():
            self.module.trainer = self.view

    def active(self) -> AbstractContextManager[None]:
        """Return the context in which the shadow may be used. A copy may always be used."""
        return nullcontext() if self.exchange is None else self.exchange.active()

    def running(self) -> AbstractContextManager[None]:
        """Return the context for a run of user code, inside of :meth:`active` and of :func:`together`."""
        return nullcontext() if self.exchange is None else self.exchange.running()

    def call(self, hook: str, *args: Any) -> Any:
        """Run a hook or step of the shadow on its view of the trainer; `self.log` works in it.

        A step without `batch_idx` in its signature is called without it.

        Compiled code runs eagerly. Compiling again for another precision would take minutes. It could also use up the
        function's recompile limit, and then the real run would fall back to eager mode.

        FSDP1 gathers parameters in the `forward` of the strategy's model, so a step is called through it. Remove when
        the Trainer has a public way to call a hook, and the strategy one to call a step outside of the plugin's
        context.
        """
        module: Any = self.module
        if hook.endswith("_step") and not is_param_in_hook_signature(getattr(module, hook), "batch_idx", min_args=2):
            args = (args[0], *args[2:])
        previous, module._current_fx_name = module._current_fx_name, hook  # `self.log` needs that name
        try:
            with torch.compiler.set_stance("force_eager"):
                if self._redirecting is not None and hook.endswith("_step"):
                    redirection = self._redirecting._forward_redirection
                    return redirection(self._redirecting.model, module, hook, *args)
                return getattr(module, hook)(*args)
        finally:
            module._current_fx_name = previous

    def close(self) -> None:
        """Remove the references between module and view, to free memory before the next garbage collection."""
        if self.exchange is None:
            self.module.trainer = None
            for part in self.module.modules():
                vars(part).pop("forward", None)  # of `fp32_modules`, which refers to its module
        vars(self.view.strategy).clear()
        vars(self.view).clear()


@final
class Exchange:
    """The second set of attributes of a sharded module. The parameters are shared, and restored after each use.

    Args:
        trainer: The trainer.
        module: The module, between two steps.
        parameters: Parameters outside of the module that the step may reach; their gradients are set aside, too.
        memo: The memo of `copy.deepcopy`: by `id`, the object that replaces another, for example the trainer.
        in_fp32: Gather parameters in their own dtype, for a run in fp32.

    Cost: copies of buffers, metric states and other attributes; while it is active, of this rank's part of the weights.
    """

    def __init__(
        self,
        trainer: Trainer,
        module: LightningModule,
        parameters: Iterable[nn.Parameter],
        memo: dict[int, Any],
        *,
        in_fp32: bool,
    ) -> None:
        model = cast(nn.Module, trainer.strategy.model)
        self._trainer, self._in_fp32, self.fsdp, self._is_active = trainer, in_fp32, units_of(model), False
        with together(trainer, agree=True), self.fsdp.set_aside():
            # the attributes that are not in use
            self._other = list(copy_attributes(module, model, memo, in_fp32=in_fp32).items())
            self._parameters = list({id(p): p for p in (*module.parameters(), *parameters)}.values())

    @contextmanager
    def active(self) -> Generator[None]:
        """Give the module its second set of attributes inside. All ranks must enter it. A second entry does nothing."""
        if self._is_active:
            yield
            return
        with ExitStack() as undo:
            self._is_active = True
            undo.callback(setattr, self, "_is_active", False)
            undo.enter_context(self.fsdp.set_aside())
            undo.callback(self._swap)
            self._swap()
            for parameter in self._parameters:
                # a hook may step an optimizer
                hooks = [name for name in _GRADIENT_HOOKS if getattr(parameter, name, None)]
                replace(undo, parameter, grad=None, **dict.fromkeys(hooks))
                part = _sharding.local(parameter).data  # `data` counts its changes by itself
                undo.callback(part.copy_, part.clone())  # because a step may edit weights
            for parameter, values in self.fsdp.parts_in_use():
                _sharding.local(parameter.detach()).copy_(values)
            if self._in_fp32 and self.fsdp.casts:
                undo.enter_context(self.fsdp.gathering_in_full())
            undo.callback(self.fsdp.settle)
            yield

    @contextmanager
    def running(self) -> Generator[None]:
        """Run user code inside: all ranks succeed or fail together.

        At the end, gathered parameters are freed: the parameters of the module are its shards again.
        """
        with together(self._trainer, agree=True):
            try:
                yield
            finally:
                self.fsdp.settle()

    def _swap(self) -> None:
        """Exchange the attributes of each module for the other set."""
        self.fsdp.reshard()
        present = [(module, dict(vars(module))) for module, _ in self._other]
        for module, values in self._other:
            vars(module).clear()
            vars(module).update(values)
        self._other = present


def own_results(view: Any, trainer: Any, memo: dict[int, Any]) -> None:
    """Give a view of the trainer its own result collection and logger connector.

    `LightningModule.log` writes to `trainer._results` and `trainer._logger_connector`. With its own pair, a copy of a
    module logs with Lightning's naming, batch-size weighting and reduction, and leaves the trainer alone. Remove when
    Lightning offers a result collection that a callback may create and read.

    Args:
        view: Stands in for the trainer, and gets the attributes.
        trainer: The real trainer. Its results of this evaluation so far are copied.
        memo: The memo of the module's deep copy, so that the copied results refer to the copy's metric objects.

    """
    from lightning_amp._compat._names import _LoggerConnector, _ResultCollection

    real = trainer._results
    results = _ResultCollection(training=real is not None and real.training)
    if real is not None:
        results.dataloader_idx = real.dataloader_idx
        for key, item in real.items():
            if not item.has_reset:  # otherwise it is from an earlier evaluation
                memo.update({id(one): one for one in (item.meta.sync.group, item.meta.sync.fn) if one is not None})
                results[key] = deepcopy(item, memo)
    view._logger_connector = connector = _LoggerConnector(view)
    theirs = trainer._logger_connector
    connector._callback_metrics = dict(theirs._callback_metrics)
    connector._logged_metrics = dict(theirs._logged_metrics)
    connector._progress_bar_metrics = dict(theirs._progress_bar_metrics)
    connector._current_fx = theirs._current_fx
    view._results = results
