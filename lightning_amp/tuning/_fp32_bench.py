"""A step of training and some of validation, run as often as it takes: in fp32, and with other modules in fp32."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from typing_extensions import final

from lightning_amp._compat import _lightning, _modules
from lightning_amp.casting import Fp32Modules
from lightning_amp.measure import DeviceClock, in_rounds
from lightning_amp.numerics import all_finite, fidelity_sums, fitting_scale, largest
from lightning_amp.precision import AmpPrecision
from lightning_amp.shadow import EvaluationPass, TrainingPass, in_one_line, is_out_of_memory
from lightning_amp.tracing import RandomState, fp32_throughout
from lightning_amp.tuning._fp32_errors import Errors, NothingHelps, relative_error
from lightning_amp.tuning._fp32_search import Tree
from lightning_amp.tuning._fp32_watch import Watch, make_tree, names_of, suspicion

_LOWEST_SCALE = 2.0**-14
_AXES = {"step", "epoch"}
"""Lightning takes these two, when a user logs them, for the axes of the plots."""


@final
class Point(NamedTuple):
    """A batch of training, and what the module and the random generators were before it."""

    step: int
    batch: Any
    batch_idx: int
    weights: dict[str, Tensor]
    training: dict[str, bool]
    random_state: RandomState


@final
class Bench:
    """Compares steps of one module with those in fp32.

    Args:
        trainer: In a fit, in the epoch of training or validation.
        module: The real one. Neither is changed.
        plugin: Whose precision it is about.
        points: Steps of training.
        batches: Of validation, each with its number and the number of its loader, `None` for the only one; on the
            device. Empty where there is none.

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
        self._gradients: list[dict[str, Tensor]] = []
        self._scales: list[float] = []
        self._watch, self._called = Watch(), list[str]()
        self._left_out = frozenset[str]()
        for point in points:
            self._add_reference(point)
        self.metrics: dict[str, float] = {}
        if batches:
            self._add_metrics()

    # -- fp32 ----------------------------------------------------------------------------------------------------------

    def _add_reference(self, point: Point) -> None:
        watch = self._watch if not self._gradients else Watch()  # some modules run in some steps only
        with self._training(point, upcast=True) as one, watch.on(one.module):
            loss = self._run(one, point, None, 1.0)
            found = one.gradients()
            self._left_out = self._in_fp32_anyway(one.module)
        if watch is not self._watch:
            watch.forget()
            self._called += [name for name in watch.called if name not in self._called]
        where = f"batch {point.step} of training"
        if loss is not None and not math.isfinite(float(loss)):
            raise NothingHelps(_not_finite("the loss", f"{float(loss)}", where, _LOCATE))
        bad = [name for name, gradient in found.items() if not bool(all_finite([gradient]))]
        if bad:
            more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
            raise NothingHelps(_not_finite(f"the gradient of `{bad[0]}`{more}", "infinite or NaN", where, _LOCATE))
        self._gradients.append(found)
        top = max((float(largest(gradient)) for gradient in found.values()), default=0.0)
        self._scales.append(fitting_scale(top) if self._plugin.scaler is not None else 1.0)

    def repeats_itself(self) -> float:
        """Return how far the gradient in fp32 is from itself, relative to its norm: 0 if the step is reproducible."""
        point, before = self.points[0], self._gradients[0]
        with self._training(point, upcast=True) as one:
            self._run(one, point, None, 1.0)
            again = one.gradients()
        moved = [(again[name] - old).cpu().double() for name, old in before.items() if name in again]
        norm = math.sqrt(sum(float(old.cpu().double().square().sum()) for old in before.values()))
        return math.sqrt(sum(float(one.square().sum()) for one in moved)) / norm if norm else 0.0

    def _add_metrics(self) -> None:
        watch = Watch()
        context = lambda _: fp32_throughout(self._place.type)  # noqa: E731
        self.metrics = self._evaluate(context, context, lambda _: nullcontext(), (), upcast=True, watch=watch)
        watch.forget()
        self._called += [name for name in watch.called if name not in self._called]
        for name, value in self.metrics.items():
            if not math.isfinite(value):
                where = f"validation with {len(self.batches)} of its batches"
                raise NothingHelps(_not_finite(f"the metric `{name}`", str(value), where, _DO_NOT_LOG))

    # -- the modules ---------------------------------------------------------------------------------------------------

    def tree(self) -> Tree:
        """Arrange the modules that run in these steps."""
        return make_tree(self._module, {*self._watch.called, *self._called}, self._left_out)

    def _in_fp32_anyway(self, module: LightningModule) -> frozenset[str]:
        """Name the modules that the plugin's own rules match, and what is inside them."""
        modules = Fp32Modules(module, self._plugin.fp32_modules, self._place.type, active=True).modules
        return frozenset(name for name, inside in names_of(module).items() if inside in modules)

    def suspicion(self, tree: Tree) -> dict[str, float]:
        """Rate the modules by how far they are from fp32 when all compute in low precision."""
        point, watch = self.points[0], Watch(self._watch)
        sums: dict[str, Tensor] = {}
        try:
            with self._training(point) as one, watch.on(one.module):
                self._run(one, point, one.forward_context(), self._scales[0])
                found = one.gradients()
            sums = {
                name: fidelity_sums(reference, found[name] / self._scales[0])
                for name, reference in self._gradients[0].items()
                if name in found
            }
        except RuntimeError as error:  # what does not run says nothing
            if is_out_of_memory(error):
                raise
        self._watch.forget()
        return suspicion(tree, watch.called, watch.sums, sums)

    # -- low precision -------------------------------------------------------------------------------------------------

    def errors(self, rules: Sequence[str] = (), *, until: float = math.inf) -> Errors:
        """Measure how far it is from fp32 if these modules, too, compute in fp32.

        Args:
            rules: Of `fp32_modules`.
            until: Stop as soon as an error is larger.

        """
        gradient, reason = 0.0, ""
        try:
            for number in range(len(self.points)):
                error, reason = self._gradient_error(number, rules)
                gradient = max(gradient, error)
                if reason or error > until:
                    break
            if gradient > until or not self.batches:
                return Errors(gradient, {}, reason)
            return Errors(gradient, self._metric_errors(rules), reason)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            return Errors(math.inf, {}, in_one_line(error))

    def _gradient_error(self, number: int, rules: Sequence[str]) -> tuple[float, str]:
        point, reference, scale = self.points[number], self._gradients[number], self._scales[number]
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
        pairs = [(r, found[name] / scale if name in found else torch.zeros_like(r)) for name, r in reference.items()]
        if not pairs:
            return 0.0, ""
        sums = torch.stack([fidelity_sums(true, value).cpu() for true, value in pairs]).sum(0)
        signal, _, noise = (math.sqrt(value) for value in sums.tolist())
        # a gradient that is zero has no direction to lose
        return (noise / signal if signal else 0.0), ""

    def _metric_errors(self, rules: Sequence[str]) -> dict[str, float]:
        plugin = self._plugin
        found = self._evaluate(
            lambda _: nullcontext(),
            partial(plugin.evaluation_context, step="validation_step"),
            plugin.evaluation_context,
            rules,
        )
        return {name: relative_error(found[name], true) for name, true in self.metrics.items() if name in found}

    def step_time_ratio(self, rules: Sequence[str], *, at_least_s: float = 0.3, at_most_s: float = 3.0) -> float:
        """Measure the time of forward and backward with modules in fp32 over that without: the median of pairs.

        NaN if the step does not run without them.
        """
        try:
            return self._step_time_ratio(rules, at_least_s, at_most_s)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            return math.nan

    def _step_time_ratio(self, rules: Sequence[str], at_least_s: float, at_most_s: float) -> float:
        point, scale = self.points[0], self._scales[0]
        with self._training(point, rules) as one, self._training(point) as other:
            runs = {
                "with the rules": partial(self._timed, one, point, scale),
                "without": partial(self._timed, other, point, scale),
            }
            began: list[float] = []

            def takes_part(number: int) -> Collection[str]:
                began.append(time.perf_counter())
                spent = began[-1] - began[0]
                over = (spent >= at_least_s and number >= 15) or (spent > at_most_s and number >= 3)
                return () if over else runs

            seconds = in_rounds(runs, takes_part)
        return statistics.median(a / b for a, b in zip(*seconds.values(), strict=True))

    def _timed(self, one: TrainingPass, point: Point, scale: float) -> float:
        one.forget_gradients()
        return DeviceClock(self._place).seconds_of(
            lambda: self._run(one, point, one.forward_context(), scale, fp32_draws=False)
        )

    # -- runs ----------------------------------------------------------------------------------------------------------

    @contextmanager
    def _training(self, point: Point, rules: Sequence[str] = (), *, upcast: bool = False) -> Generator[TrainingPass]:
        """Make a copy for a step of training, with the weights and buffers of its point."""
        with _lightning.training_stage(self._trainer):
            one = TrainingPass(self._trainer, self._module, upcast=upcast)
            try:
                _load(one.module, point)
                Fp32Modules(one.module, rules, self._place.type, active=True)
                yield one
            finally:
                one.close()

    def _run(
        self,
        one: TrainingPass,
        point: Point,
        context: AbstractContextManager[Any] | None,
        scale: float,
        *,
        fp32_draws: bool = True,
    ) -> Any:
        # in fp32: that times a loss in half precision is no half precision
        factor = torch.tensor(scale, device=self._place)
        batch, idx = point.batch, point.batch_idx
        return one.run(
            batch, idx, context=context, random_state=point.random_state, scale=factor, fp32_draws=fp32_draws
        )

    def _evaluate(
        self,
        hook_context: Callable[[LightningModule], AbstractContextManager[Any]],
        step_context: Callable[[LightningModule], AbstractContextManager[Any]],
        epoch_end_context: Callable[[LightningModule], AbstractContextManager[Any]],
        rules: Sequence[str],
        *,
        upcast: bool = False,
        watch: Watch | None = None,
    ) -> dict[str, float]:
        one = EvaluationPass(
            self._trainer,
            self._module,
            "validation",
            hook_context=hook_context,
            step_context=step_context,
            epoch_end_context=epoch_end_context,
            upcast=upcast,
        )
        try:
            Fp32Modules(one.module, rules, self._place.type, active=True)
            with nullcontext() if watch is None else watch.on(one.module):
                for batch, idx, loader_idx in self.batches:
                    one.step(batch, idx, loader_idx)
                metrics = one.finish(None)
            return {name: float(value) for name, value in metrics.items() if name not in _AXES}
        finally:
            one.close()


def state_of(module: LightningModule) -> dict[str, Tensor]:
    """Copy the values of all parameters and buffers, by name."""
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


def _not_finite(what: str, value: str, where: str, advice: str) -> str:
    return f"No precision can help: in fp32 {what} is not finite ({value}, {where}). {advice}"


_LOCATE = "Mend this first: `OverflowLocator` in a run with `AmpPrecision('fp32')` tells where it begins."
_DO_NOT_LOG = "Mend this first; if it only needs more batches than these, do not log it in what `make_module` returns."
