"""The batches that a failed step was made of, and their replay."""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from typing_extensions import final

from lightning_amp._compat import _modules
from lightning_amp._containers import tensors_in
from lightning_amp.numerics import HALF_DTYPES, nonfinite_gradients
from lightning_amp.shadow._failures import Failure
from lightning_amp.shadow._module_copy import copy_batch
from lightning_amp.shadow._ranks import gather
from lightning_amp.shadow._training_pass import TrainingPass
from lightning_amp.tracing import Diagnosis, GradientPlace, RandomState, Trace, diagnose, full_precision, make_bundle

_WINDOW_BYTES = 2**28
"""What the batches of an accumulation window may take in memory; of a larger one the first are forgotten."""


@final
@dataclass(slots=True)
class KeptBatch:
    """A batch, and the random generators before its step."""

    batch: Any
    batch_idx: int
    random_state: RandomState
    versions: list[tuple[Tensor, int]]
    num_bytes: int
    edited: bool = False

    def detect_edits(self, was_copied: bool) -> bool:
        """Return whether its step, which has run, changed it in place."""
        changed = any(_modules.version(tensor) != version for tensor, version in self.versions)
        self.edited = changed and not was_copied
        self.versions = []
        return changed


@final
class BatchWindow:
    """The batches since the last attempted step.

    Keeps references. Once a batch was found to be edited in place by its step, copies.
    """

    def __init__(self) -> None:
        self.kept: deque[KeptBatch] = deque()
        self._first: int | None = None
        self._num_bytes = 0
        self._must_copy = False

    def __bool__(self) -> bool:
        return bool(self.kept)

    @property
    def span(self) -> tuple[int, int]:
        """Return the indices of the first and the last batch, kept or not."""
        last = self.kept[-1].batch_idx
        return (last if self._first is None else self._first), last

    def add(self, batch: Any, batch_idx: int, device_type: str) -> None:
        """Keep a batch on which a step is about to run."""
        tensors = [tensor for _, tensor in tensors_in(batch)]
        num_bytes = sum(t.numel() * t.element_size() for t in tensors)
        versions = [(t, _modules.version(t)) for t in tensors if not t.is_inference()]
        kept = copy_batch(batch) if self._must_copy else batch
        if self._first is None:
            self._first = batch_idx
        self.kept.append(KeptBatch(kept, batch_idx, RandomState.capture(device_type), versions, num_bytes))
        self._num_bytes += num_bytes
        while self._num_bytes > _WINDOW_BYTES and len(self.kept) > 1:
            self._num_bytes -= self.kept.popleft().num_bytes

    def detect_edits(self) -> None:
        """Look whether the step on the last batch, which has run, changed it in place."""
        if self.kept and self.kept[-1].detect_edits(was_copied=self._must_copy):
            self._must_copy = True

    def clear(self) -> None:
        """Forget the batches: a step was attempted."""
        self.kept.clear()
        self._first, self._num_bytes = None, 0


@final
@dataclass(frozen=True, slots=True)
class Finding:
    """What the replay of a window showed."""

    diagnosis: Diagnosis
    batch_idx: int
    num_replayed: int
    parameters: tuple[str, ...] = ()
    note: str = ""
    step: KeptBatch | None = None
    largest_gradient: float | None = None


def find(trainer: Trainer, module: LightningModule, window: BatchWindow, scale: float, precision: str = "") -> Finding:
    """Run the batches of the window again until one is not finite. Never raises, changes nothing.

    All ranks must call. They run as many passes, whatever each of them finds: a step may talk to the other ranks
    (`self.all_gather`, SyncBatchNorm).

    Args:
        trainer: The trainer.
        module: What it trains.
        window: The batches.
        scale: That the step was taken at.
        precision: That it was taken in, by our name; the plugin may have gone on in another. Empty: as of now.

    """
    steps = list(window.kept)
    steps = steps[-min(gather(trainer, len(steps))) :]
    search = _Search(trainer, module, scale, precision, steps[-1])
    search.run(steps)
    note = "; ".join(filter(None, (_edited(steps[-1]), search.unseen)))
    return search.finding or Finding(Diagnosis("none"), steps[-1].batch_idx, len(steps), note=note, step=steps[-1])


@final
class _Search:
    """One replay of a window, on all ranks in step."""

    def __init__(
        self, trainer: Trainer, module: LightningModule, scale: float, precision: str, last: KeptBatch
    ) -> None:
        self.finding: Finding | None = None
        self._trainer, self._module, self._loss_scale = trainer, module, scale
        self._precision = precision
        self._step, self._number = last, 0
        self._replay: TrainingPass | None = None
        self._is_new = False
        self._unseen: list[str] = []
        self._half_places: set[GradientPlace] = set()

    @property
    def unseen(self) -> str:
        """Say what cannot be looked into."""
        names = ", ".join(f"`{name}`" for name in self._unseen[:3]) + (", ..." if len(self._unseen) > 3 else "")
        return names and f"{names} is compiled by TorchScript, which cannot be looked into"

    def run(self, steps: list[KeptBatch]) -> None:
        """Run the steps until all ranks have found something, or one cannot go on."""
        try:
            if not self._all(self._begin):
                return
            for self._number, self._step in enumerate(steps, start=1):
                if not self._all(self._run_step):
                    return
                if self._any(self._wants_measure) and not self._all(self._measure):
                    return
                if not self._any(self.finding is None):
                    return
        finally:
            if self._replay is not None:
                self._replay.close()

    def _all(self, work: Callable[[], None]) -> bool:
        """Return whether `work` worked on all ranks."""
        failed = False
        try:
            work()
        except Exception as error:
            failed, failure = True, Failure.of(error, "the training step", "the replay")
            if self.finding is None:
                done = max(self._number - 1, 0)
                note = failure.text
                if failure.out_of_memory:
                    note += ": there is no cause to report. A smaller batch needs less"
                self.finding = Finding(Diagnosis("none"), self._step.batch_idx, done, note=note, step=self._step)
            elif self._is_new:  # the cause is known, only how large the true gradient is is not
                missing = f"the true gradients could not be measured in fp32 ({failure.reason})"
                note = "; ".join(filter(None, (self.finding.note, missing)))
                self.finding = replace(self.finding, note=note)
        return not self._any(failed)

    def _any(self, flag: bool) -> bool:
        return any(gather(self._trainer, flag))

    @property
    def _wants_measure(self) -> bool:
        return self._is_new and self.finding is not None and self.finding.diagnosis.cause == "backward"

    def _begin(self) -> None:
        self._replay = TrainingPass(self._trainer, self._module, precision=self._precision)

    def _run_step(self) -> None:
        assert self._replay is not None
        self._is_new = False
        found, parameters, trace = _run(self._trainer, self._replay, self._step, self._loss_scale)
        self._unseen, self._half_places = trace.unseen, trace.half_places
        self._replay.forget_gradients()
        if found.cause != "none" and self.finding is None:
            self._is_new = True
            step = self._step
            note = "; ".join(filter(None, (_edited(step), self.unseen)))
            self.finding = Finding(found, step.batch_idx, self._number, parameters, note, step)

    def _measure(self) -> None:
        assert self._replay is not None
        exact = self._replay
        if any(parameter.dtype in HALF_DTYPES for parameter in self._module.parameters()):
            exact = TrainingPass(self._trainer, self._module, upcast=True)
        try:
            largest = _largest_true_gradient(self._trainer, exact, self._step, self._half_places)
        finally:
            exact.forget_gradients()
            if exact is not self._replay:
                exact.close()
        if self._wants_measure and self.finding is not None:
            self.finding = replace(self.finding, largest_gradient=largest)


def _run(
    trainer: Trainer, replay: TrainingPass, step: KeptBatch, scale: float
) -> tuple[Diagnosis, tuple[str, ...], Trace]:
    with Trace(replay.module) as trace:
        loss = replay.run(
            step.batch,
            step.batch_idx,
            context=replay.forward_context(),
            random_state=step.random_state,
            scale=scale,
            trace=trace,
        )
    found = diagnose(trace, loss, step.batch)
    parameters = nonfinite_gradients(_modules.plain_parameters(replay.module)) if found.cause != "none" else ()
    return found, parameters, trace


def _largest_true_gradient(
    trainer: Trainer, replay: TrainingPass, step: KeptBatch, half_places: set[GradientPlace]
) -> float:
    """Measure it in fp32, over parameters and outputs of modules: it tells which scale would have been low enough."""
    context = full_precision(trainer.strategy.root_device.type)
    batch = copy_batch(step.batch, upcast=True)
    with Trace(replay.module, values=False) as trace:
        replay.run(batch, step.batch_idx, context=context, random_state=step.random_state, trace=trace)
    return float(torch.stack([arrival.largest for arrival in trace.gradients_in_half(half_places)]).max())


def packed_step(
    trainer: Trainer, module: LightningModule, step: KeptBatch, scale: float, report: dict[str, Any]
) -> bytes:
    """Pack what rank 0 does not have of the bundle for `lightning_amp.tracing.replay`: all but the parameters."""
    parameters = dict(module.named_parameters())
    bundle = make_bundle(
        module_state={name: value for name, value in module.state_dict().items() if name not in parameters},
        batch=step.batch,
        batch_idx=step.batch_idx,
        random_state=step.random_state,
        scale=scale,
        loss_divisor=float(trainer.accumulate_grad_batches) if module.automatic_optimization else 1.0,
        report=_plain(report),
    )
    file = io.BytesIO()
    torch.save(bundle, file)
    return file.getvalue()


def unpacked_step(packed: bytes, module: LightningModule) -> dict[str, Any]:
    """Return the whole bundle, with the parameters of this rank, which are those of all."""
    bundle = torch.load(io.BytesIO(packed), weights_only=False)
    state = {name: value for name, value in module.state_dict().items() if name not in bundle["module_state"]}
    state = {name: value.detach().cpu() for name, value in state.items()}
    return {**bundle, "module_state": {**state, **bundle["module_state"]}}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def _edited(step: KeptBatch) -> str:
    if not step.edited:
        return ""
    return (
        "the step edited its batch in place, so that the replay saw an edited one; from the next batch on it is copied"
    )
