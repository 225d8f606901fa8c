"""A shadow of a LightningModule: the same parameters, everything else its own, and a trainer that it cannot change.

Steps and hooks of the shadow run user code a second time. What that code logs, counts, appends, draws at random or
sets on the trainer stays in the shadow. What it does outside of both (prints, files, globals) happens twice.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import Strategy
from typing_extensions import final

from lightning_amp._compat import _lightning
from lightning_amp.shadow._module_copy import copy_module
from lightning_amp.shadow._views import NOTHING, SilentProgressBar, View, replaying, silent_logger


@final
class Shadow:
    """A module that runs beside the real one.

    Building it copies buffers, metric states and other attributes (host time in the order of 0.1 ms per submodule,
    device memory for the buffers); it does not stop the device.

    Args:
        trainer: The real trainer, inside a loop. What it has collected in this loop so far is copied too.
        module: The real module. Neither is changed.
        trainer_attributes: Further attributes of the trainer that the shadow is to see.
        strategy_attributes: The same for `trainer.strategy`.
        own_parameters: Copy the parameters too, so that a step can neither change them nor their gradients.
        upcast: Parameters and buffers in half precision are float32 in the shadow. For one that runs in fp32.
    """

    def __init__(
        self,
        trainer: Trainer,
        module: LightningModule,
        *,
        trainer_attributes: Mapping[str, Any] | None = None,
        strategy_attributes: Mapping[str, Any] | None = None,
        own_parameters: bool = False,
        upcast: bool = False,
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
        self.module = copy_module(module, memo, own_parameters=own_parameters, upcast=upcast)
        _lightning.own_results(view, trainer, memo)
        for name in ("callback_metrics", "logged_metrics", "progress_bar_metrics"):
            view.compute(name, lambda name=name: _lightning.connector_metrics(view, name))
        vars(view).update(lightning_module=self.module, model=self.module)
        self.module.trainer = cast(Trainer, view)

    def call(self, hook: str, *args: Any) -> Any:
        """Run a hook or step of the shadow; `self.log` works in it. Compiled code runs eagerly.

        Compiling once more for another precision would take minutes and could use up the recompile limit of the
        function, after which the real run would fall back to eager mode, too.
        """
        with torch.compiler.set_stance("force_eager"):
            return _lightning.call_module_hook(self.module, hook, *args)

    def close(self) -> None:
        """Cut the ties between module and trainer view, so that the memory is free at once and not at the next `gc`."""
        self.module.trainer = None
        vars(self.view.strategy).clear()
        vars(self.view).clear()


@final
class Reduce:
    """`Strategy.reduce` for what the shadow logs.

    Knows nothing of the shadow: the results keep it, and torchmetrics' reference cycles keep the results.
    """

    def __init__(self, strategy: Strategy) -> None:
        self.enabled = True
        self._strategy = strategy

    def __call__(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        return self._strategy.reduce(tensor, *args, **kwargs) if self.enabled else tensor

    @contextmanager
    def suspended(self) -> Generator[None]:
        """Give each value back as it is: the other ranks may not be reducing."""
        self.enabled = False
        try:
            yield
        finally:
            self.enabled = True

    def __deepcopy__(self, memo: dict[int, Any]) -> Reduce:
        return self
