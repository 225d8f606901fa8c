"""Row 43: a checkpoint holds only plain containers, whatever the run reported or tried."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from support import Poison, Toy, batches, fit
from torch import Tensor
from torch.utils.data import DataLoader
from zoo.faults import FAULTS, Net, plain_data

from lightning_amp import (
    AmpPrecision,
    DynamicLossScaler,
    GradientMonitor,
    MetricComparison,
    OverflowLocator,
    ScaleMonitor,
)
from lightning_amp.precision import scaled_grad
from lightning_amp.reports._overflow import Cause

PLAIN = (dict, list, str, int, float, bool, type(None), Tensor)


def not_plain(value: Any, path: str) -> Iterator[str]:
    if type(value) not in PLAIN:
        yield f"{path}: {type(value).__name__}"
    if isinstance(value, dict):
        for key, item in value.items():
            yield from not_plain(key, f"{path} (key)")
            yield from not_plain(item, f"{path}.{key}")
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from not_plain(item, f"{path}[{i}]")


def test_the_walk_finds_what_is_not_plain() -> None:
    state = {"a": [1, {"b": torch.Size([1])}], (1, 2): torch.Size([1])}
    assert list(not_plain(state, "state")) == [
        "state.a[1].b: Size", "state (key): tuple", "state.(1, 2): Size",
    ]  # fmt: skip


class Penalised(Toy):
    """Its derivative has a scale of its own, which the checkpoint holds, too."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        batch = batch.clone().requires_grad_()
        loss = self.loss(batch)
        (gradient,) = scaled_grad(self.trainer, loss, batch, create_graph=True)
        return loss + gradient.square().mean()


class Validated(Net):
    """Its metric differs from fp32, so `MetricComparison` reports it and tries remedies."""

    def __init__(self) -> None:
        super().__init__(lambda module, batch: module.head(module.encoder(batch)).float().square().mean())

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        out = self.head(self.encoder(batch) * 1e5).float()
        self.log("error", out.square().mean())

    def val_dataloader(self) -> Any:
        return plain_data()


@dataclass
class Situation:
    """A training run, and the fault that `OverflowLocator` has to find in it."""

    make: Callable[[], Any] = Toy
    plugin: Callable[[], AmpPrecision] = lambda: AmpPrecision("fp16")
    data: Callable[[], Any] = lambda: batches(6)
    poison: dict[str, Any] = field(default_factory=dict)
    cause: str = ""
    tries: set[str] = field(default_factory=set)


def planted(name: str, *tries: str) -> Situation:
    fault = FAULTS[name]
    return Situation(lambda: fault.make(False), fault.plugin, fault.loader, {}, fault.cause, set(tries))


SITUATIONS = {
    "range": planted("an exponential in an InfoNCE loss", "AmpPrecision", "fp32_modules"),
    "loss": planted("the log-variance of a VAE", "the loss in fp32"),
    "large loss": planted("a loss that is summed", "dividing the loss by"),
    "large gradient": planted("a gradient inside that overflows", "scaler="),
    "mask": planted("a row that is masked entirely"),
    "weight": planted("a weight that is NaN"),
    "learning rate": dataclasses.replace(
        planted("a learning rate that becomes NaN"), data=lambda: DataLoader([*plain_data()] * 2, batch_size=None)
    ),
    "batch": planted("a batch with NaN"),
    "bf16": planted("a root at 0 in bf16"),
    "not reproduced": Situation(poison={"gradient": [2]}, cause="not reproduced"),
    "losses": Situation(poison={"loss": [2, 5]}),
    "torch's scaler": Situation(
        plugin=lambda: AmpPrecision("fp16", scaler=torch.amp.GradScaler("cpu")), poison={"gradient": [2]}
    ),
    "stuck": Situation(
        plugin=lambda: AmpPrecision("fp16", scaler=DynamicLossScaler(64.0, max_consecutive_skips=2)),
        poison={"loss": range(6)},
    ),
    "penalty": Situation(Penalised, poison={"gradient": [2]}),
    "metric": Situation(Validated, data=plain_data),
}


def test_every_cause_occurs() -> None:
    assert {situation.cause for situation in SITUATIONS.values()} - {""} == set(get_args(Cause))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", SITUATIONS)
@pytest.mark.few(8)
def test_states_are_plain_and_come_back(name: str, tmp_path: Path) -> None:
    """Return the state of each callback at the end, and the content of the checkpoint after each step."""
    situation = SITUATIONS[name]
    ours = [OverflowLocator(), GradientMonitor(2), ScaleMonitor(), MetricComparison(by_module=True)]
    save = ModelCheckpoint(tmp_path, save_top_k=-1, every_n_train_steps=1)
    callbacks = [Poison(**situation.poison), *ours, save]
    with contextlib.suppress(FloatingPointError):
        fit(situation.make, situation.plugin(), situation.data(), callbacks=callbacks, enable_checkpointing=True)
    names = [type(one).__name__ for one in ours]
    paths = list(tmp_path.glob("*.ckpt"))
    assert paths
    for path in paths:
        checkpoint = torch.load(path, weights_only=True)
        states = {"AmpPrecision": checkpoint["AmpPrecision"], **checkpoint["callbacks"]}
        assert not [wrong for one in ("AmpPrecision", *names) for wrong in not_plain(states[one], one)]
    for one in ours:
        state = one.state_dict()
        assert not list(not_plain(state, type(one).__name__))
        again = type(one)()
        again.load_state_dict(state)
        assert repr(again.state_dict()) == repr(state)  # also compares NaN
        if isinstance(again, OverflowLocator) and isinstance(one, OverflowLocator):
            assert again.reports == one.reports
            assert situation.cause in ("", *(report.cause for report in one.reports))
            tried = [setting for report in one.reports for setting, _ in report.remedies]
            assert all(any(setting.startswith(start) for setting in tried) for start in situation.tries)
