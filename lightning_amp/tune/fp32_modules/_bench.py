"""Compare steps of one module with fp32: gradients, validation metrics and time, with any modules in fp32."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from typing_extensions import final

from lightning_amp._compat import _lightning, _modules
from lightning_amp.casting import Fp32Modules, modules_matching
from lightning_amp.measure import DeviceClock, in_rounds
from lightning_amp.numerics import all_finite, fidelity_sums, fitting_scale, largest
from lightning_amp.precision import AmpPrecision
from lightning_amp.shadow import EvaluationPass, TrainingPass, in_one_line, is_out_of_memory
from lightning_amp.tracing import RandomState
from lightning_amp.tune.fp32_modules._modules import Watch, make_tree, names_of, suspicion
from lightning_amp.tune.fp32_modules._result import DistanceToFp32, NothingHelps, relative_error
from lightning_amp.tune.fp32_modules._search import Tree

_LOWEST_SCALE = 2.0**-14
_AXES = {"step", "epoch"}
"""Names that Lightning uses as the axes of plots if a user logs them."""
_AT_LEAST_S, _AT_MOST_S = 0.3, 3.0


@final
class Point(NamedTuple):
    """A batch of training, and the states of the module and of the random generators before it."""

    step: int
    batch: Any
    batch_idx: int
    weights: dict[str, Tensor]
    training: dict[str, bool]
    random_state: RandomState


@final
class _Reference(NamedTuple):
    """The gradients of a step in fp32, and the loss scale with which they fit into half precision."""

    point: Point
    gradients: dict[str, Tensor]
    scale: float


@final
class Bench:
    """Compares steps of a module with the same steps in fp32. Neither the module nor the trainer is changed.

    Args:
        trainer: The trainer of a fit, inside an epoch of training or validation.
        module: The real module.
        plugin: The trainer's plugin, which has the precision to compare.
        points: Steps of training, one or more.
        batches: Batches of validation on the device, each with its index and the index of its loader (`None` if there
            is one loader).

    Raises:
        NothingHelps: If fp32 itself is not finite.

    """

    def __init__(
        self,
        trainer: Trainer,
        module: LightningModule,
        plugin: AmpPrecision,
        points: Sequence[Point],
        batches: Sequence[tuple[Any, int, int | None]],
    ) -> None:
        self._trainer, self._module, self._plugin = trainer, module, plugin
        self.points, self.batches = points, batches
        self._place = trainer.strategy.root_device
        watches = [Watch() for _ in points]  # some modules do not run in every step
        self._references = [self._reference(point, watch) for point, watch in zip(points, watches, strict=True)]
        evaluation = Watch()
        self._metrics = self._reference_metrics(evaluation) if batches else {}
        for watch in (*watches[1:], evaluation):
            watch.forget()
        self._watch = watches[0]  # the outputs of this step are kept for `suspicion`
        self._called = {name for watch in (*watches, evaluation) for name in watch.called}

    # -- fp32 ----------------------------------------------------------------------------------------------------------

    def _reference(self, point: Point, watch: Watch) -> _Reference:
        with self._training(point, upcast=True) as one, watch.on(one.module):
            loss = self._run(one, point, None, 1.0)
            found = one.gradients()
        where = f"batch {point.step} of training"
        if loss is not None and not math.isfinite(float(loss)):
            raise NothingHelps(_not_finite("the loss", f"{float(loss)}", where, _LOCATE))
        bad = [name for name, gradient in found.items() if not bool(all_finite([gradient]))]
        if bad:
            more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
            raise NothingHelps(_not_finite(f"the gradient of `{bad[0]}`{more}", "infinite or NaN", where, _LOCATE))
        top = max((float(largest(gradient)) for gradient in found.values()), default=0.0)
        return _Reference(point, found, fitting_scale(top) if self._plugin.scaler is not None else 1.0)

    def repeats_itself(self) -> float:
        """Run the step in fp32 again, and return the relative change of its gradient: 0 if it is reproducible."""
        point, before, _ = self._references[0]
        with self._training(point, upcast=True) as one:
            self._run(one, point, None, 1.0)
            return _relative_difference(before, one.gradients())

    def _reference_metrics(self, watch: Watch) -> dict[str, float]:
        one = EvaluationPass.in_fp32(self._trainer, self._module, "validation")
        metrics = self._evaluate(one, watch=watch.on(one.module))
        for name, value in metrics.items():
            if not math.isfinite(value):
                where = f"validation with {len(self.batches)} of its batches"
                raise NothingHelps(_not_finite(f"the metric `{name}`", str(value), where, _DO_NOT_LOG))
        return metrics

    # -- the modules ---------------------------------------------------------------------------------------------------

    def tree(self) -> Tree:
        """Return the tree of the modules that run in these steps and are not matched by the plugin's rules."""
        matched = modules_matching(self._module, self._plugin.fp32_modules).values()
        in_fp32 = {inside for module in matched for inside in module.modules()}
        names = frozenset(name for name, module in names_of(self._module).items() if module in in_fp32)
        return make_tree(self._module, self._called, names)

    def suspicion(self, tree: Tree) -> dict[str, float]:
        """Rate the modules by their distance from fp32 while all of them compute in low precision."""
        point, gradients, scale = self._references[0]
        watch, sums = Watch(self._watch), dict[str, Tensor]()
        try:
            with self._training(point) as one, watch.on(one.module):
                self._run(one, point, one.forward_context(), scale)
                found = one.gradients()
            sums = {name: fidelity_sums(true, found[name] / scale) for name, true in gradients.items() if name in found}
        except RuntimeError as error:  # if the step fails, no module is rated
            if is_out_of_memory(error):
                raise
        self._watch.forget()
        return suspicion(tree, watch.called, watch.sums, sums)

    # -- low precision -------------------------------------------------------------------------------------------------

    def distance(self, rules: Sequence[str] = (), *, until: float = math.inf) -> DistanceToFp32:
        """Measure the distance from fp32 with rules in addition to the plugin's own.

        It returns as soon as an error is larger than `until`.
        """
        gradient, reason = 0.0, ""
        try:
            for reference in self._references:
                error, reason = self._gradient_error(reference, rules)
                gradient = max(gradient, error)
                if reason or error > until:
                    break
            if gradient > until or not self.batches:
                return DistanceToFp32(gradient, {}, reason)
            return DistanceToFp32(gradient, self._metric_errors(rules), reason)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            return DistanceToFp32(math.inf, {}, in_one_line(error))

    def _gradient_error(self, reference: _Reference, rules: Sequence[str]) -> tuple[float, str]:
        point, gradients, scale = reference
        while True:
            with self._training(point, rules) as one:
                loss = self._run(one, point, one.forward_context(), scale)
                found = one.gradients()
            if loss is not None and not math.isfinite(float(loss)):
                return math.inf, "the loss is not finite"
            if bool(all_finite(found.values())):
                break
            if self._plugin.scaler is None or scale <= _LOWEST_SCALE:
                what = "gradients overflow at every loss scale" if self._plugin.scaler else "gradients are not finite"
                return math.inf, what
            scale = max(scale / 16, _LOWEST_SCALE)
        return _relative_difference(gradients, found, scale), ""

    def _metric_errors(self, rules: Sequence[str]) -> dict[str, float]:
        found = self._evaluate(EvaluationPass.in_amp(self._trainer, self._module, "validation"), rules)
        return {name: relative_error(found[name], true) for name, true in self._metrics.items() if name in found}

    def step_time_ratio(self, rules: Sequence[str]) -> float:
        """Measure forward and backward with the rules, over the time without them: the median of pairs.

        NaN if the step does not run without the rules.
        """
        point, _, scale = self._references[0]
        began: list[float] = []

        def takes_part(number: int) -> Collection[str]:
            began.append(time.perf_counter())
            spent = began[-1] - began[0]
            over = (spent >= _AT_LEAST_S and number >= 15) or (spent > _AT_MOST_S and number >= 3)
            return () if over else runs

        try:
            with self._training(point, rules) as one, self._training(point) as other:
                runs = {
                    "with the rules": partial(self._timed, one, point, scale),
                    "without": partial(self._timed, other, point, scale),
                }
                seconds = in_rounds(runs, takes_part)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            return math.nan
        return statistics.median(a / b for a, b in zip(*seconds.values(), strict=True))

    def _timed(self, one: TrainingPass, point: Point, scale: float) -> float:
        one.forget_gradients()
        return DeviceClock(self._place).seconds_of(
            lambda: self._run(one, point, one.forward_context(), scale, fp32_draws=False)
        )

    # -- runs ----------------------------------------------------------------------------------------------------------

    @contextmanager
    def _training(self, point: Point, rules: Sequence[str] = (), *, upcast: bool = False) -> Generator[TrainingPass]:
        """Make a training pass on a copy of the module, with the weights and buffers of a recorded step."""
        with (
            _lightning.training_stage(self._trainer),
            closing(TrainingPass(self._trainer, self._module, upcast=upcast)) as one,
        ):
            _load(one.module, point)
            Fp32Modules(one.module, rules, self._place.type, active=True)
            yield one

    def _run(
        self,
        one: TrainingPass,
        point: Point,
        context: AbstractContextManager[Any] | None,
        scale: float,
        *,
        fp32_draws: bool = True,
    ) -> Any:
        # a float32 tensor, whose product with a loss in half precision is float32, too
        factor = torch.tensor(scale, device=self._place)
        batch, idx = point.batch, point.batch_idx
        return one.run(
            batch, idx, context=context, random_state=point.random_state, scale=factor, fp32_draws=fp32_draws
        )

    def _evaluate(
        self, one: EvaluationPass, rules: Sequence[str] = (), watch: AbstractContextManager[None] | None = None
    ) -> dict[str, float]:
        with closing(one):
            Fp32Modules(one.module, rules, self._place.type, active=True)
            with watch or nullcontext():
                for batch, idx, loader_idx in self.batches:
                    one.step(batch, idx, loader_idx)
                metrics = one.finish(None)
            return {name: float(value) for name, value in metrics.items() if name not in _AXES}


def state_of(module: LightningModule) -> dict[str, Tensor]:
    """Return copies of all parameters and buffers by name."""
    return {name: tensor.detach().clone() for name, tensor in _tensors(module).items()}


@torch.no_grad()
def _load(module: LightningModule, point: Point) -> None:
    for name, own in _tensors(module).items():
        if name in point.weights and point.weights[name].shape == own.shape:
            own.copy_(point.weights[name])
    for name, one in module.named_modules():
        one.train(point.training.get(_modules.plain_name(name), one.training))


def _tensors(module: LightningModule) -> Mapping[str, Tensor]:
    everything = [*module.named_parameters(), *module.named_buffers()]
    return {_modules.plain_name(name): tensor for name, tensor in everything}


def _relative_difference(reference: Mapping[str, Tensor], found: Mapping[str, Tensor], scale: float = 1.0) -> float:
    """Return the norm of the difference over the norm, with all gradients together.

    A missing gradient counts as zero.
    """
    pairs = [(r, found[name] / scale if name in found else torch.zeros_like(r)) for name, r in reference.items()]
    if not pairs:
        return 0.0
    sums = torch.stack([fidelity_sums(true, value).cpu() for true, value in pairs]).sum(0)
    signal, _, noise = (math.sqrt(value) for value in sums.tolist())
    return noise / signal if signal else 0.0  # a gradient of zero has no direction to compare


def _not_finite(what: str, value: str, where: str, advice: str) -> str:
    return f"No precision can help: in fp32 {what} is not finite ({value}, {where}). {advice}"


_LOCATE = "Fix this first: `OverflowLocator` in a run with `AmpPrecision('fp32')` shows where it begins."
_DO_NOT_LOG = (
    "Fix this first. If the metric only needs more batches than these, do not log it in the module that `make_module`"
    " returns."
)
