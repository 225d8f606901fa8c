"""The callback that watches a fit, and its profiler, which knows the part of the step that runs."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.plugins import MixedPrecision
from support import Manual, Toy, batches

from lightning_amp import AmpPrecision, DynamicLossScaler
from lightning_amp.advice import _watch
from lightning_amp.advice._step import BACKWARD, DATA, FORWARD, OPTIMIZER, REST, Loading, OptimizerFacts, Step
from lightning_amp.advice._watch import PartTimer, Watch
from lightning_amp.shadow import private_trainer, run_private_fit, unnoticed

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_watch, "_TIMED", (4, 4))
    monkeypatch.setattr(_watch, "_TIMED_S", (0.0, 60.0))


def watched(module: LightningModule, plugin: Any = None, **fit: Any) -> tuple[Watch, Step, Trainer]:
    """Watch a fit on `data` or on a `loader`; all other arguments go to the Trainer."""
    watch = Watch(CPU, __file__)
    data = {"data": fit.pop("data")} if "data" in fit else {"train_dataloaders": fit.pop("loader", batches(4))}
    with unnoticed(CPU):
        trainer = private_trainer(CPU, plugin or AmpPrecision("bf16"), [watch], fit)
        run_private_fit(trainer, module, **data)
    assert watch.step is not None
    return watch, watch.step, trainer


def test_some_steps_settle_some_are_timed_one_is_recorded() -> None:
    watch, seen, trainer = watched(Toy())
    assert trainer.global_step == 3 + 4 + 1
    assert seen.num_timed == 4
    assert seen.batch_size == 4
    assert len(watch.batches) == 4
    assert seen.loading == Loading(0)
    assert seen.optimizers == (OptimizerFacts("SGD", True, seen.num_parameters),)
    assert {o.part for o in seen.recorded.operations} >= {FORWARD, BACKWARD, OPTIMIZER}


class Sleeps(Toy):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        time.sleep(0.02)
        return super().training_step(batch, batch_idx)


def test_each_part_has_its_own_time() -> None:
    class SleepsTwice(Sleeps):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            time.sleep(0.03)

    class Rests(Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            time.sleep(0.04)

    class SlowLoader:
        def __iter__(self) -> Any:
            for batch in batches(4):
                time.sleep(0.05)
                yield batch

        def __len__(self) -> int:
            return 4

    _, seen, _ = watched(SleepsTwice(), loader=SlowLoader(), callbacks=[Rests()])
    expected = {FORWARD: 0.02, OPTIMIZER: 0.03, REST: 0.04, DATA: 0.05}
    for part, seconds in expected.items():
        assert seen.parts[part] >= seconds
    assert sum(seen.parts.values()) < 0.4


def test_steps_are_timed_after_the_loss_scale_has_settled() -> None:
    scaler = DynamicLossScaler(init_scale=2.0**24)
    _, seen, trainer = watched(Toy(), AmpPrecision("fp16", scaler=scaler))
    assert seen.num_bad == 0
    assert trainer.global_step > 8
    assert seen.parts[OPTIMIZER] > 0


def test_manual_optimization_and_accumulation() -> None:
    for _, seen, _ in (watched(Manual()), watched(Toy(), accumulate_grad_batches=2)):
        parts = [o.part for o in seen.recorded.operations]
        assert {FORWARD, BACKWARD, OPTIMIZER} <= set(parts)


def test_a_closure_inside_of_the_optimizers_step_is_not_its_time() -> None:
    _, seen, _ = watched(Sleeps(), MixedPrecision("bf16-mixed", "cpu"))
    assert seen.parts[FORWARD] >= 0.02
    assert seen.parts[OPTIMIZER] < 0.02
    assert (seen.num_seen, seen.num_bad, seen.bad_loss) == (5, 0, False)


# -- the batches that are kept -----------------------------------------------------------------------------------------

HOOK = "on_before_batch_transfer"


class Doubling(Toy):
    """A module whose hook changes batches in place, and whose step sets them to zero."""

    def __init__(self) -> None:
        super().__init__()
        self.sums: list[float] = []

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch.mul_(2)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.sums.append(float(batch.sum()))
        loss = super().training_step(batch, batch_idx)
        batch.detach().zero_()
        return loss


class Numbers:
    """A loader whose batches are new in each epoch."""

    def __init__(self, *numbers: float) -> None:
        self.numbers = numbers

    def __iter__(self) -> Any:
        return (torch.full((4, 8), number) for number in self.numbers)

    def __len__(self) -> int:
        return len(self.numbers)


FOUR = Numbers(1.0, 2.0, 3.0, 4.0)


def test_batches_are_kept_as_the_loader_gave_them() -> None:
    """Copies are made before the user's hook runs, and the hook still runs."""
    module = Doubling()
    watch, *_ = watched(module, loader=FOUR)
    assert [float(batch.sum()) for batch in watch.batches] == [32.0, 64.0, 96.0, 128.0]
    assert module.sums == [64.0, 128.0, 192.0, 256.0] * 2


def test_batches_of_validation_are_not_kept() -> None:
    class Validates(Toy):
        def validation_step(self, batch: Any, batch_idx: int) -> None: ...

        def val_dataloader(self) -> Any:
            return Numbers(0.0)

    watch, *_ = watched(Validates(), loader=Numbers(1.0, 2.0), val_check_interval=1)
    assert len(watch.batches) == 4
    assert all(bool(batch.all()) for batch in watch.batches)


class Fails(Toy):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        raise KeyError


def test_the_hook_of_an_instance_is_back_after_a_fit() -> None:
    called: list[int] = []

    def own(batch: Any, dataloader_idx: int) -> Any:
        called.append(dataloader_idx)
        return batch

    module = Toy()
    vars(module)[HOOK] = own
    watch, *_ = watched(module, loader=FOUR)
    assert watch.batches
    assert len(called) >= 8
    assert vars(module)[HOOK] is own


def test_the_hook_is_back_after_an_exception() -> None:
    module = Fails()
    with pytest.raises(KeyError):
        watched(module, loader=FOUR)
    assert HOOK not in vars(module)


def test_the_hook_of_a_data_module_is_the_one_that_runs() -> None:
    class Data(LightningDataModule):
        def train_dataloader(self) -> Any:
            return FOUR

        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return batch * 3

    module, data = Doubling(), Data()
    watch, *_ = watched(module, data=data)
    assert [float(batch.sum()) for batch in watch.batches] == [32.0, 64.0, 96.0, 128.0]
    assert module.sums[:4] == [96.0, 192.0, 288.0, 384.0]
    assert HOOK not in vars(data)
    assert HOOK not in vars(module)


# -- the clock ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    moment = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: moment[0])
    return moment


def test_each_moment_counts_for_the_innermost_part(now: list[float]) -> None:
    clock = PartTimer(torch.device("cpu"))
    clock.push("before it started")
    now[0] = 5.0
    clock.pop()
    clock.start()
    for part, seconds in ((FORWARD, 1.0), (BACKWARD, 2.0)):
        clock.push(part)
        assert clock.part == part
        now[0] += seconds
    clock.pop()
    now[0] += 4.0
    clock.pop()
    assert clock.part == REST
    now[0] += 8.0
    clock.push(DATA)
    now[0] += 16.0
    clock.pop()
    assert clock.stop() == {FORWARD: 5.0, BACKWARD: 2.0, REST: 8.0, DATA: 16.0}
    clock.start()
    now[0] += 2.0
    assert clock.stop() == {REST: 2.0}
