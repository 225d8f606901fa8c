"""Run a short fit in fp32 in this process, and measure its steps in low precision."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, Generic, TypeVar

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch.utils.data import DataLoader
from typing_extensions import final, override

from lightning_amp._compat import _lightning, _modules
from lightning_amp._containers import tensors_in
from lightning_amp.casting import Rule
from lightning_amp.numerics import HALF_DTYPES
from lightning_amp.precision import AmpPrecision
from lightning_amp.shadow import copy_batch, own_data, own_module, private_trainer, run_private_fit, unnoticed
from lightning_amp.tracing import RandomState
from lightning_amp.tune.fp32_modules._bench import Bench, Point, state_of
from lightning_amp.tune.fp32_modules._request import Request

T = TypeVar("T")

_NUM_VALIDATION_BATCHES = 3


@final
class _WarmUp(AmpPrecision):
    """A plugin that computes in fp32 at first, and can be switched to the user's precision."""

    _in_fp32 = True

    def compute_in_fp32(self, value: bool) -> bool:
        """Compute in fp32, or in the user's precision; return the previous setting."""
        before, self._in_fp32 = self._in_fp32, value
        return before

    @override
    def autocast_context_manager(self) -> torch.autocast:
        return torch.autocast(self.device, enabled=False) if self._in_fp32 else super().autocast_context_manager()


@final
class _Probe(Callback, Generic[T]):
    """Collects steps of training, passes them to `work` in the validation after them, and ends the fit.

    Without validation, it does so in the next step.
    """

    def __init__(self, plugin: _WarmUp, steps: Sequence[int], first_validation_batch: int, work: Callable[[Bench], T]):
        self._plugin, self._steps, self._work = plugin, steps, work
        self._first_validation_batch = first_validation_batch
        self._points: list[Point] = []
        self._num_batches = 0
        self.results: list[T] = []

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for step in ("training_step", "validation_step"):
            if is_param_in_hook_signature(getattr(pl_module, step), "dataloader_iter", explicit=True):
                raise ValueError(
                    f"`{step}` must not take a `dataloader_iter`, whose batches cannot be run twice. Take a batch."
                )

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        number, last = self._num_batches, self._steps[-1]
        if any(t.dtype in HALF_DTYPES for t in (*pl_module.parameters(), *(t for _, t in tensors_in(batch)))):
            self._plugin.compute_in_fp32(False)  # half-precision weights or inputs need the user's precision
        self._num_batches += 1
        if number in self._steps:
            training = {_modules.plain_name(name): module.training for name, module in pl_module.named_modules()}
            random_state = RandomState.capture(trainer.strategy.root_device.type)
            state = state_of(pl_module)
            self._points.append(Point(number, copy_batch(batch), batch_idx, state, training, random_state))
        # an empty validation calls no hook, so do not wait for it for ever
        if number > last and (not trainer.enable_validation or number > 2 * last + 1):
            self._run(trainer, pl_module, [])

    @override
    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if self._num_batches > self._steps[-1]:
            self._run(trainer, pl_module, self._validation_batches(trainer, batch, batch_idx))

    def _run(self, trainer: Trainer, module: LightningModule, batches: list[tuple[Any, int, int | None]]) -> None:
        trainer.should_stop = True
        if self.results:
            return
        trained_in_fp32 = self._plugin.compute_in_fp32(False)
        self.results.append(self._work(Bench(trainer, module, self._plugin, self._points, batches)))
        self._plugin.compute_in_fp32(trained_in_fp32)

    def _validation_batches(self, trainer: Trainer, batch: Any, batch_idx: int) -> list[tuple[Any, int, int | None]]:
        """Draw the first batches of each loader, or copy the current batch if a loader cannot be iterated again."""
        loaders = trainer.val_dataloaders
        several = isinstance(loaders, (list, tuple)) and len(loaders) > 1
        listed: list[Any] = list(loaders) if isinstance(loaders, (list, tuple)) else [loaders]
        found: list[tuple[Any, int, int | None]] = []
        if all(isinstance(loader, DataLoader) and not loader.persistent_workers for loader in listed):
            for loader_idx, loader in enumerate(listed):
                start, number = self._first_validation_batch, _NUM_VALIDATION_BATCHES
                drawn = list(islice(loader, start, start + number)) or list(islice(loader, number))
                on_device = [_lightning.to_device(trainer, one, loader_idx) for one in drawn]
                found += [(one, idx, loader_idx if several else None) for idx, one in enumerate(on_device)]
        return found or [(copy_batch(batch), batch_idx, _lightning.evaluation_loader_idx(trainer))]


def in_a_short_fit(
    request: Request, steps: Sequence[int], work: Callable[[Bench], T], *, rules: Sequence[Rule] = (), later: int = 0
) -> T:
    """Train a copy of the module in fp32 for some steps, with the user's hooks and callbacks, and measure.

    Args:
        request: The arguments of `find_fp32_modules`.
        steps: Indices of the batches of training to measure, in order.
        work: Measures, and returns the result.
        rules: Rules that replace the user's own.
        later: Number of earlier fits. Each of them validated with other batches.

    """
    length = {"limit_train_batches": steps[-1] + 1, "val_check_interval": 1.0, "check_val_every_n_epoch": 1}
    # a NaN is a result of the search, not an error
    other = {"inference_mode": False, "detect_anomaly": False, "overfit_batches": 0.0}
    arguments: dict[str, Any] = {**request.arguments, **({"fp32_modules": rules} if rules else {})}
    plugin = _WarmUp(**arguments)
    probe = _Probe(plugin, steps, _NUM_VALIDATION_BATCHES * later, work)
    device = request.device
    with unnoticed(device), own_data(request.make_data) as data:
        module = own_module(request.make_module)
        trainer = private_trainer(device, plugin, [probe], {**request.trainer_kwargs, **length, **other})
        run_private_fit(trainer, module, data)
    if not probe.results:
        raise ValueError("The data module must have batches of training; its loader gave none.")
    return probe.results[0]
