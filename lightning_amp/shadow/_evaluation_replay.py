"""Some batches of an evaluation, run again on a shadow, as they ran or in another way."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from typing_extensions import final

from lightning_amp.casting import Fp32Modules
from lightning_amp.shadow import _evaluation_pass
from lightning_amp.shadow._evaluation_blame import half_precision_state
from lightning_amp.shadow._evaluation_pass import EvaluationPass, Stage
from lightning_amp.shadow._first_batches import FirstBatch
from lightning_amp.shadow._output_comparison import OutputComparison
from lightning_amp.tracing import OperationWatch, paired_random

Watch = Callable[[LightningModule], AbstractContextManager[Any]]


@final
class EvaluationReplay:
    """Runs batches again, each time on a shadow of its own, and reads one metric.

    Args:
        trainer: At the end of its evaluation.
        module: The real module.
        stage: Of the evaluation.
        metric: Its name in `trainer.callback_metrics`.
        weights: What the parameters were when the batches ran; `None`: what they are.

    Attributes:
        held_in_half: What the shadow of the last run held in half precision after its last batch.

    """

    def __init__(
        self, trainer: Trainer, module: LightningModule, stage: Stage, metric: str, weights: Sequence[Tensor] | None
    ) -> None:
        self.held_in_half: dict[str, Tensor] = {}
        self._trainer, self._module = trainer, module
        self._stage: Stage = stage
        self._metric, self._weights = metric, weights
        self._device_type = trainer.strategy.root_device.type

    def in_fp32(self, steps: Sequence[FirstBatch], watch: Watch | None = None, *, upcast: bool = True) -> float | None:
        """Run them in fp32; without `upcast` as `eval_precision="fp32"` would. Return the metric, if it is logged."""
        one = EvaluationPass.in_fp32(self._trainer, self._module, self._stage, upcast=upcast)
        return self._run(one, steps, watch, ())

    def in_amp(
        self,
        steps: Sequence[FirstBatch],
        watch: Watch | None = None,
        rules: Sequence[str] = (),
        *,
        upcast: bool = False,
    ) -> float | None:
        """Run them as they ran, with these modules in fp32, or with half-precision weights and buffers upcast.

        Raises:
            ValueError: If a module among these has half-precision parameters.

        """
        one = EvaluationPass.in_amp(self._trainer, self._module, self._stage, upcast=upcast)
        return self._run(one, steps, watch, rules)

    def _run(
        self, one: EvaluationPass, steps: Sequence[FirstBatch], watch: Watch | None, rules: Sequence[str]
    ) -> float | None:
        try:
            if self._weights is not None:
                one.take_parameters(self._weights)
            if rules:
                Fp32Modules(one.module, rules, self._device_type, active=True)
            one.start_afresh()
            for step in steps:
                with paired_random(self._device_type, step.random_state):
                    one.step(step.batch, step.batch_idx, step.loader_idx, watch(one.module) if watch else None)
            self.held_in_half = half_precision_state(one.module) if len(steps) > 1 else {}
            try:
                metrics = one.finish(steps[-1].random_state if steps else None, follow=False)
            except Exception:  # some need more than one batch
                metrics = one.metrics
            value = metrics.get(self._metric)
            return None if value is None else float(value)
        finally:
            one.close()

    def operations(self, steps: Sequence[FirstBatch]) -> tuple[OperationWatch, OperationWatch]:
        """Run them in fp32 and in AMP, and return the operations of both. Waits for the device."""
        names, boundary = OutputComparison(), str(_evaluation_pass.__file__)
        fp32 = OperationWatch(None, boundary, running=names.running)
        self.in_fp32(steps, _both(names, fp32))
        amp = OperationWatch(None, boundary, running=names.running, reference=fp32)
        self.in_amp(steps, _both(names, amp))
        return fp32, amp


def _both(names: OutputComparison, operations: OperationWatch) -> Watch:
    @contextmanager
    def watch(module: LightningModule) -> Generator[None]:
        with names.naming(module), operations:
            yield

    return watch
