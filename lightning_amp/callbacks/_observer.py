"""The base class of the four callbacks, the checks of their Trainer, and how they log to it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_amp import _messages
from lightning_amp._compat._names import (
    Callback,
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    LightningModule,
    ModelParallelStrategy,
    SingleDeviceStrategy,
    Trainer,
    is_param_in_hook_signature,
    require_kind,
)
from lightning_amp._files import child
from lightning_amp._last_trainer import LastTrainer
from lightning_amp._text import called
from lightning_amp.precision import AmpPrecision


class _Key:
    """The `state_key` of a callback. Lightning reads it of all `callbacks` of a Trainer, so a class is noticed here."""

    def __get__(self, callback: Any, owner: type) -> str:
        if callback is None:
            raise AttributeError(f"`callbacks` has the class `{owner.__name__}`: write `{owner.__name__}()`.")
        return owner.__qualname__  # as Lightning's own does


class Observer(Callback):
    """A callback whose results belong to one Trainer: another one begins anew, as for k folds."""

    dirpath: Path | str | None = None
    state_key = _Key()  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]

    def __init__(self) -> None:
        self._last_trainer = LastTrainer()
        self._forget()

    @abstractmethod
    def _forget(self) -> None:
        """Drop the results of earlier fits."""
        self._said = set[str]()

    def __repr__(self) -> str:
        """Return the code that makes this callback, without arguments that have their default."""
        return called(self)

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        require_kind(trainer, type(self).__name__)
        if stage == "fit" and not self._last_trainer.goes_on(trainer):  # before a checkpoint is restored
            self._forget()

    @override
    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._forget()  # `load_state_dict` is called next if the checkpoint has an entry for this callback

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._close()  # Lightning calls no `teardown` after an exception

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._close()

    def _close(self) -> None:
        """Let go of the run."""

    def _stand_aside(self, reason: str | None) -> bool:
        """Log the reason to do nothing in this run, if there is one, and return whether there is."""
        if reason is not None:
            _messages.info(f"`{type(self).__name__}` stands aside: {reason}.")
        return reason is not None

    def _warn_of_failure(self, trainer: Trainer, reason: str, text: str) -> None:
        """Warn, on the rank where it happened, of a failure of a second run."""
        if self._is_news(reason):
            _messages.warn_on_this_rank(f"`{type(self).__name__}` on rank {trainer.global_rank}: {text}.")

    def _is_news(self, kind: str) -> bool:
        is_news = kind not in self._said
        self._said.add(kind)
        return is_news

    def _write(self, name: str, write: Callable[[Path | str], object]) -> None:
        """Have `write` write a file in `dirpath`. A file that cannot be written does not end a fit."""
        if self.dirpath is None:
            return
        try:
            write(child(self.dirpath, name))
        except Exception as error:  # such as a full disk; drivers raise their own exceptions
            if self._is_news("folder"):
                _messages.warn(
                    f"`{type(self).__name__}` could not write to `{self.dirpath}`: {error}. Training is not affected."
                )


def no_mixed_precision(trainer: Trainer) -> str | None:
    """Return the reason to stand aside, if the run is in fp32 without a plugin of ours; else `None`."""
    plugin = trainer.precision_plugin
    if isinstance(plugin, AmpPrecision) or str(plugin.precision) != "32-true":
        return None
    return "this run has no mixed precision. Pass `plugins=[AmpPrecision(...)]` to the Trainer"


def log_metrics(trainer: Trainer, metrics: Mapping[str, float]) -> None:
    """Log values of the latest step to all loggers and to `trainer.callback_metrics`."""
    trainer.callback_metrics.update({name: torch.tensor(value) for name, value in metrics.items()})
    for logger in trainer.loggers:
        logger.log_metrics(dict(metrics), step=_logging_step(trainer))


def is_log_point(trainer: Trainer, steps_before: int, every: int | None = None) -> bool:
    """Return whether a multiple of `every` steps was reached since `steps_before`; default: `log_every_n_steps`."""
    every = every or trainer.log_every_n_steps  # pyright: ignore[reportAttributeAccessIssue]
    return every > 0 and trainer.global_step // every != steps_before // every


def why_not_twice(trainer: Trainer, module: LightningModule, step: str, *, against_fp32: bool = False) -> str | None:
    """Explain why a step cannot be run a second time, or cannot be compared with fp32; return `None` if it can."""
    strategy = trainer.strategy
    known = isinstance(strategy, (SingleDeviceStrategy, DDPStrategy, FSDPStrategy, ModelParallelStrategy))
    if isinstance(strategy, DeepSpeedStrategy) or not known:
        return f"it works on one device, in DDP, FSDP and tensor parallel, not with `{type(strategy).__name__}`"
    if is_param_in_hook_signature(getattr(module, step), "dataloader_iter", explicit=True):
        return f"a `{step}` that takes a `dataloader_iter` consumes its batches, so they cannot be run twice"
    # In every other precision, weights and inputs are in half or in double precision throughout.
    precision = trainer.precision_plugin.precision
    if against_fp32 and precision not in ("32-true", "16-mixed", "bf16-mixed"):
        return f"with precision {precision!r} there is no fp32 to compare with"
    return None


# Remove when the counter is public.
def _logging_step(trainer: Any) -> int:
    """Return the step at which Lightning logs training metrics. Its own callbacks read this counter, too."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def evaluation_names(trainer: Any) -> set[str]:
    """Return the names of `evaluation_metrics`, also in the sanity check, which does not reduce them.

    Remove when Lightning offers a result collection that a callback may read.
    """
    results = trainer._results
    if results is None:
        return set()
    items = [item for item in results.values() if item.meta.on_epoch and not item.has_reset]
    return {name for item in items for name in results._forked_name(item, on_step=False)}


def add_callback_metrics(trainer: Any, metrics: dict[str, Tensor]) -> None:
    """Add values to `trainer.callback_metrics` where `self.log` is not allowed (`on_validation_end`).

    Reading `trainer.callback_metrics` to update it would reduce metrics that the sanity check does not reduce. Remove
    when it does not.
    """
    trainer._logger_connector._callback_metrics.update(metrics)


def log_evaluation_metrics(trainer: Any, metrics: dict[str, Tensor], step: float | None) -> int:
    """Send values to all loggers as Lightning sends evaluation metrics, and return the step that they got.

    The step is a `step` that the user logged, else the private counter of batches after which an optimizer stepped; it
    is not `global_step`. Remove when that counter and the call that adds the epoch are public.
    """
    number = _logging_step(trainer) if step is None else int(step)
    # `log_metrics` adds the epoch only if there is no `step`.
    trainer._logger_connector.log_metrics(metrics if step is None else {**metrics, "step": torch.tensor(float(number))})
    return number
