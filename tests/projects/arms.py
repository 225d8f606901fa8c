"""Run one arm of a project, and keep the values to compare."""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
import warnings
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins import MixedPrecision
from support.callbacks import all_of_ours
from support.devices import DEVICE
from support.trainers import quiet_trainer
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from lightning_amp import AmpPrecision, DynamicLossScaler
from projects.registry import Project, Setup
from projects.structure import Facts, structure


@dataclass(frozen=True)
class Arm:
    """One way to run a project: the plugin, the precision, and whether our four callbacks run."""

    whose: str  # "plain": no plugin at all, "ours" or "stock"
    precision: str = "fp32"
    callbacks: bool = False
    init_scale: float | None = None  # the default; lower only to see the gradients of a step that was skipped

    def plugin(self) -> Any:
        scale = {} if self.init_scale is None else {"init_scale": self.init_scale}
        if self.whose == "plain":
            return None
        if self.whose == "ours":
            return AmpPrecision(self.precision, scaler=DynamicLossScaler(**scale) if scale else None)
        if self.precision == "bf16":
            return MixedPrecision("bf16-mixed", DEVICE)
        return MixedPrecision("16-mixed", DEVICE, torch.amp.GradScaler(DEVICE, **scale))


def arms(precisions: tuple[str, ...], callbacks: bool = True) -> Iterator[Arm]:
    """The arms, in the order of their runs."""
    yield Arm("plain")
    for precision in ("fp32", *precisions):
        yield Arm("ours", precision)
        if callbacks:
            yield Arm("ours", precision, callbacks=True)
        if precision != "fp32":
            yield Arm("stock", precision)


@dataclass
class Outcome:
    """The results of an arm. A failed arm has its error, and the results until then."""

    error: str | None = None
    losses: list[float] = field(default_factory=list)
    # per batch, for each optimizer: did a weight of it change, or its state (learning rate 0)?
    moved: list[tuple[bool, ...]] = field(default_factory=list)
    rates: list[list[float]] = field(default_factory=list)  # per batch: the learning rates
    gradients: dict[str, Tensor] = field(default_factory=dict)  # true gradients, of the first optimizer step
    weights: dict[str, Tensor] = field(default_factory=dict)
    optimizers: list[Tensor] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    observed: dict[str, Any] = field(default_factory=dict)
    predicted: list[str] = field(default_factory=list)  # dtypes
    structure: Facts = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    @property
    def steps(self) -> int:
        """Return how many optimizers were seen; several steps of one optimizer in a batch count once."""
        return sum(map(sum, self.moved))

    @property
    def first_step_has_gradients(self) -> bool:
        return bool(self.gradients) and all(bool(g.isfinite().all()) for g in self.gradients.values())


class Recorder(Callback):
    """Observes a run; neither `AmpPrecision` nor Lightning's plugin takes another path because of it."""

    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome
        self.before: list[list[Tensor]] = []
        self.steps = 0

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: Any, batch_idx: int) -> None:
        self.before = self.everything(trainer, module)
        self.steps = trainer.global_step

    def on_train_batch_end(
        self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        outcome, parameters = self.outcome, dict(module.named_parameters())
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if loss is None:  # manual optimization: what was logged
            logged = [v for k, v in sorted(trainer.callback_metrics.items()) if is_users(k)]
            loss = torch.stack([v.detach().double().cpu() for v in logged]).sum() if logged else None
        if loss is not None:
            outcome.losses.append(float(torch.as_tensor(loss).detach().double().mean()))
        now = self.everything(trainer, module)
        apart = (len(a) != len(b) or not all(map(torch.equal, a, b)) for a, b in zip(now, self.before, strict=False))
        outcome.moved.append(tuple(apart))
        outcome.rates.append([float(g["lr"]) for o in trainer.optimizers for g in o.param_groups if "lr" in g])
        if trainer.global_step > self.steps and not outcome.gradients:
            self.look(parameters)

    @staticmethod
    def everything(trainer: L.Trainer, module: L.LightningModule) -> list[list[Tensor]]:
        """Return the values that a step of each optimizer changes."""
        found = [
            [*(p for group in o.param_groups for p in group["params"]), *state_of([o])] for o in trainer.optimizers
        ] or [[p for p in module.parameters() if p.requires_grad]]
        return [[t.detach().clone() for t in tensors] for tensors in found]

    def look(self, parameters: Mapping[str, Tensor]) -> None:
        self.outcome.gradients = {n: copy(p.grad) for n, p in parameters.items() if p.grad is not None}


class RecorderBeforeTheStep(Recorder):
    """For runs whose gradients at the end of a batch are gone, or are not the first ones."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome)
        self.seen: set[int] = set()

    def on_before_optimizer_step(self, trainer: L.Trainer, module: L.LightningModule, optimizer: Optimizer) -> None:
        if id(optimizer) in self.seen:
            return
        self.seen.add(id(optimizer))
        names = {id(p): n for n, p in module.named_parameters()}
        for p in (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None):
            self.outcome.gradients.setdefault(names.get(id(p), "?"), copy(p.grad))

    def look(self, parameters: Mapping[str, Tensor]) -> None:
        pass


def copy(tensor: Tensor) -> Tensor:
    tensor = dense(tensor.detach())
    return torch.view_as_real(tensor).double() if tensor.is_complex() else tensor.double()


def dense(tensor: Tensor) -> Tensor:
    return tensor if tensor.layout == torch.strided else tensor.to_dense()


def is_users(key: str) -> bool:
    """Return the metrics that the project logged, without the ones of our callbacks."""
    return not key.startswith("amp/")


def run(project: Project, arm: Arm, seed: int = 0, plugin: Any = None) -> Outcome:
    """Run one arm in an empty folder, from one seed. A failure is an outcome too.

    Args:
        project: It makes a new `Setup`.
        arm: Which one.
        seed: For the project's weights and data, and for training.
        plugin: Instead of the arm's, for tests of this harness.

    """
    outcome = Outcome()
    with tempfile.TemporaryDirectory() as folder, inside(folder), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            L.seed_everything(seed, verbose=False)
            setup = project.make()
            trainer = make_trainer(project, setup, arm, outcome, plugin or arm.plugin())
            setup.run(trainer)
            finish(setup, trainer, outcome)
        except Exception as error:
            outcome.error = f"{type(error).__name__}: {error}"
        finally:
            leave_manual_modes()
    texts = (f"{w.category.__name__}: {w.message}".replace(os.path.realpath(folder), "") for w in caught)
    outcome.warnings = sorted({text.split("\n")[0] for text in texts})
    return outcome


def make_trainer(project: Project, setup: Setup, arm: Arm, outcome: Outcome, plugin: Any) -> L.Trainer:
    kwargs = dict(setup.trainer)
    before = project.look == "before" or not setup.module.automatic_optimization
    recorder = RecorderBeforeTheStep(outcome) if before else Recorder(outcome)
    own = kwargs.pop("callbacks", None) or []
    own = [own] if isinstance(own, Callback) else list(own)
    ours = all_of_ours(every_n_steps=2) if arm.callbacks else []
    plugins = [] if plugin is None else [plugin]
    return quiet_trainer(**kwargs, callbacks=[*own, *ours, recorder], plugins=plugins)


def finish(setup: Setup, trainer: L.Trainer, outcome: Outcome) -> None:
    outcome.metrics = {k: float(v) for k, v in trainer.callback_metrics.items() if is_users(k) and v.numel() == 1}
    outcome.weights = {n: dense(t.detach()).clone() for n, t in tensors(setup.module).items()}
    outcome.optimizers = [t.detach().clone() for t in state_of(trainer.optimizers)]
    outcome.structure = structure(setup.module, trainer)
    if setup.observe is not None:
        outcome.observed = dict(setup.observe(trainer, setup.module))
    if setup.predict is not None:
        leaves = tree_leaves(trainer.predict(setup.module, setup.predict))
        outcome.predicted = sorted({str(leaf.dtype) for leaf in leaves if isinstance(leaf, Tensor)})


def state_of(optimizers: Sequence[Optimizer]) -> list[Tensor]:
    leaves = (leaf for optimizer in optimizers for leaf in tree_leaves(list(optimizer.state.values())))
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def tensors(module: L.LightningModule) -> dict[str, Tensor]:
    """Return the weights: the state dict may lack parameters (PEFT), and may hold more than tensors."""
    state = {n: t for n, t in module.state_dict().items() if isinstance(t, Tensor)}
    return {**state, **dict(module.named_parameters()), **dict(module.named_buffers())}


@contextlib.contextmanager
def inside(folder: str) -> Generator[None, None, None]:
    home = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(home)


def leave_manual_modes() -> None:
    """Restore global state, so that an exception in the middle of a run does not affect the next arm."""
    torch.set_grad_enabled(True)
    torch.set_autocast_enabled(DEVICE, False)
    torch.clear_autocast_cache()
    torch.set_default_dtype(torch.float32)


def finite(numbers: list[float]) -> bool:
    return all(math.isfinite(n) for n in numbers)
