"""A shadow of a LightningModule: the same parameters, everything else its own, and a trainer that it cannot change.

Steps and hooks of the shadow run user code a second time. What that code logs, counts, appends, draws at random or
sets on the trainer stays in the shadow. What it does outside of both (prints, files, globals) happens twice.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import Strategy

from lightning_amp._compat import _lightning
from lightning_amp.shadow._module_copy import copy_module


class Shadow:
    """A module that runs beside the real one.

    Building it copies buffers, metric states and other attributes (host time in the order of 0.1 ms per submodule,
    device memory for the buffers); it does not stop the device.

    Args:
        trainer: the real trainer, inside a loop. What it has collected in this loop so far is copied too.
        module: the real module. Neither is changed.
        trainer_attributes: further attributes of the trainer that the shadow is to see.
        strategy_attributes: the same for `trainer.strategy`.
        own_parameters: copy the parameters too, so that a step can neither change them nor their gradients.
        upcast: parameters and buffers in half precision are float32 in the shadow. For one that runs in fp32.
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
        loggers = [SilentLogger(logger) for logger in trainer.loggers]
        attributes: dict[str, Any] = {
            "strategy": strategy,
            "loggers": loggers,
            "logger": loggers[0] if loggers else None,
            "progress_bar_callback": _SilentProgressBar(),
            "save_checkpoint": _NOTHING,
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

    def follow_parameters(self, module: LightningModule) -> None:
        """Take the values that the parameters of the real module have now."""
        with torch.inference_mode(False), torch.no_grad():
            for own, real in zip(self.module.parameters(), module.parameters(), strict=True):
                own.copy_(real)

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


def replaying(plugin: Any, **attributes: Any) -> Any:
    """A view of the precision plugin in which `scaled_grad` does not let its scale move."""
    scaled_grad = getattr(plugin, "scaled_grad", None)
    own = {} if scaled_grad is None else {"scaled_grad": partial(scaled_grad, learn=False)}
    return View(plugin, **own, **attributes)


class Reduce:
    """`Strategy.reduce` for what the shadow logs; gives the value itself back while `enabled` is off.

    Knows nothing of the shadow: the results keep it, and torchmetrics' reference cycles keep the results.
    """

    def __init__(self, strategy: Strategy) -> None:
        self.enabled = True
        self.strategy = strategy

    def __call__(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        return self.strategy.reduce(tensor, *args, **kwargs) if self.enabled else tensor

    def __deepcopy__(self, memo: dict[int, Any]) -> Reduce:
        return self


class View:
    """Reads attributes of another object; what is set on the view stays on the view."""

    def __init__(self, target: Any, **attributes: Any) -> None:
        vars(self).update(attributes, view_target=target, view_computed={})

    def compute(self, name: str, value: Callable[[], Any]) -> None:
        """Answer a read of `name` with a call of `value`."""
        vars(self)["view_computed"][name] = value

    def __getattr__(self, name: str) -> Any:
        own = vars(self)
        if name in own["view_computed"]:
            return own["view_computed"][name]()
        return getattr(own["view_target"], name)

    def __deepcopy__(self, memo: dict[int, Any]) -> View:
        return self

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride]
        # `isinstance(self.trainer.strategy, DDPStrategy)` in user code takes the same branch in the shadow.
        return type(vars(self)["view_target"])


class SilentLogger:
    """Looks like a user's logger and writes nothing."""

    def __init__(self, logger: Logger) -> None:
        vars(self)["silenced"] = logger

    def __getattr__(self, name: str) -> Any:
        value = getattr(vars(self)["silenced"], name)
        # The first two are what loggers call the handle of the service that they write to.
        return _NOTHING if name in ("experiment", "run") or callable(value) else value

    def __deepcopy__(self, memo: dict[int, Any]) -> SilentLogger:
        return self

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride]
        return type(vars(self)["silenced"])


class _Nothing:
    """Accepts every use and does nothing."""

    def _itself(self, *_: Any, **__: Any) -> Any:
        return self

    __call__ = __getitem__ = __enter__ = _itself

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def _ignore(self, *_: Any) -> None:
        return None

    __setattr__ = __setitem__ = __exit__ = _ignore

    def __iter__(self) -> Any:
        return iter(())

    def __bool__(self) -> bool:
        return False


_NOTHING = _Nothing()


class _SilentProgressBar:
    """What `LightningModule.print` prints through."""

    is_enabled = True

    def print(self, *_: Any, **__: Any) -> None:
        """Do nothing."""


class RandomState(NamedTuple):
    """The states of the global random generators of Python, NumPy, torch and the accelerator."""

    python: Any
    numpy: Any
    cpu: torch.Tensor
    accelerator: Any

    @classmethod
    def capture(cls, device_type: str) -> RandomState:
        """Read them (some 30 us; does not stop the device)."""
        numpy: Any = sys.modules.get("numpy")  # nobody draws from what nobody has imported
        return cls(
            python=random.getstate(),
            numpy=None if numpy is None else numpy.random.get_state(),
            cpu=torch.get_rng_state(),
            accelerator=_accelerator_random(device_type, "get_rng_state"),
        )

    def restore(self, device_type: str) -> None:
        """Write them back."""
        random.setstate(self.python)
        if self.numpy is not None:
            cast(Any, sys.modules["numpy"]).random.set_state(self.numpy)
        torch.set_rng_state(self.cpu)
        if self.accelerator is not None:
            _accelerator_random(device_type, "set_rng_state", self.accelerator)


def _accelerator_random(device_type: str, name: str, *args: Any) -> Any:
    if device_type == "cpu":
        return None
    backend = torch.get_device_module(device_type)
    # All devices of the process where the backend can: user code may draw on another than its own.
    return getattr(backend, f"{name}_all", getattr(backend, name, lambda *_: None))(*args)


@contextmanager
def paired_random(device_type: str, start: RandomState | None = None) -> Generator[None, None, None]:
    """Leave the random generators as they were found; inside, begin at `start` (default: as found)."""
    found = RandomState.capture(device_type)
    if start is not None:
        start.restore(device_type)
    try:
        yield
    finally:
        found.restore(device_type)


def _reduced_precision_switches() -> tuple[Any, ...]:
    backends: Any = torch.backends
    return (
        backends.cuda.matmul,
        backends.cudnn.conv,
        backends.cudnn.rnn,
        backends.mkldnn.matmul,
        backends.mkldnn.conv,
        backends.mkldnn.rnn,
    )


@contextmanager
def full_precision(device_type: str) -> Generator[None, None, None]:
    """True fp32: no autocast, no TF32, no bf16 inside fp32 matmuls (`set_float32_matmul_precision("medium")`)."""
    found: list[tuple[Any, str]] = []
    try:
        for switch in _reduced_precision_switches():
            precision = switch.fp32_precision
            if precision not in ("ieee", "none"):
                found.append((switch, precision))
                switch.fp32_precision = "ieee"
        with torch.autocast(device_type, enabled=False):
            yield
    finally:
        for switch, precision in found:
            # Reading resolves inheritance: what came from the parent goes back to inheriting.
            inherited = "none"
            switch.fp32_precision = inherited
            if switch.fp32_precision != precision:
                switch.fp32_precision = precision
