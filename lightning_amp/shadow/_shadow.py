"""Make a shadow of a LightningModule: a copy with a view of the trainer that cannot change the trainer.

Steps and hooks of the shadow run user code a second time. Its logs, counters, lists, random numbers and settings of the
trainer stay in the shadow. Its other effects (prints, files, globals) happen twice.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, cast

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import Strategy
from torch import nn
from typing_extensions import final

from lightning_amp.shadow._exchange import Exchange
from lightning_amp.shadow._module_copy import copy_module
from lightning_amp.shadow._own_results import own_results
from lightning_amp.shadow._ranks import together
from lightning_amp.shadow._surroundings import is_sharded
from lightning_amp.shadow._views import NOTHING, SilentProgressBar, View, replaying, silent_logger


@final
class Shadow:
    """A copy of a module that runs in addition to the real module.

    It has its own parameters, because a step may edit them, even in validation: the momentum encoder of MoCo.

    Args:
        trainer: The real trainer, inside a loop. The values that the trainer has collected in this loop are copied too.
        module: The real module. Neither is changed.
        trainer_attributes: Further attributes of the trainer's view.
        strategy_attributes: The same for `trainer.strategy`.
        upcast: Convert half-precision parameters and buffers to float32, for a run in fp32.
        parameters: Parameters outside of the module that its step may reach.

    A sharded module is its own shadow: inside of :meth:`active` it has copies of all attributes but its parameters,
    which get their values back at the end. All ranks must enter that context together.

    Cost: building it copies parameters, buffers, metric states and other attributes: some 0.1 ms of host time per
    submodule. Building it does not wait for the device.
    """

    def __init__(
        self,
        trainer: Trainer,
        module: LightningModule,
        *,
        trainer_attributes: Mapping[str, Any] | None = None,
        strategy_attributes: Mapping[str, Any] | None = None,
        upcast: bool = False,
        parameters: Iterable[nn.Parameter] = (),
    ) -> None:
        self.reduce = Reduce(trainer.strategy)
        plugin = replaying(trainer.precision_plugin)
        view = View(trainer, precision_plugin=plugin)
        own = {"reduce": self.reduce, "precision_plugin": plugin, **(strategy_attributes or {})}
        strategy = View(trainer.strategy, **own)
        loggers = [silent_logger(logger) for logger in trainer.loggers]
        attributes: dict[str, Any] = {
            "strategy": strategy,
            "loggers": loggers,
            "logger": loggers[0] if loggers else None,
            "progress_bar_callback": SilentProgressBar(),
            "save_checkpoint": NOTHING,
        }
        vars(view).update(attributes, **(trainer_attributes or {}))
        memo: dict[int, Any] = {id(trainer): view, id(trainer.strategy): strategy}
        memo.update({id(logger): silent for logger, silent in zip(trainer.loggers, loggers, strict=True)})
        self.view: Any = view
        self._trainer = trainer
        self.exchange: Exchange | None = None
        self._redirect: Callable[..., Any] | None = None
        if is_sharded(trainer):
            model = cast(nn.Module, trainer.strategy.model)
            self.module = module
            self.exchange = Exchange(trainer, module, model, parameters, memo, in_fp32=upcast)
            vars(view).update(model=model)
            self._redirect = partial(_redirected_step, trainer.strategy) if model is not module else None
        else:
            with together(trainer):
                self.module = copy_module(module, memo, upcast=upcast)
            vars(view).update(model=self.module)
        own_results(view, trainer, memo)
        vars(view).update(lightning_module=self.module)
        with self.active():
            self.module.trainer = cast(Trainer, view)

    def active(self) -> AbstractContextManager[None]:
        """Return the context in which the shadow may be used. A copy may always be used."""
        return nullcontext() if self.exchange is None else self.exchange.active()

    def running(self) -> AbstractContextManager[None]:
        """Return the context for a run of user code, inside of :meth:`active`; see :func:`together`."""
        return together(self._trainer) if self.exchange is None else self.exchange.running()

    def call(self, hook: str, *args: Any) -> Any:
        """Run a hook or step of the shadow on its view of the trainer; `self.log` works in it.

        Compiled code runs eagerly. Compiling again for another precision would take minutes. It could also use up the
        function's recompile limit, and then the real run would fall back to eager mode.
        """
        with torch.compiler.set_stance("force_eager"):
            run = self._redirect if hook.endswith("_step") else None
            return _call_hook(self.module, hook, *args, run=run)

    def close(self) -> None:
        """Remove the references between module and view, to free memory before the next garbage collection."""
        if self.exchange is None:
            self.module.trainer = None
        vars(self.view.strategy).clear()
        vars(self.view).clear()


@final
class Reduce:
    """Stands in for `Strategy.reduce` when the shadow logs.

    It has no reference to the shadow: the results hold it, and reference cycles of torchmetrics keep the results alive.
    """

    def __init__(self, strategy: Strategy) -> None:
        self.enabled = True
        self._strategy = strategy

    def __call__(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        return self._strategy.reduce(tensor, *args, **kwargs) if self.enabled else tensor

    @contextmanager
    def suspended(self) -> Generator[None]:
        """Return values unreduced inside, because other ranks may not take part."""
        self.enabled = False
        try:
            yield
        finally:
            self.enabled = True

    def __deepcopy__(self, memo: dict[int, Any]) -> Reduce:
        return self


# Remove when the Trainer has a public way to call a hook.
def _call_hook(module: Any, name: str, *args: Any, run: Callable[..., Any] | None = None) -> Any:
    """Call a hook, and set `_current_fx_name` for it. `self.log` needs that name, and only the Trainer sets it.

    `run`, if given, calls the hook, with the module, its name and the arguments.
    """
    previous = module._current_fx_name
    module._current_fx_name = name
    try:
        return getattr(module, name)(*args) if run is None else run(module, name, *args)
    finally:
        module._current_fx_name = previous


def _redirected_step(strategy: Any, module: Any, name: str, *args: Any) -> Any:
    """Call a step through the `forward` of the strategy's model, as the strategy does: FSDP1 gathers parameters there.

    Remove when the strategy has a public way that does not enter the plugin's context.
    """
    return strategy._forward_redirection(strategy.model, module, name, *args)
