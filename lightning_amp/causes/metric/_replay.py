"""Run some batches of an evaluation again on a shadow of the module, in AMP, in fp32, or with other settings."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from typing import Any, NamedTuple

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from typing_extensions import final

from lightning_amp._compat import _modules
from lightning_amp.casting import Fp32Modules
from lightning_amp.shadow import (
    EVALUATION_FILE,
    ComparedEvaluation,
    EvaluationPass,
    KeptBatch,
    OutputComparison,
    Stage,
)
from lightning_amp.tracing import OperationWatch, paired_random

Watch = Callable[[LightningModule], AbstractContextManager[Any]]


@final
class Replayed(NamedTuple):
    """The result of running some batches."""

    value: float | None  # the metric; `None` if it was not logged
    held: dict[str, Tensor]  # tensors of the shadow after the last of several batches


@final
class EvaluationReplay:
    """Runs batches of a finished, compared evaluation again, each time on a new shadow, and reads one metric."""

    def __init__(self, trainer: Trainer, module: LightningModule, compared: ComparedEvaluation, metric: str) -> None:
        self._trainer, self.module = trainer, module
        self.stage: Stage = compared.stage
        self._metric, self._weights = metric, compared.weights
        self._device_type = trainer.strategy.root_device.type

    @property
    def trainer(self) -> Trainer:
        """Return the real trainer."""
        return self._trainer

    def in_fp32(self, steps: Sequence[KeptBatch], watch: Watch | None = None, *, upcast: bool = True) -> Replayed:
        """Run batches in fp32; without `upcast`, as `eval_precision="fp32"` would."""
        return self._run(EvaluationPass.in_fp32(self._trainer, self.module, self.stage, upcast=upcast), steps, watch)

    def in_amp(
        self,
        steps: Sequence[KeptBatch],
        watch: Watch | None = None,
        rules: Sequence[str] = (),
        *,
        upcast: bool = False,
    ) -> Replayed:
        """Run batches in AMP, with the modules of `rules` in fp32, or with half-precision weights and buffers upcast.

        Raises:
            ValueError: If a module of `rules` has half-precision parameters.

        """
        one = EvaluationPass.in_amp(self._trainer, self.module, self.stage, upcast=upcast)
        return self._run(one, steps, watch, rules)

    def operations(self, steps: Sequence[KeptBatch]) -> tuple[OperationWatch, OperationWatch]:
        """Run batches in fp32 and in AMP, and return the operations of both runs. This waits for the device."""
        names = OutputComparison()
        fp32 = OperationWatch(None, EVALUATION_FILE, running=names.running)
        self.in_fp32(steps, _both(names, fp32))
        amp = OperationWatch(None, EVALUATION_FILE, running=names.running, reference=fp32)
        self.in_amp(steps, _both(names, amp))
        return fp32, amp

    def _run(
        self, one: EvaluationPass, steps: Sequence[KeptBatch], watch: Watch | None, rules: Sequence[str] = ()
    ) -> Replayed:
        with closing(one), one.active():
            if self._weights is not None:
                one.take_parameters(self._weights)
            if rules:
                Fp32Modules(one.module, rules, self._device_type, active=True)
            one.start_afresh()
            for step in steps:
                with paired_random(self._device_type, step.random_state):
                    one.step(step.batch, step.batch_idx, step.loader_idx, watch(one.module) if watch else None)
            held = _state(one.module) if len(steps) > 1 else {}
            try:
                metrics = one.finish(steps[-1].random_state if steps else None, follow=False)
            except Exception:  # some epoch-end hooks fail with a single batch
                metrics = one.metrics
            value = metrics.get(self._metric)
            return Replayed(None if value is None else float(value), held)


def _both(names: OutputComparison, operations: OperationWatch) -> Watch:
    @contextmanager
    def watch(module: LightningModule) -> Generator[None]:
        with names.naming(module), operations:
            yield

    return watch


def _state(module: nn.Module) -> dict[str, Tensor]:
    """Return copies of the tensors that a step may add to: buffers, and tensors in attributes."""
    state: dict[str, Tensor] = {}
    for prefix, part in module.named_modules():
        for key, value in [*part.named_buffers(recurse=False), *vars(part).items()]:
            if isinstance(value, Tensor) and value.is_floating_point() and value.numel():
                state[_modules.plain_name(f"{prefix}.{key}" if prefix else key)] = value.detach().clone()
    return state
