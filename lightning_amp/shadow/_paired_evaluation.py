"""Evaluate a copy of the module in fp32 during a real validation or test, on the same batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor
from typing_extensions import final

from lightning_amp._compat import _lightning, _modules, _sharding
from lightning_amp._compat._names import LightningModule, Trainer
from lightning_amp.findings import ModuleSums
from lightning_amp.shadow._batches import KeptBatch
from lightning_amp.shadow._evaluation_pass import EvaluationPass, Stage, follow_ddp_buffers
from lightning_amp.shadow._failures import Failure
from lightning_amp.shadow._fsdp import NotNowError
from lightning_amp.shadow._output_comparison import OutputComparison
from lightning_amp.shadow._ranks import OtherRankFailedError, gather, together
from lightning_amp.tracing import RandomState

_MOST_BATCHES = 8  # of each loader, kept for a search
_MOST_BYTES = 2**28  # for the kept batches of all loaders


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

    Attributes:
        stage: The stage.
        num_batches: The number of batches compared so far.
        notes: After :meth:`finish`, a sentence if the fp32 side left out casts to half precision.
        kept: Copies of the first batches of each loader; none if they cannot run again with the same weights.
        amp: After :meth:`finish`, the metrics by name.
        fp32: The same in fp32.
        modules: The compared outputs of modules, over all ranks.
        running: Whether the comparison runs on this rank; after :meth:`finish`, whether it ran on all ranks.
        failed_for_good: Whether it failed on any rank in a way that the next comparison would fail, too.

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
        self.running, self.failed_for_good, self.num_batches = True, False, 0
        self.amp, self.fp32 = dict[str, float](), dict[str, float]()
        self.modules, self.kept, self.notes = dict[str, ModuleSums](), list[KeptBatch](), list[str]()
        self._trainer, self._module, self._on_failure = trainer, module, on_failure
        self.stage: Stage = stage
        self._limit_batches = limit_batches
        self._available = trainer.num_test_batches if stage == "test" else trainer.num_val_batches
        self._fp32: EvaluationPass | None = None
        self._amp: EvaluationPass | None = None  # while it is `None`, the real module is the AMP side
        self._fatal = False
        self._loader_idx: int | None = None
        self._random_state: RandomState | None = None
        # the metrics of the loaders before the present one, and the versions of the parameters
        self._amp_metrics, self._versions = dict[str, Tensor](), list[int]()
        self._outputs = OutputComparison() if by_module else None
        self._watching = ExitStack()  # the watch, entered during a batch of the real module

    def run_batch(self, batch: Any, batch_idx: int) -> None:
        """Run one batch, before the real module does."""
        self.end_batch()
        loader_idx = _lightning.evaluation_loader_idx(self._trainer)
        if batch_idx >= self._num_batches(loader_idx):
            if self._amp is None:  # a copy goes on as the AMP side
                with self._observing():
                    self._amp = EvaluationPass(self._trainer, self._module, self.stage, "amp", self._amp_metrics)
            return
        with self._observing():
            if self._fp32 is None:
                self._fp32 = self._start()
            elif loader_idx != self._loader_idx:
                # The next loader's first `self.log` resets a value that was logged with `add_dataloader_idx=False`.
                self._amp_metrics.update(_lightning.evaluation_metrics(self._trainer))
            self._loader_idx = loader_idx
            self.num_batches += 1
            if batch_idx < _MOST_BATCHES:
                device_type = self._fp32.device_type
                kept = KeptBatch.keep(batch, batch_idx, device_type, copy=True, loader_idx=loader_idx)
                if not batch_idx or sum(one.num_bytes for one in [kept, *self.kept]) <= _MOST_BYTES:
                    self.kept.append(kept)
            outputs = self._outputs
            self._fp32.step(batch, batch_idx, loader_idx, outputs and outputs.recording(self._fp32.module))
            if self._amp is not None:
                self._amp.step(batch, batch_idx, loader_idx, outputs and outputs.comparing(self._amp.module))
            elif outputs is not None:
                self._watching.enter_context(outputs.comparing(self._module))

    def end_batch(self) -> None:
        """Stop watching the real module after its step."""
        self._watching.close()

    def remember_random_state(self) -> None:
        """Remember the random generators before the epoch-end hook of the real module."""
        self._random_state = RandomState.capture(self._trainer.strategy.root_device.type)

    def finish(self) -> bool:
        """Compute the results, after all hooks of the real evaluation; `False` if a rank failed.

        All ranks must call this. This waits for the device.
        """
        self.end_batch()
        if self._fp32 is not None:
            with self._observing():
                is_changed = self._versions != self._parameter_versions(self._fp32)
                if self._trainer.strategy.reduce_boolean_decision(is_changed, all=False):  # as averaged weights do
                    self.kept.clear()
                fp32, self.notes = self._fp32.finish(self._random_state), self._fp32.notes
                if self._amp is None:
                    amp = {**self._amp_metrics, **_lightning.evaluation_metrics(self._trainer)}
                else:
                    amp = self._amp.finish(self._random_state)
                self.amp, self.fp32 = ({n: float(v) for n, v in side.items()} for side in (amp, fp32))
        states = gather(self._trainer, (self._fp32 is not None, self._fatal))
        self.running, self.failed_for_good = all(runs for runs, _ in states), any(fatal for _, fatal in states)
        self.close()
        if self.running and self._outputs is not None:
            self.modules = self._outputs.sums_of_all_ranks(self._trainer)
        return self.running

    def close(self) -> None:
        """Free the shadows."""
        self.end_batch()
        for one in (self._fp32, self._amp):
            if one is not None:
                one.close()
        self._fp32 = self._amp = None

    def _start(self) -> EvaluationPass:
        # The copy is made at the first batch and not earlier, when the epoch-start hooks of all callbacks and the
        # module have run. These hooks swap averaged weights in, and set attributes for the epoch.
        fp32 = EvaluationPass(self._trainer, self._module, self.stage, "fp32")
        self._versions = self._parameter_versions(fp32)
        follow_ddp_buffers(self._trainer, fp32.module)
        return fp32

    def _parameter_versions(self, fp32: EvaluationPass) -> list[int]:
        with fp32.active():  # a sharded module has its shards there, also after a forward
            # A `DTensor` counts its own changes; its local part counts those that code makes on that part.
            pairs = [(parameter, _sharding.local(parameter)) for parameter in self._module.parameters()]
            return [_modules.version(one) for pair in pairs for one in pair]

    def _num_batches(self, loader_idx: int | None) -> float:
        limit = self._limit_batches
        if not isinstance(limit, float):
            return math.inf if limit is None else limit
        num_batches = max(self._available) if loader_idx is None else self._available[loader_idx]
        if math.isinf(num_batches) and limit < 1.0:
            raise ValueError(f"`limit_batches` needs loaders with a length, got {limit!r}. Give the number of batches")
        return num_batches if limit == 1.0 else max(1, int(num_batches * limit))

    @contextmanager
    def _observing(self) -> Generator[None]:
        try:
            with together(self._trainer):
                yield
        except Exception as error:
            self.close()
            self.running = False
            failure = Failure.of(
                error, f"the module's {self.stage}", f"the fp32 pass of epoch {self._trainer.current_epoch}"
            )
            self._fatal = not (failure.out_of_memory or isinstance(error, (OtherRankFailedError, NotNowError)))
            if isinstance(error, OtherRankFailedError):
                return
            then = ": this comparison is dropped, training goes on, and the next comparison tries again"
            if self._fatal:
                then = ". Comparisons are off for the rest of this run, training goes on"
            if failure.out_of_memory:
                then += f". A smaller {self.stage} batch needs less"
            self._on_failure(failure._replace(text=failure.text + then))
