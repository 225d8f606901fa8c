"""Train the same steps in fp32 and in low precision, in private fits, and compare gradients, metrics and outputs."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from typing_extensions import final, override

from lightning_amp._compat import _lightning, _modules
from lightning_amp._compat._names import Callback, LightningDataModule, LightningModule, Trainer
from lightning_amp._containers import tensors_in
from lightning_amp.casting import is_metric, modules_matching
from lightning_amp.measure import DeviceClock, SpeedComparison, in_rounds
from lightning_amp.numerics import HALF_DTYPES, all_finite, fidelity, fidelity_sums, fitting_scale, largest
from lightning_amp.precision import AmpPrecision
from lightning_amp.shadow import (
    Batches,
    copy_batch,
    giving,
    in_one_line,
    is_out_of_memory,
    keep_batches,
    own_module,
    private_trainer,
    run_private_fit,
)
from lightning_amp.tracing import Fp32Draws, RandomState, fp32_throughout
from lightning_amp.tune._fp32_search import Distance, NothingHelps, Tree

Saw = Callable[[str, nn.Module, Any, Any], None]
"""A forward hook, whose first argument is the name of the module."""
State = dict[str, dict[str, Any]]

STEPS = (0, 10, 13)
"""Indices of the measured batches of training.

At the start, weights of 1 or 0 in a norm or an output layer may stop gradients; after some steps their values differ.
"""
NUM_VALIDATION_BATCHES = 3
_LOWEST_SCALE = 2.0**-14
_ROUNDS = 9
_NOT_FINITE_DB = 300.0
_PLAIN = (bool, int, float, str, type(None), list, dict)
_AXES = {"step", "epoch"}
"""Names that Lightning uses as the axes of plots if a user logs them."""


@final
class Point(NamedTuple):
    """A batch of training, and the states of the module and of the random generators before it."""

    batch: Any
    held: State
    random_state: RandomState


@final
class Setting(NamedTuple):
    """The device, the user's Trainer arguments and the data module, which all fits share."""

    device: torch.device
    trainer_kwargs: Mapping[str, Any]
    datamodule: LightningDataModule

    def fit(self, module: LightningModule, plugin: AmpPrecision, callback: Callback, num_batches: int) -> None:
        """Run a private fit of one epoch, with a validation at its end."""
        kwargs: dict[str, Any] = {**self.trainer_kwargs, "val_check_interval": 1.0, "check_val_every_n_epoch": 1}
        kwargs.update(limit_train_batches=num_batches, overfit_batches=0.0, inference_mode=False)
        kwargs["detect_anomaly"] = False  # a NaN is a result of the search, not an error
        if module.automatic_optimization:
            kwargs["accumulate_grad_batches"] = 1
        trainer = private_trainer(self.device, plugin, [callback], kwargs, limit_val_batches=NUM_VALIDATION_BATCHES)
        run_private_fit(trainer, module, self.datamodule)


@final
class _Record(Callback):
    """Trains up to the last measured step; keeps the states, their batches, and batches of validation."""

    def __init__(self, device: torch.device) -> None:
        self._where, self._number = device, 0
        self._batch: Any = None
        self.points: list[Point] = []
        self.validation: dict[int, list[Any]] = {}

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        def keep(batch: Any, dataloader_idx: int) -> None:
            if trainer.training:
                self._batch = copy_batch(batch)
            elif len(kept := self.validation.setdefault(dataloader_idx, [])) < NUM_VALIDATION_BATCHES:
                kept.append(copy_batch(batch))

        self._end = keep_batches(trainer, pl_module, keep)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._number in STEPS and self._batch is not None:
            self.points.append(Point(self._batch, state_of(pl_module), RandomState.capture(self._where.type)))
        self._number += 1

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.should_stop = self._number > STEPS[-1]

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end()


@final
class Run(Callback):
    """Trains one step from each point, validates from the last one, and notes gradients, losses and metrics."""

    def __init__(self, points: Sequence[Point], device: torch.device) -> None:
        self._points, self._where, self._clock = points, device, DeviceClock(device)
        self._began: Any = None
        self.seconds = math.nan
        self.gradients: list[dict[str, Tensor]] = []
        self.losses: list[Tensor] = []
        self.metrics: dict[str, float] = {}

    def _start_from(self, point: Point, module: LightningModule) -> None:
        load(module, point.held)
        point.random_state.restore(self._where.type)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._start_from(self._points[len(self.gradients)], pl_module)
        self.gradients.append({})
        self._began = self._clock.now()

    @override
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        self.losses.append(loss.detach())

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        if math.isnan(self.seconds):
            self.seconds = self._clock.seconds(self._began, self._clock.now())
        stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for name, parameter in _modules.plain_parameters(pl_module).items():
            if id(parameter) in stepped and parameter.grad is not None:
                gradient = parameter.grad.coalesce().values() if parameter.grad.is_sparse else parameter.grad
                self.gradients[-1].setdefault(name, gradient.detach().clone())

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.should_stop = True

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._start_from(self._points[-1], pl_module)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        found = _lightning.evaluation_metrics(trainer)
        self.metrics = {name: float(value) for name, value in found.items() if name not in _AXES and value.numel() == 1}

    @property
    def all_gradients(self) -> list[Tensor]:
        """Return the gradients of all steps."""
        return [gradient for found in self.gradients for gradient in found.values()]


@final
class Bench:
    """Compares steps of one module with the same steps in fp32, with any modules in fp32.

    Args:
        setting: The device, the Trainer's arguments and the data.
        make_module: The user's factory.
        arguments: The arguments of `AmpPrecision`, whose precision is `"fp16"` or `"bf16"`.

    Raises:
        NothingHelps: If fp32 itself is not finite.
        ValueError: If there are no batches.

    """

    def __init__(
        self, setting: Setting, make_module: Callable[[], LightningModule], arguments: Mapping[str, Any]
    ) -> None:
        self._setting, self._arguments = setting, dict(arguments)
        self._full, self._low = own_module(make_module).float(), own_module(make_module)
        record = _Record(setting.device)
        with fp32_throughout(setting.device.type):
            setting.fit(self._full, AmpPrecision("fp32"), record, STEPS[-1] + 1)
        self.points, self._validation = record.points, [kept for _, kept in sorted(record.validation.items())]
        self.num_validation = sum(map(len, self._validation))
        if not self.points:
            raise ValueError("The data module must have batches of training; its loader gave none that could be kept.")
        self._outputs: dict[str, list[Tensor]] = {}
        self._reference = self._in_fp32(self._keep)
        self._require_finite()
        top = max((float(largest(gradient)) for gradient in self._reference.all_gradients), default=0.0)
        self._first_scale = fitting_scale(top) if arguments["precision"] == "fp16" else None

    def _keep(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        if name not in self._outputs:
            self._outputs[name] = [tensor.detach().clone() for tensor in _floating(output)]

    def tree(self) -> Tree:
        """Return the tree of the modules that run in these steps and that the user's own rules do not match.

        A module that is never called (`nn.ModuleList`, an encoder with only an `encode` method) has no forward to
        override. The modules inside it take its place. The same holds for a module with half-precision parameters.
        """
        own = modules_matching(self._low, self._arguments.get("fp32_modules", ())).values()
        in_fp32 = {inside for module in own for inside in module.modules()}
        inside: dict[str, list[str]] = {"": []}
        for name, module in names_of(self._low).items():
            is_half = any(parameter.dtype in HALF_DTYPES for parameter in module.parameters())
            if name in self._outputs and module not in in_fp32 and not is_half:
                outer = name.rpartition(".")[0]
                while outer not in inside:
                    outer = outer.rpartition(".")[0]
                inside[outer].append(name)
                inside[name] = []
        return inside

    def suspicion(self) -> dict[str, float]:
        """Rate the modules by the error of their outputs in low precision: noise over signal in dB.

        Values that are not finite rate highest; among equals, the module that ran first.
        """
        rated: dict[str, float] = {}

        def rate(name: str, module: nn.Module, args: Any, output: Any) -> None:
            pairs = list(zip(self._outputs.get(name, []), _floating(output), strict=False))
            if name not in rated and pairs and all(true.shape == found.shape for true, found in pairs):
                noise = -float(fidelity(torch.stack([fidelity_sums(*pair) for pair in pairs]).sum(0))[0])
                rated[name] = (_NOT_FINITE_DB if math.isnan(noise) else noise) - 1e-6 * len(rated)

        self._in_low((), rate)
        return rated

    def distance(self, rules: Sequence[str] = ()) -> Distance:
        """Measure the distance from fp32 with rules in addition to the user's own."""
        run, true = self._in_low(rules), self._reference
        if run is None or not all_finite(run.losses):
            return Distance(math.inf, {}, self._failure if run is None else "the loss is not finite")
        if not all_finite(run.all_gradients):
            at = " at any loss scale" if self._first_scale else ""
            return Distance(math.inf, {}, f"gradients are not finite{at}")
        gradients = max(_relative_difference(*pair) for pair in zip(true.gradients, run.gradients, strict=True))
        shared = [(name, run.metrics[name], value) for name, value in true.metrics.items() if name in run.metrics]
        missed = {name: abs(found - value) / (abs(value) or 1.0) for name, found, value in shared}
        return Distance(gradients, {name: math.inf if math.isnan(error) else error for name, error in missed.items()})

    def speed(self, rules: Sequence[str]) -> SpeedComparison | None:
        """Compare forward and backward with the rules and without them; `None` if one of them does not run."""

        def seconds(rules: Sequence[str]) -> float:
            run = self._in_low(rules, timed=True)
            return math.nan if run is None else run.seconds

        runs = {"with": partial(seconds, rules), "without": partial(seconds, ())}
        found = in_rounds(runs, lambda number: runs if number < _ROUNDS else ())
        return SpeedComparison.of_rounds(found["with"], found["without"], 0.99)

    # -- runs ----------------------------------------------------------------------------------------------------------

    def _in_fp32(self, saw: Saw | None = None) -> Run:
        with fp32_throughout(self._setting.device.type):
            return self._run(self._full, AmpPrecision("fp32"), saw)

    def _in_low(self, rules: Sequence[str], saw: Saw | None = None, *, timed: bool = False) -> Run | None:
        """Run in low precision; in fp16, at the first of some falling loss scales at which gradients are finite.

        `None` if the step does not run.
        """
        arguments: dict[str, Any] = {**self._arguments, "scaler": self._first_scale}
        arguments["fp32_modules"] = [*arguments.get("fp32_modules", ()), *rules]
        while True:
            try:
                with nullcontext() if timed else Fp32Draws():
                    run = self._run(self._low, AmpPrecision(**arguments), saw)
            except RuntimeError as error:
                if is_out_of_memory(error):
                    raise
                self._failure = in_one_line(error)
                return None
            scale = arguments["scaler"]
            if scale is None or scale <= _LOWEST_SCALE or all_finite(run.all_gradients) or not all_finite(run.losses):
                return run
            arguments["scaler"] = max(scale / 2**8, _LOWEST_SCALE)

    def _run(self, module: LightningModule, plugin: AmpPrecision, saw: Saw | None) -> Run:
        run, num = Run(self.points, self._setting.device), len(self.points)
        hooks = [m.register_forward_hook(partial(saw, name)) for name, m in names_of(module).items()] if saw else []
        training = Batches([point.batch for point in self.points], num=num)
        validation = [Batches(batches, num=len(batches)) for batches in self._validation]
        try:
            with giving(self._setting.datamodule, training, validation):
                self._setting.fit(module, plugin, run, num)
        finally:
            for hook in hooks:
                hook.remove()
        return run

    def _require_finite(self) -> None:
        found = self._reference
        bad = [] if all_finite(found.losses) else ["the loss"]
        bad += [
            f"the gradient of `{name}`" for step in found.gradients for name in step if not all_finite([step[name]])
        ]
        bad += [f"the metric `{name}`" for name, value in found.metrics.items() if not math.isfinite(value)]
        if bad:
            raise NothingHelps(
                f"No precision can help: in fp32 {bad[0]} is not finite. Fix this first: `OverflowLocator` in a run"
                f" with `AmpPrecision('fp32')` shows where it begins. If a metric needs more than"
                f" {self.num_validation} batches, do not log it in the module that `make_module` returns."
            )


def names_of(root: nn.Module) -> dict[str, nn.Module]:
    """Return the modules inside by the first of their names, which the rules of `fp32_modules` match.

    It leaves out metrics, which compute in fp32 anyway, and TorchScript modules, whose submodules cannot be changed.
    """
    closed = {
        m for one in root.modules() if is_metric(one) or isinstance(one, torch.jit.ScriptModule) for m in one.modules()
    }
    first: dict[nn.Module, str] = {}
    for name, module in root.named_modules(remove_duplicate=False):
        if module is not root and module not in closed:
            first.setdefault(module, _modules.plain_name(name))
    return {name: module for module, name in first.items()}


def state_of(module: nn.Module) -> State:
    """Return copies of parameters, buffers, and plain attributes that steps may change (counters), by module."""
    return {
        _modules.plain_name(name): {
            **{k: copy.copy(v) for k, v in vars(one).items() if type(v) in _PLAIN and not k.startswith("_")},
            **{k: t.detach().clone() for k, t in _own_tensors(one)},
        }
        for name, one in module.named_modules()
    }


@torch.no_grad()
def load(module: nn.Module, state: State) -> None:
    """Set what :func:`state_of` returned, also in a module of other dtypes."""
    for name, one in module.named_modules():
        held, own = state[_modules.plain_name(name)], dict(_own_tensors(one))
        for key, value in held.items():
            if key in own and own[key].shape == value.shape:
                own[key].copy_(value)
            elif not isinstance(value, Tensor):
                vars(one)[key] = copy.copy(value)


def _own_tensors(module: nn.Module) -> Iterable[tuple[str, Tensor]]:
    return *module.named_parameters(recurse=False), *module.named_buffers(recurse=False)


def _floating(output: Any) -> list[Tensor]:
    return [t for _, t in tensors_in(output) if t.is_floating_point() and t.layout is torch.strided]


def _relative_difference(reference: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> float:
    """Return the norm of the difference over the norm, of all gradients together; a missing one counts as zero."""
    pairs = [(true, found.get(name, torch.zeros_like(true))) for name, true in reference.items()]
    if not pairs:
        return 0.0
    sums = torch.stack([fidelity_sums(true, value).cpu() for true, value in pairs]).sum(0)
    signal, _, noise = (math.sqrt(value) for value in sums.tolist())
    return noise / signal if signal else 0.0  # a gradient of zero has no direction to compare
