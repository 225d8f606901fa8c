"""Watch a fit: let some steps settle, time the parts of some steps, and record one step."""

from __future__ import annotations

import functools
import inspect
import time
from collections import defaultdict
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, Literal
from unittest import mock

import torch
from torch import Tensor
from torch.utils import _foreach_utils
from torch.utils.data import DataLoader, IterableDataset
from typing_extensions import final, override

from lightning_amp._compat import _torch
from lightning_amp._compat._names import Callback, LightningModule, Trainer
from lightning_amp._containers import tensors_in
from lightning_amp.advice._recorder import Recorder
from lightning_amp.advice._step import (
    BACKWARD,
    DATA,
    FORWARD,
    OPTIMIZER,
    REST,
    Loading,
    Memory,
    OptimizerFacts,
    Recording,
    Step,
)
from lightning_amp.casting import modules_matching, our_name
from lightning_amp.compare import num_rows
from lightning_amp.measure import DeviceClock, PeakMemory, num_bytes
from lightning_amp.precision import AmpPrecision
from lightning_amp.shadow import copy_batch, keep_batches

MOST_SETTLING = 40
"""Steps after which the loss scale does not settle: a step that is skipped then has a fault."""
_SETTLED = 3
"""Number of first steps, which are not timed: they allocate memory, choose kernels and make optimizer states."""
_SETTLING_S = 60.0
_BATCHES_KEPT = 4
_MOST_RECORDED = 10
"""Number of recorded steps without a backward, after which a step without one is accepted."""
_TIMED = (8, 60)
_TIMED_S = (2.0, 8.0)
"""Lower and upper bounds of the number of timed steps and of their seconds. The longer time also ends the settling."""
_BETWEEN = "between epochs"


@final
class PartTimer:
    """Adds up the time of nested parts of a step. Time is counted for the innermost part only.

    The host's clock measures data loading, and the device's clock all other parts.
    """

    def __init__(self, device: torch.device) -> None:
        self._clock = DeviceClock(device)
        self._stack: list[str] = []
        self._since: Any = None
        self._since_host = 0.0
        self._data_s = 0.0
        self._laps: list[tuple[str, Any, Any]] = []

    @property
    def part(self) -> str:
        """Return the innermost part."""
        return self._stack[-1] if self._stack else REST

    def push(self, part: str) -> None:
        """Begin a part inside the current one."""
        self._close()
        self._stack.append(part)

    def pop(self) -> None:
        """End the innermost part."""
        self._close()
        if self._stack:
            self._stack.pop()

    def start(self) -> None:
        """Begin to count."""
        self._data_s = 0.0
        self._laps.clear()
        self._since, self._since_host = self._clock.now(), time.perf_counter()

    def stop(self) -> dict[str, float]:
        """Return the seconds by part. It waits for the device."""
        self._close()
        self._since = None
        seconds = defaultdict[str, float](float, {DATA: self._data_s} if self._data_s else {})
        for part, first, last in self._laps:
            seconds[part] += self._clock.seconds(first, last)
        return dict(seconds)

    def _close(self) -> None:
        if self._since is None:
            return
        now, host = self._clock.now(), time.perf_counter()
        if self.part == DATA:
            self._data_s += host - self._since_host
        else:
            self._laps.append((self.part, self._since, now))
        self._since, self._since_host = now, host


@final
class Watch(Callback):
    """Let a fit settle, time some steps, record one step, and end the fit.

    Args:
        boundary: The file that runs the fit. Frames outside of it are not the user's.
        timed: Whether steps are timed.

    Attributes:
        batches: Copies of some batches, as the loader gave them.
        step: The record of the step, without the fields that only other fits can fill; `None` before a step was
            recorded.

    """

    def __init__(self, device: torch.device, boundary: str, *, timed: bool = True) -> None:
        self._where, self._boundary, self._timed = device, boundary, timed
        self._timer = PartTimer(device)
        self._phase: Literal["settling", "timed", "recorded", "done"] = "settling"
        self._num_batches = self._num_recorded = self._num_timed = self._batch_size = 0
        self._peak_bytes = self._others_bytes = self._gradient_bytes = self._state_bytes = self._num_skipped = 0
        self._began_s = 0.0
        self._loss: Tensor | None = None
        self._seconds: Mapping[str, float] = {}
        self._installed = ExitStack()
        self._recorder: Recorder | None = None
        self.batches: list[Any] = []
        self.loader: Any = None
        self.step: Step | None = None

    # -- parts ---------------------------------------------------------------------------------------------------------

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        def keep(batch: Any, dataloader_idx: int) -> None:
            if trainer.training:
                self._begin(REST)  # the loader has given its batch
                if len(self.batches) < _BATCHES_KEPT:
                    self.batches.append(copy_batch(batch))

        real = pl_module.training_step

        @functools.wraps(real)
        def training_step(*args: Any, **kwargs: Any) -> Any:
            self._timer.push(FORWARD)
            try:
                return real(*args, **kwargs)
            finally:
                self._timer.pop()

        self._installed.callback(keep_batches(trainer, pl_module, keep))
        self._installed.enter_context(mock.patch.object(pl_module, "training_step", training_step))
        for optimizer in trainer.optimizers:
            before = optimizer.register_step_pre_hook(lambda *_: self._timer.push(OPTIMIZER))
            after = optimizer.register_step_post_hook(lambda *_: self._timer.pop())
            self._installed.callback(before.remove)
            self._installed.callback(after.remove)
        if self._where.type == "cuda":
            own = num_bytes([*pl_module.parameters(), *pl_module.buffers()])
            self._others_bytes = torch.cuda.memory_allocated(self._where) - own  # what else this process holds there
        self._memory = PeakMemory(self._where, pl_module)
        self._installed.callback(self._memory.close)
        self._memory.resume()
        self._timer.push(_BETWEEN)

    def _begin(self, part: str) -> None:
        """Begin the part that lies around forward, backward and optimizer."""
        self._timer.pop()
        self._timer.push(part)

    @override
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        self._loss = loss.detach()
        self._timer.push(BACKWARD)

    @override
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._timer.pop()
        if self._recorder is not None:
            gradients = [parameter.grad for parameter in pl_module.parameters() if parameter.grad is not None]
            self._gradient_bytes = max(self._gradient_bytes, num_bytes(gradients))

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._begin(DATA)  # the loader starts after this hook

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._begin(_BETWEEN)

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._begin(_BETWEEN)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._begin(DATA)

    # -- steps ---------------------------------------------------------------------------------------------------------

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._batch_size = self._batch_size or num_rows(batch) or 0
        self._began_s = self._began_s or time.perf_counter()
        is_last = trainer.is_last_batch or (batch_idx + 1) % trainer.accumulate_grad_batches == 0
        if self._phase == "recorded" and (is_last or not pl_module.automatic_optimization):
            rules = getattr(trainer.precision_plugin, "fp32_modules", ())
            matched = modules_matching(pl_module, rules).values()
            kept = [inner for module in matched for inner in module.modules()]
            recorder = Recorder(pl_module, self._where, kept, lambda: self._timer.part, self._boundary)
            self._recorder = self._installed.enter_context(recorder)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._num_batches += 1
        elapsed = time.perf_counter() - self._began_s
        if self._recorder is not None:
            recorded = self._recorder.close()
            if self._num_recorded < _MOST_RECORDED and not any(o.part == BACKWARD for o in recorded.operations):
                self._num_recorded += 1  # a step without a loss
                self._recorder = None
            else:
                self._phase = "done"
        elif self._phase == "settling" and (self._num_batches >= _SETTLED or elapsed >= _TIMED_S[1]):
            gives_up = self._num_batches >= MOST_SETTLING or elapsed >= _SETTLING_S
            if gives_up or not is_settling(trainer):
                self._peak_bytes = (self._memory.close() or 0) - self._others_bytes
                states = (t for optimizer in trainer.optimizers for _, t in tensors_in(list(optimizer.state.values())))
                self._state_bytes = num_bytes(states)
                self._num_skipped = getattr(trainer.precision_plugin, "num_skipped", 0)
                self._phase = "timed" if self._timed and not is_settling(trainer) else "recorded"
                self._began_s = time.perf_counter()
                self._timer.start()
        elif self._phase == "timed":
            self._num_timed += 1
            enough = (self._num_timed >= _TIMED[0] and elapsed >= _TIMED_S[0]) or elapsed >= _TIMED_S[1]
            if enough or self._num_timed >= _TIMED[1]:
                self._seconds = self._timer.stop()
                self._phase = "recorded"
        self._begin(DATA)
        trainer.should_stop = self._phase == "done"  # even if the module sets another one

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.loader = trainer.train_dataloader
        if self._recorder is not None:
            self.step = self._record(self._recorder.close(), trainer, pl_module)
        self._installed.close()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._installed.close()

    def _record(self, recorded: Recording, trainer: Trainer, module: LightningModule) -> Step:
        """Return the measurements of this fit, while its optimizers and its loader still exist."""
        plugin = trainer.precision_plugin
        last = plugin.last_step if isinstance(plugin, AmpPrecision) else None
        loader, loading = self.loader, None
        if type(loader) is DataLoader:
            is_stream = isinstance(loader.dataset, IterableDataset)
            loading = Loading(loader.num_workers, loader.persistent_workers, is_stream=is_stream)
        weights = num_bytes([*module.parameters(), *module.buffers()])
        num_bad = getattr(plugin, "num_skipped", 0) - self._num_skipped
        bad_loss = self._loss is not None and not bool(torch.isfinite(self._loss).all())
        return Step(
            precision=last.precision if last is not None and last.precision else our_name(plugin.precision),
            batch_size=self._batch_size,
            num_parameters=sum(p.numel() for p in module.parameters()),
            parts={part: s / self._num_timed for part, s in self._seconds.items() if part != _BETWEEN},
            num_timed=self._num_timed,
            recorded=recorded,
            memory=Memory.of(self._peak_bytes, recorded, weights, self._gradient_bytes, self._state_bytes),
            optimizers=tuple(
                OptimizerFacts(
                    type(one).__name__, can_fuse(one), sum(p.numel() for g in one.param_groups for p in g["params"])
                )
                for one in trainer.optimizers
            ),
            loading=loading,
            num_seen=self._num_timed + self._num_recorded + 1,
            num_bad=max(num_bad, int(bad_loss)),
            bad_loss=bad_loss,
        )


def is_settling(trainer: Trainer) -> bool:
    """Return whether the last step was skipped, as while a loss scale falls. It waits for the device."""
    plugin = trainer.precision_plugin
    return isinstance(plugin, AmpPrecision) and plugin.last_step is not None and plugin.last_step.skipped


# -- fused=True --------------------------------------------------------------------------------------------------------


def can_fuse(optimizer: Any) -> bool:
    """Return whether this optimizer could use a fused kernel of torch but does not."""
    kinds = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
    groups = getattr(optimizer, "param_groups", ())
    if type(optimizer) not in kinds or _torch.is_fused(optimizer):
        return False
    if any(group.get("differentiable") or group.get("foreach") for group in groups):
        return False
    fused = _foreach_utils._get_fused_kernels_supported_devices()  # remove when torch has a public list
    devices = ["cpu"] if type(optimizer) is torch.optim.Adagrad else fused
    return all(p.is_floating_point() and p.device.type in devices for group in groups for p in group["params"])


def fuse(optimizer: torch.optim.Optimizer) -> None:
    """Make an optimizer that has not stepped yet anew; it stays the same object, because schedules refer to it."""
    groups: list[Any] = optimizer.param_groups
    for group in groups:
        group.update(fused=True, foreach=False)
    legal = inspect.signature(type(optimizer)).parameters
    settings = {**optimizer.defaults, "fused": True, "foreach": False}
    make: Any = type(optimizer).__init__
    make(optimizer, groups, **{name: value for name, value in settings.items() if name in legal})
