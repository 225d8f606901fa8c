"""Evaluate a copy of the module in fp32 during a real validation or test, on the same batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from typing_extensions import final

from lightning_amp._compat import _lightning, _modules, _sharding
from lightning_amp.findings import ModuleRow
from lightning_amp.shadow._evaluation_pass import EvaluationPass, Stage, follow_ddp_buffers
from lightning_amp.shadow._failures import Failure
from lightning_amp.shadow._first_batches import FirstBatches
from lightning_amp.shadow._fsdp1 import NotNowError
from lightning_amp.shadow._output_comparison import OutputComparison, OutputTotals
from lightning_amp.shadow._ranks import OtherRankFailedError, gather, together
from lightning_amp.shadow._surroundings import is_sharded
from lightning_amp.tracing import RandomState

_WEIGHTS_GONE = (
    "the weights changed before the end of the evaluation, as averaged weights do, so that the batches could not be run"
    " again: no rank keeps a copy of sharded weights"
)


@final
@dataclass(frozen=True, slots=True)
class ComparedEvaluation:
    """The results of one compared validation or test."""

    stage: Stage
    amp: dict[str, float]  # metrics by name
    fp32: dict[str, float]
    module_rows: list[ModuleRow]  # the compared outputs of modules, over all ranks
    unseen: list[str]  # names of modules that could not be watched because they are compiled
    batches: FirstBatches  # data for a search of the cause
    weights: list[Tensor] | None  # the parameters during the evaluation, if they are different at its end


@final
class PairedEvaluation:
    """Runs the fp32 side of one validation or test. The real module is the AMP side.

    With `limit_batches` the real module is the AMP side up to the limit. Then a copy of it takes over, and runs the
    batches of later loaders.

    An exception in a copy ends this comparison; it does not reach the real evaluation.

    Args:
        trainer: The trainer, at the start of its evaluation loop.
        module: The real module.
        stage: The stage whose step and hooks run.
        limit_batches: See `MetricComparison`.
        on_failure: Called on the rank where the comparison failed.
        by_module: Whether to also compare the outputs of modules.

    """

    def __init__(
        self,
        trainer: Trainer,
        module: LightningModule,
        stage: Stage,
        limit_batches: int | float | None,
        on_failure: Callable[[Failure], None],
        *,
        by_module: bool = False,
    ) -> None:
        self.running = True  # whether the comparison runs, on all ranks
        self.failed_for_good = False  # whether it failed on any rank in a way that the next comparison would fail, too
        self._trainer, self._module, self._on_failure = trainer, module, on_failure
        self._stage: Stage = stage
        self._limit_batches = limit_batches
        self._available = trainer.num_test_batches if stage == "test" else trainer.num_val_batches
        self._fp32: EvaluationPass | None = None
        self._amp: EvaluationPass | None = None  # while it is `None`, the real module is the AMP side
        self._failed = self._fatal = self._started = False
        self._loader_idx: int | None = None
        self._random_state: RandomState | None = None
        self._amp_metrics: dict[str, Tensor] = {}  # metrics of the loaders before the present one
        self._versions: list[int] = []
        self._batches = FirstBatches(trainer.strategy.root_device.type, len(self._available))
        self._totals = OutputTotals() if by_module else None
        self._outputs = OutputComparison()
        self._unseen: list[str] = []
        self._watching = ExitStack()  # the watch, entered during a batch of the real module
        self._is_noted = True

    def run_batch(self, batch: Any, batch_idx: int) -> None:
        """Run one batch, before the real module does."""
        self.end_batch()
        self._note_sums()
        loader_idx = _lightning.evaluation_loader_idx(self._trainer)
        if batch_idx >= self._num_batches(loader_idx):
            self._leave_rest_out()
            return
        if not self._started:
            self._start()
        elif loader_idx != self._loader_idx:
            self._agree()  # the end of a loader reduces metrics over the ranks
            # The first `self.log` of the next loader resets a value that was logged with `add_dataloader_idx=False`.
            self._amp_metrics.update(_lightning.evaluation_metrics(self._trainer))
        self._loader_idx = loader_idx
        with self._observing():
            self._batches.add(batch, batch_idx, loader_idx)
            self._is_noted = False
            self._run_shadows(batch, batch_idx, loader_idx)

    def _run_shadows(self, batch: Any, batch_idx: int, loader_idx: int | None) -> None:
        if self._fp32 is None:
            return
        by_module, outputs = self._totals is not None, self._outputs
        self._fp32.step(batch, batch_idx, loader_idx, outputs.recording(self._fp32.module) if by_module else None)
        if self._amp is not None:
            self._amp.step(batch, batch_idx, loader_idx, outputs.comparing(self._amp.module) if by_module else None)
            self.end_batch()
        elif by_module:
            self._watching.enter_context(outputs.comparing(self._module))

    def end_batch(self) -> None:
        """Stop watching the real module after its step."""
        self._watching.close()
        if self._totals is not None:
            self._totals.add(self._outputs)
            self._unseen = self._outputs.unseen or self._unseen
            self._outputs.forget()

    def _note_sums(self) -> None:
        if not self._is_noted and self._fp32 is not None:
            self._batches.note_sums(self._trainer if self._amp is None else self._amp.view, self._fp32.view)
        self._is_noted = True

    def remember_random_state(self) -> None:
        """Remember the random generators before the epoch-end hook of the real module."""
        self._random_state = RandomState.capture(self._trainer.strategy.root_device.type)

    def finish(self) -> ComparedEvaluation | None:
        """Return the results, after all hooks of the real evaluation; `None` if a rank failed.

        All ranks must call this. This waits for the device.
        """
        self.end_batch()
        self._note_sums()
        self._agree()
        sides: tuple[dict[str, float], dict[str, float]] | None = None
        weights: list[Tensor] | None = None
        if self._fp32 is not None:
            with self._observing():
                is_changed = self._versions != self._parameter_versions(self._fp32)
                if is_sharded(self._trainer):
                    # Code may change the shard of one rank only, and all ranks must run the same batches again.
                    if self._trainer.strategy.reduce_boolean_decision(is_changed, all=False):
                        self._batches.forget(_WEIGHTS_GONE)
                elif is_changed:
                    weights = [parameter.detach().clone() for parameter in self._fp32.module.parameters()]
                fp32 = self._fp32.finish(self._random_state)
                if self._amp is None:
                    amp = {**self._amp_metrics, **_lightning.evaluation_metrics(self._trainer)}
                else:
                    amp = self._amp.finish(self._random_state)
                sides = _as_floats(amp), _as_floats(fp32)
            self._agree()
        self.close()
        if sides is None or not self.running:
            return None
        rows = [] if self._totals is None else self._totals.rows(self._trainer)
        return ComparedEvaluation(self._stage, *sides, rows, self._unseen, self._batches, weights)

    def close(self) -> None:
        """Free the shadows."""
        self.end_batch()
        for one in (self._fp32, self._amp):
            if one is not None:
                one.close()
        self._fp32 = self._amp = None

    def _start(self) -> None:
        # The copy is made at the first batch and not earlier, when the epoch-start hooks of all callbacks and the
        # module have run. These hooks swap averaged weights in, and set attributes for the epoch.
        self._started = True
        with self._observing():
            self._fp32 = EvaluationPass.in_fp32(self._trainer, self._module, self._stage)
            self._versions = self._parameter_versions(self._fp32)
        if isinstance(self._trainer.strategy, DDPStrategy) and self._agree():
            follow_ddp_buffers(self._trainer, self._fp32.module)

    def _parameter_versions(self, fp32: EvaluationPass) -> list[int]:
        with fp32.active():  # a sharded module has its shards there, also after a forward
            # A `DTensor` counts its own changes; its local part counts those that code makes on that part.
            pairs = [(parameter, _sharding.local(parameter)) for parameter in self._module.parameters()]
            return [_modules.version(one) for pair in pairs for one in pair]

    def _leave_rest_out(self) -> None:
        """Continue with a copy of the module as the AMP side, as the real module runs batches beyond the limit."""
        if self._amp is not None or self._failed:
            return
        with self._observing():
            self._amp = EvaluationPass.in_amp(self._trainer, self._module, self._stage, self._amp_metrics)

    def _num_batches(self, loader_idx: int | None) -> float:
        limit = self._limit_batches
        if limit is None or isinstance(limit, int):
            return math.inf if limit is None else limit
        num_batches = max(self._available) if loader_idx is None else self._available[loader_idx]
        if math.isinf(num_batches) and limit < 1.0:
            raise ValueError(
                f"`limit_batches` as a share of the batches needs loaders with a length, got {limit!r} and a loader"
                " without. Give the number of batches"
            )
        return num_batches if limit == 1.0 else max(1, int(num_batches * limit))

    @contextmanager
    def _observing(self) -> Generator[None]:
        try:
            with together(self._trainer):
                yield
        except Exception as error:
            self.close()
            self._failed = True
            place = f"the fp32 pass of epoch {self._trainer.current_epoch}"
            failure = Failure.of(error, f"the module's {self._stage}", place)
            passes = isinstance(error, (OtherRankFailedError, NotNowError))
            self._fatal = not (failure.out_of_memory or passes)
            if isinstance(error, OtherRankFailedError):
                return
            then = (
                ". Comparisons are off for the rest of this run, training goes on"
                if self._fatal
                else ": this comparison is dropped, training goes on, and the next comparison tries again"
            )
            if failure.out_of_memory:
                then += f". A smaller {self._stage} batch needs less"
            self._on_failure(failure._replace(text=failure.text + then))

    def _agree(self) -> bool:
        """Return whether all ranks can continue.

        They stop together, because the next operations reduce over the ranks.
        """
        states = gather(self._trainer, (self._fp32 is not None, self._fatal)) if self.running else []
        if not all(runs for runs, _ in states):
            self.running = False
            self.failed_for_good = any(fatal for _, fatal in states)
            self.close()
        return self.running


def _as_floats(metrics: Mapping[str, Tensor]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items()}
