"""Run a whole fit in the caller's process without side effects: on a copy, with a private Trainer, without output."""

from __future__ import annotations

import copy
import shutil
import signal
import tempfile
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from typing_extensions import final, override

from lightning_amp._compat import _modules, _sharding
from lightning_amp._compat._messages import SHARDING
from lightning_amp._compat._names import (
    BatchSizeFinder,
    Callback,
    Checkpoint,
    DummyLogger,
    EarlyStopping,
    LearningRateFinder,
    LightningDataModule,
    LightningModule,
    ModelCheckpoint,
    ModelSummary,
    ProgressBar,
    SingleDeviceStrategy,
    Timer,
    Trainer,
    is_overridden,
    require_kind,
)
from lightning_amp.shadow._failures import in_one_line
from lightning_amp.shadow._module_copy import copy_module
from lightning_amp.shadow._surroundings import accelerator_for
from lightning_amp.shadow._views import NOTHING, View
from lightning_amp.tracing import RandomState

_LEFT_OUT = {
    "barebones", "fast_dev_run", "max_time", "min_epochs", "min_steps", "num_nodes", "plugins", "precision", "profiler",
    "sync_batchnorm",
}  # fmt: skip
"""Arguments of the user's Trainer about the length of the fit, the number of devices, and the precision."""

_LEFT_OUT_CALLBACKS = (BatchSizeFinder, Checkpoint, EarlyStopping, LearningRateFinder, ModelSummary, ProgressBar, Timer)
"""Callbacks that write to files or to the terminal, stop the fit, or run additional fits."""

_FOLDER = "lightning-amp-private-"
_MANY_EPOCHS, _MANY_STEPS = 1000, 1_000_000
"""The maximum length of a fit that a callback ends earlier.

It is finite because schedules may read the number of steps, even with endless data.
"""


def own_module(make_module: Callable[[], LightningModule]) -> LightningModule:
    """Make a module that may be trained and discarded, even if the factory returns a module that other code holds.

    It calls the factory twice, from the same random state. If the second module shares nothing with the first, no other
    code holds it; otherwise it is copied.

    Raises:
        TypeError: If the factory returns an object of another type.

    """
    start = RandomState.capture("cpu")  # modules are initialised on the CPU
    made = _made(make_module, "make_module", LightningModule)
    start.restore("cpu")
    again = _made(make_module, "make_module", LightningModule)
    first, second = ({id(p) for p in (*m.modules(), *m.parameters(), *m.buffers())} for m in (made, again))
    return again if first.isdisjoint(second) else copy_module(again, {})


def require_unsharded(make_module: Callable[[], LightningModule], asked: str) -> None:
    """Raise if `configure_model` shards the module, so that one device cannot run it.

    It tries the hook, if the module has one, on a module that no other code holds.

    Args:
        make_module: The user's factory.
        asked: The name of the function that the user called.

    Raises:
        ValueError: If the module is sharded, or cannot be without several processes.
    """
    start = RandomState.capture("cpu")
    made, reason = own_module(make_module), ""
    try:
        if is_overridden("configure_model", made):
            made.configure_model()
    except Exception as error:
        if not SHARDING.search("".join(traceback.format_exception(error))):
            return  # the hook may need a Trainer, which the fit attaches
        reason = f" ({in_one_line(error)})"
    finally:
        start.restore("cpu")
    if reason or _sharding.is_sharded_module(made):
        raise ValueError(
            f"`{asked}` runs the module on one device, where its `configure_model` cannot shard it{reason}. Begin that"
            " hook with `if self.device_mesh is None: return`, so that the whole module is examined."
        )


@contextmanager
def own_data(make_data: Callable[[], LightningDataModule]) -> Generator[LightningDataModule]:
    """Make a data module, and restore its attributes at the end, because other code may hold it.

    Raises:
        TypeError: If the factory returns an object of another type.

    """
    made = _made(make_data, "make_data", LightningDataModule)
    with mock.patch.dict(vars(made)):
        yield made


def _made(factory: Callable[[], Any], argument: str, kind: type) -> Any:
    made = factory()
    made = _modules.uncompiled_module(made) or made if kind is LightningModule else made
    require_kind(made)
    if not isinstance(made, kind):
        raise TypeError(f"`{argument}` must return a {kind.__name__}; it returned {type(made).__name__}.")
    return made


def private_trainer(
    device: torch.device,
    plugin: Any,
    callbacks: Sequence[Callback],
    trainer_kwargs: Mapping[str, Any],
    *,
    limit_val_batches: int = 1,
) -> Trainer:
    """Make a Trainer for one device that writes no output, and trains until a callback sets `trainer.should_stop`.

    The user's callbacks run as copies, but callbacks that write or stop are left out. Values that the module logs are
    discarded. Files that it writes to the Trainer's folders go to a folder that :func:`run_private_fit` removes.

    Args:
        device: The device.
        plugin: A new precision plugin.
        callbacks: Our own callbacks, to run after the user's.
        trainer_kwargs: The user's arguments; arguments about length, devices and output are left out.
        limit_val_batches: Batches of each validation; a schedule may need a metric of a validation.

    """
    kwargs = {name: value for name, value in trainer_kwargs.items() if name not in _LEFT_OUT}
    accelerator = accelerator_for(device, trainer_kwargs)
    given = kwargs.pop("callbacks", None) or []
    given = [given] if isinstance(given, Callback) else given
    own = [_own_callback(callback) for callback in given if not isinstance(callback, _LEFT_OUT_CALLBACKS)]
    folder = tempfile.mkdtemp(prefix=_FOLDER)
    if kwargs.get("enable_checkpointing") is not False:  # modules read `trainer.checkpoint_callback.dirpath`
        own.append(ModelCheckpoint(dirpath=folder, save_top_k=0))
    kwargs.update(
        accelerator=accelerator,
        devices=[device.index] if ":" in str(device) and device.type != "cpu" else 1,
        strategy=SingleDeviceStrategy(device),
        max_epochs=_MANY_EPOCHS,
        max_steps=_MANY_STEPS,
        limit_val_batches=limit_val_batches,
        num_sanity_val_steps=0,
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=View(DummyLogger(), calls=NOTHING, save_dir=folder, log_dir=folder),
    )
    try:
        return Trainer(**kwargs, callbacks=[*own, _LeaveOut(), *callbacks], plugins=[plugin] if plugin else None)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _own_callback(callback: Callback) -> Callback:
    try:
        return copy.deepcopy(callback)
    except Exception as error:
        raise ValueError(
            f"The callback `{type(callback).__name__}` cannot be copied ({type(error).__name__}: {error}), and the one"
            " that was given must stay as it is. Leave it out of `trainer_kwargs['callbacks']` here."
        ) from error


def run_private_fit(trainer: Trainer, module: LightningModule, data: Any = None, **loaders: Any) -> None:
    """Run the fit of a private trainer.

    Args:
        trainer: The Trainer of :func:`private_trainer`.
        module: A module that no other code holds.
        data: The data module; `None` if the module or `loaders` have the data.
        loaders: Loaders for `Trainer.fit`.

    Raises:
        KeyboardInterrupt: At Ctrl-C, which Lightning would turn into an exit of the whole process.

    """
    handler = signal.getsignal(signal.SIGINT)
    try:
        trainer.fit(module, datamodule=data, **loaders)
    except SystemExit as error:
        if isinstance(error.__context__, KeyboardInterrupt):
            raise KeyboardInterrupt from error
        raise
    finally:
        if signal.getsignal(signal.SIGINT) is not handler:
            signal.signal(signal.SIGINT, handler)
        if Path(trainer.default_root_dir).name.startswith(_FOLDER):
            shutil.rmtree(trainer.default_root_dir, ignore_errors=True)


def remove_callbacks(trainer: Trainer) -> None:
    """Remove callbacks that write, stop or run additional fits from a Trainer, also the ones its module configures."""
    callbacks: list[Callback] = vars(trainer)["callbacks"]  # Lightning does not declare this attribute
    callbacks[:] = [c for c in callbacks if not isinstance(c, _LEFT_OUT_CALLBACKS) or getattr(c, "save_top_k", 1) == 0]


@final
class _LeaveOut(Callback):
    """Removes callbacks that write or stop, after the module has configured its callbacks."""

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        remove_callbacks(trainer)
