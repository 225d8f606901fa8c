"""A private fit leaves no trace on module, data, callbacks, process and disk."""

from __future__ import annotations

import logging
import os
import random
import signal
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, ModelSummary, RichProgressBar
from torch.distributed.fsdp import fully_shard

from lightning_amp import AmpPrecision
from lightning_amp.shadow import own_data, own_module, private_trainer, require_unsharded, run_private_fit, unnoticed

CPU = torch.device("cpu")


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.total_steps = 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.logger.experiment.add_scalar("x", 1.0)  # type: ignore[union-attr]
        loss = self.layer(batch).square().mean() * random.random()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        self.total_steps = float(self.trainer.estimated_stepping_batches)
        return torch.optim.Adam(self.parameters())


class Data(LightningDataModule):
    def setup(self, stage: str) -> None:
        self.rows = torch.ones(8, 4, dtype=torch.float32)

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(self.rows, batch_size=4)


class Stop(Callback):
    def __init__(self, after: int) -> None:
        self.after = after

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        trainer.should_stop = trainer.global_step >= self.after


def fit(make_module: Callable[[], LightningModule], make_data: Callable[[], LightningDataModule], **kwargs: Any) -> Any:
    with unnoticed(CPU), own_data(make_data) as data:
        module = own_module(make_module)
        trainer = private_trainer(CPU, AmpPrecision("bf16"), [Stop(5)], kwargs)
        run_private_fit(trainer, module, data)
    return trainer, module


def test_a_module_and_data_that_others_hold_stay_as_they_were() -> None:
    module, data = Net(), Data()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    random_state, python_state = torch.get_rng_state(), random.getstate()
    trainer, fitted = fit(lambda: module, lambda: data)
    assert trainer.global_step == 5  # over the ends of epochs
    assert fitted.total_steps == 2000
    assert not torch.equal(fitted.layer.weight, module.layer.weight)
    assert all(torch.equal(module.state_dict()[name], value) for name, value in before.items())
    assert module.total_steps == 0
    assert module.layer.weight.grad is None
    assert not hasattr(data, "rows")
    assert torch.equal(torch.get_rng_state(), random_state)
    assert random.getstate() == python_state


def test_the_process_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    level, threads = logging.getLogger("lightning.pytorch").level, torch.get_num_threads()

    def make() -> Net:
        seed_everything(3)
        os.environ["MINE"] = "1"
        torch.set_num_threads(1)
        torch.set_default_dtype(torch.float64)
        torch.set_float32_matmul_precision("high")
        torch.autograd.set_detect_anomaly(True)
        return Net().float()

    fit(make, Data, deterministic=True)
    assert {"PL_GLOBAL_SEED", "MINE"}.isdisjoint(os.environ)
    assert torch.get_float32_matmul_precision() == "highest"
    assert not torch.is_anomaly_enabled()
    assert not torch.are_deterministic_algorithms_enabled()
    assert logging.getLogger("lightning.pytorch").level == level
    assert torch.get_num_threads() == threads
    assert torch.get_default_dtype() == torch.float32
    assert capsys.readouterr() == ("", "")


def test_the_users_callbacks_run_as_copies_and_cannot_end_the_fit() -> None:
    class Counts(Callback):
        num_batches = 0

        def on_train_batch_end(self, *args: Any) -> None:
            self.num_batches += 1

    mine = Counts()
    trainer, _ = fit(Net, Data, callbacks=[mine, EarlyStopping("loss", check_on_train_epoch_end=True)], max_steps=1)
    assert mine.num_batches == 0
    assert next(c for c in trainer.callbacks if isinstance(c, Counts)).num_batches == 5


class Locked(Net):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


class Scripted(Net):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.jit.script(torch.nn.Linear(4, 1))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script. is deprecated")
@pytest.mark.parametrize("module", [Locked, Scripted])
def test_modules_that_are_hard_to_copy(module: type[Net]) -> None:
    assert fit(module, Data)[0].global_step == 5
    same = module()
    before = {name: value.clone() for name, value in same.state_dict().items()}
    trainer, fitted = fit(lambda: same, Data)
    assert trainer.global_step == 5
    assert all(torch.equal(same.state_dict()[name], value) for name, value in before.items())
    assert not torch.equal(fitted.layer.weight, same.layer.weight)


def test_a_factory_of_something_else_is_an_error() -> None:
    with pytest.raises(TypeError, match="`make_module` must return a LightningModule; it returned Linear"):
        fit(lambda: torch.nn.Linear(1, 1), Data)  # type: ignore[arg-type,return-value]
    with pytest.raises(TypeError, match="`make_data` must return a LightningDataModule; it returned NoneType"):
        fit(Net, lambda: None)  # type: ignore[arg-type,return-value]


def test_callbacks_of_the_module_that_write_or_stop_are_left_out(in_tmp_path: Path) -> None:
    class Writes(Net):
        def configure_callbacks(self) -> Any:
            return [ModelCheckpoint(every_n_train_steps=1), EarlyStopping("loss", check_on_train_epoch_end=True)]

    trainer, _ = fit(Writes, Data)
    assert trainer.global_step == 5
    assert list(in_tmp_path.iterdir()) == []


def test_an_interrupt_stays_one() -> None:
    class Interrupted(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        fit(Interrupted, Data)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_new_module_is_taken_as_it_is() -> None:
    """A copy would not be compiled, and its closures could refer to the original."""
    made: list[Net] = []

    def make() -> Net:
        made.append(Net())
        return made[-1]

    torch.manual_seed(1)
    own = own_module(make)
    torch.manual_seed(1)
    expected = Net()
    assert own is made[-1]
    assert own is not made[0]
    assert torch.equal(own.layer.weight, expected.layer.weight)


def test_a_module_that_shares_a_part_is_copied() -> None:
    backbone = torch.nn.Linear(4, 1)

    def make() -> Net:
        net = Net()
        net.layer = backbone
        return net

    assert own_module(make).layer is not backbone


def test_the_folders_of_the_trainer_are_removed(in_tmp_path: Path) -> None:
    class Writes(Net):
        def on_train_start(self) -> None:
            trainer: Any = self.trainer
            for folder in (trainer.default_root_dir, trainer.log_dir, trainer.checkpoint_callback.dirpath):
                assert Path(folder).is_dir()
                assert Path(folder) != in_tmp_path
            trainer.save_checkpoint(Path(trainer.default_root_dir) / "mine.ckpt")
            self.logger.experiment.config.update({"a": 1})  # type: ignore[union-attr]

    trainer, _ = fit(Writes, Data, callbacks=[RichProgressBar(), ModelSummary(), ModelCheckpoint(save_last=True)])
    assert not Path(trainer.default_root_dir).exists()
    assert list(in_tmp_path.iterdir()) == []


def test_the_folder_goes_if_there_is_no_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(TypeError, match="max_epoch"):
        private_trainer(CPU, AmpPrecision("bf16"), [], {"max_epoch": 1})
    assert list(tmp_path.iterdir()) == []
    trainer = private_trainer(CPU, AmpPrecision("bf16"), [], {})
    assert list(tmp_path.iterdir()) == [Path(trainer.default_root_dir)]


def test_a_callback_that_cannot_be_copied_is_named() -> None:
    class Holds(Callback):
        def __init__(self) -> None:
            self.lock = threading.Lock()

    with pytest.raises(ValueError, match="The callback `Holds` cannot be copied"):
        fit(Net, Data, callbacks=[Holds()])


class Sharding(LightningModule):
    """Shards as the guide says, but also without a mesh."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(2, 2)

    def configure_model(self) -> None:
        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


class WholeOnOneDevice(Sharding):
    def configure_model(self) -> None:
        if self.device_mesh is not None:
            super().configure_model()


class NeedsATrainer(Sharding):
    def configure_model(self) -> None:
        self.net = torch.nn.Linear(self.trainer.max_epochs, 2)


class ShardsElsewhere(Sharding):
    def configure_model(self) -> None:
        self.split()

    def split(self) -> None:
        super().configure_model()


@pytest.mark.parametrize("module", [Sharding, ShardsElsewhere])
def test_a_module_that_shards_is_refused_with_the_line_that_helps(module: type[LightningModule]) -> None:
    with pytest.raises(ValueError, match="`doctor` runs the module on one device") as caught:
        require_unsharded(module, "doctor")
    assert "`if self.device_mesh is None: return`" in str(caught.value)


@pytest.mark.parametrize("module", [WholeOnOneDevice, NeedsATrainer])
def test_a_module_that_can_be_whole_is_not_refused(module: type[LightningModule]) -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    require_unsharded(module, "doctor")
    assert torch.equal(torch.get_rng_state(), before)
