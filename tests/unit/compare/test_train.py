"""An arm has the values of a run by hand, and is watched by a callback."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch.utils.data import DataLoader
from zoo.compared import TRAINER, FailsInFp16, Sea, Waves, by_hand, here, not_a_module, raises, spec

from lightning_amp import AmpPrecision, MetricComparison, ScaleMonitor
from lightning_amp.compare import _observer
from lightning_amp.compare._observer import Observer
from lightning_amp.compare._train import train

PLUGINS: dict[str, tuple[Any, Any]] = {
    "fp32": ("fp32", lambda: AmpPrecision("fp32")),
    "bf16": ("bf16", lambda: AmpPrecision("bf16")),
    "fp16": ("fp16", lambda: AmpPrecision("fp16")),
    "arguments": (
        {"precision": "fp16", "fp32_modules": ["net.0"], "scaler": 256.0},
        lambda: AmpPrecision("fp16", fp32_modules=["net.0"], scaler=256.0),
    ),
    "Lightning's own": (MixedPrecision("bf16-mixed", "cpu"), lambda: MixedPrecision("bf16-mixed", "cpu")),
}


@pytest.mark.parametrize("name", PLUGINS)
def test_its_values_are_those_of_a_run_by_hand_bit_for_bit(name: str, tmp_path: Path) -> None:
    source, plugin = PLUGINS[name]
    run = here(spec(tmp_path, source))
    trainer = by_hand(plugin())
    assert run.error is None
    assert {n: [p.value for p in points] for n, points in run.curves.items()} == trainer.notes
    assert set(run.curves) == {"distance", "val_loss", "thing"}
    assert [p.step for p in run.curves["val_loss"]] == [12, 24]
    if isinstance(trainer.precision_plugin, AmpPrecision):
        assert (run.num_steps, run.num_skipped) == (
            trainer.precision_plugin.num_steps,
            trainer.precision_plugin.num_skipped,
        )
    assert run.num_steps + run.num_skipped == 24


def test_what_is_measured(tmp_path: Path) -> None:
    run = here(spec(tmp_path, "fp16", max_epochs=4))
    assert run.precision == "fp16"
    assert run.device.startswith("cpu (")
    assert run.versions["torch"] == torch.__version__
    assert run.directions == {"distance": "min"}
    assert 1 <= len(run.step_s) == len(run.samples_per_s) == len(run.timed_steps)
    assert set(run.timed_steps) < set(range(48))
    assert all(8 / s == pytest.approx(v) for s, v in zip(run.step_s, run.samples_per_s, strict=True))
    weights = sum(p.numel() for p in Waves().parameters()) * 4
    assert run.memory_of == "tensors"
    assert run.peak_memory_bytes is not None
    assert 4 * weights < run.peak_memory_bytes < 40 * weights  # weights, gradients, two moments, and what a batch needs
    assert run.matmul_flops == {"float16": 1.0}
    amp, fp32 = run.same_weights["val_loss"]
    assert amp == run.curves["val_loss"][-1].value
    assert 0 < abs(amp - fp32) < 0.05
    assert [r.skipped for r in run.scale].count(True) == run.num_skipped > 0
    assert 40 <= len(run.loss) <= 48
    times = [p.train_s for p in run.curves["val_loss"]]
    assert 0 < times[0] < times[-1] <= run.train_s < run.total_s
    assert here(spec(tmp_path, "bf16")).scale == ()


def test_the_users_own_monitors_are_taken(tmp_path: Path) -> None:
    own = [ScaleMonitor(log_every_n_steps=5), MetricComparison(limit_batches=1)]
    run = here(spec(tmp_path, "bf16", callbacks=own))
    assert run.error is None
    assert run.same_weights["val_loss"][0] != run.curves["val_loss"][-1].value  # over one batch of two
    assert run.num_steps == 24


def test_a_failure_is_a_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = here(spec(tmp_path, "fp16", FailsInFp16))
    assert run.error == "ArithmeticError: no fp16 here | really\nnot"
    assert "on_train_batch_start" in capsys.readouterr().err  # the traceback is in its log
    assert here(spec(tmp_path, "fp32", FailsInFp16)).error is None
    assert here(spec(tmp_path, module=raises)).error == "RuntimeError: no module today\nCome back tomorrow."
    assert "must return a LightningModule; it returned int" in here(spec(tmp_path, module=not_a_module)).error
    assert "must return a LightningDataModule; it returned int" in here(spec(tmp_path, data=not_a_module)).error


class Ends(Waves):
    error: BaseException = SystemExit(0)

    def on_train_epoch_end(self) -> None:
        raise self.error


def test_a_run_that_is_interrupted_or_exits_has_not_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning ends an interrupted run with `SystemExit`, as if training was done."""
    assert here(spec(tmp_path, module=Ends)).error == "the run ended by `sys.exit(0)`"
    monkeypatch.setattr(Ends, "error", KeyboardInterrupt())
    run = here(spec(tmp_path, module=Ends))
    assert run.error is not None
    assert not run.finished


SEEN: list[float] = []


class Remembers(Waves):
    """Keeps the batches that it saw in a global list, which copies of the module share."""

    def on_validation_epoch_start(self) -> None:
        SEEN.clear()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        SEEN.append(float(batch[0].sum()))

    def on_validation_epoch_end(self) -> None:
        self.log("seen", float(len(SEEN)))


def test_what_lies_outside_of_the_module_is_as_by_hand(tmp_path: Path) -> None:
    run = here(spec(tmp_path, "bf16", Remembers))
    assert {n: [p.value for p in points] for n, points in run.curves.items()} == by_hand(
        AmpPrecision("bf16"), Remembers
    ).notes
    assert [p.value for p in run.curves["seen"]] == [2.0, 2.0]
    assert run.last_validation == 24
    assert run.same_weights["val_loss"][0] == run.curves["val_loss"][-1].value


def test_what_a_run_writes_goes_into_its_folder(tmp_path: Path, in_tmp_path: Path) -> None:
    assert train(spec(tmp_path / "work", logger=True, enable_checkpointing=True), 0.0).error is None
    assert {p.name for p in tmp_path.iterdir()} == {"work"}
    assert list((tmp_path / "work").rglob("*.ckpt"))


# -- the callback -----------------------------------------------------------------------------------------------------


def watched(module: Any = Waves, data: Any = Sea, **changes: Any) -> Observer:
    observer, kwargs = Observer({}), {**TRAINER, "enable_progress_bar": False, **changes}
    L.seed_everything(3, verbose=False)
    trainer = L.Trainer(**kwargs, callbacks=[observer], plugins=[AmpPrecision("fp16")])
    trainer.fit(module(), datamodule=data())
    return observer


class Loaders(Sea):
    def val_dataloader(self) -> Any:
        return [super().val_dataloader(), super().val_dataloader()]


class Often(Waves):
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx), on_step=True, on_epoch=True)

    def on_validation_epoch_end(self) -> None:
        self.log("step", 17.0)
        self.log("at_end", 1.0)


def test_curves_know_loaders_and_the_epoch_end() -> None:
    observer = watched(Often, Loaders, val_check_interval=0.5)
    names = {f"{name}/dataloader_idx_{i}" for name in ("val_loss", "val_loss_epoch") for i in (0, 1)}
    assert set(observer.curves) == names | {"at_end"}
    assert [step for step, _ in observer.curves["at_end"]] == [6, 12, 18, 24]


def test_losses_of_a_long_run_are_thinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_observer, "_MOST_LOSSES", 6)
    observer = watched(max_epochs=4)
    steps = [step for step, _ in observer.losses()]
    assert 3 <= len(steps) <= 6
    assert steps == sorted(steps)
    assert steps[-1] > 30


class Ragged(Sea):
    def train_dataloader(self) -> Any:
        return DataLoader(self.data, batch_size=50)


def test_the_size_of_each_batch_counts() -> None:
    assert list(watched(data=Ragged).watch._samples) == [50, 50, 28] * 2
