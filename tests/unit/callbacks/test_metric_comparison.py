"""`MetricComparison`: keys, table, tolerance, limits, bad input. Bit-identity is a promise: tests/promises."""

import csv
import gc
import logging
import math
import re
import warnings
import weakref
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.plugins import HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from support.comparison_models import Rows
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_amp.callbacks._metric_comparison import ABS_DIFF_PREFIX, DIFF_PREFIX, FP32_PREFIX, MetricComparison
from lightning_amp.reports._comparison_table import ComparisonRow, ComparisonTable

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*is deprecated"),
]


class Model(pl.LightningModule):
    """Logs a loss, whether autocast is on, and how many batches it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 1)
        self.extra: dict[str, float] = {}

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.net(batch).square().mean())
        self.log("autocast", float(torch.is_autocast_enabled("cpu")))
        self.log("batches", 1.0, reduce_fx="sum")

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def data() -> DataLoader[Any]:
    return DataLoader(torch.randn(16, 4, generator=torch.Generator().manual_seed(0)), batch_size=4)


def make_trainer(*callbacks: Callback, **kwargs: Any) -> pl.Trainer:
    options: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 2,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 2,
        "log_every_n_steps": 1,
        "plugins": MixedPrecision("bf16-mixed", "cpu"),
        "callbacks": list(callbacks),
    }
    return pl.Trainer(**(options | kwargs))


def fit(comparison: MetricComparison, module: pl.LightningModule | None = None, **kwargs: Any) -> pl.Trainer:
    torch.manual_seed(0)
    trainer = make_trainer(comparison, *kwargs.pop("callbacks", []), **kwargs)
    trainer.fit(module or Model(), data(), kwargs.pop("val", None) or data())
    return trainer


def values(comparison: MetricComparison, metric: str, field: str) -> list[float]:
    return [getattr(row, field) for row in comparison.table if row.metric == metric]


def count(caught: pytest.WarningsRecorder) -> int:
    """How many of the warnings are ours."""
    return sum("MetricComparison" in str(warning.message) for warning in caught)


def test_keys_rows_and_steps() -> None:
    comparison, logger = MetricComparison(), Rows()
    trainer = fit(comparison, logger=logger)
    names = {"val_loss", "autocast", "batches"}
    prefixes = (FP32_PREFIX, DIFF_PREFIX, ABS_DIFF_PREFIX)
    keys = {prefix + name for prefix in prefixes for name in names}
    assert {key for key in trainer.callback_metrics if key.startswith("amp/")} == keys
    assert {key for key in trainer.logged_metrics if key.startswith("amp/")} == keys
    ours = [(step, row) for step, row in logger.rows if DIFF_PREFIX + "val_loss" in row]
    theirs = [(step, row) for step, row in logger.rows if "val_loss" in row]
    assert [set(row) for _, row in ours] == [keys | {"epoch"}] * 2
    assert [(step, row["epoch"]) for step, row in ours] == [(step, row["epoch"]) for step, row in theirs]
    assert [(row.epoch, row.step) for row in comparison.table if row.metric == "val_loss"] == [(0, 3), (1, 7)]
    for row in comparison.table:
        assert row.diff == row.amp - row.fp32
    (last,) = [row for row in comparison.table if row.epoch == 1 and row.metric == "val_loss"]
    assert last.amp == float(trainer.callback_metrics["val_loss"])
    assert last.diff != 0.0
    assert float(trainer.callback_metrics[DIFF_PREFIX + "val_loss"]) == pytest.approx(last.diff)
    assert float(trainer.callback_metrics[ABS_DIFF_PREFIX + "val_loss"]) == pytest.approx(abs(last.diff))
    assert values(comparison, "autocast", "amp") == [1.0, 1.0]
    assert values(comparison, "autocast", "fp32") == [0.0, 0.0]
    assert all(f"`{prefix}<metric>`" in str(MetricComparison.__doc__) for prefix in prefixes)


def test_a_logged_step_is_the_axis() -> None:
    class WithStep(Model):
        def on_validation_epoch_end(self) -> None:
            self.log("step", 100.0 + self.current_epoch)

    comparison, logger = MetricComparison(), Rows()
    fit(comparison, WithStep(), logger=logger)
    assert [step for step, row in logger.rows if DIFF_PREFIX + "val_loss" in row] == [100, 101]
    assert {row.step for row in comparison.table} == {100, 101}
    assert "step" not in {row.metric for row in comparison.table}


@pytest.mark.parametrize(
    ("kwargs", "epochs"),
    [
        ({}, [0, 1, 2, 3]),
        ({"every_n_epochs": 2}, [0, 1, 3]),
        ({"every_n_epochs": 2, "val_check_interval": 0.5}, [0, 0, 1, 2, 3]),
        ({"every_n_epochs": 2, "check_val_every_n_epoch": 2}, [1, 3]),
        ({"every_n_epochs": 9}, [0]),
    ],
)
def test_which_validations_are_compared(kwargs: dict[str, Any], epochs: list[int]) -> None:
    comparison = MetricComparison(**{k: v for k, v in kwargs.items() if k == "every_n_epochs"})
    fit(comparison, max_epochs=4, **{k: v for k, v in kwargs.items() if k != "every_n_epochs"})
    assert [row.epoch for row in comparison.table if row.metric == "val_loss"] == epochs


def test_validate_alone_compares(caplog: pytest.LogCaptureFixture) -> None:
    comparison = MetricComparison(every_n_epochs=5)
    with caplog.at_level(logging.INFO):
        make_trainer(comparison).validate(Model(), data(), verbose=False)
    assert len(comparison.table) == 3
    assert "AMP - fp32" in caplog.text


class WithTest(Model):
    """Has a `test_step` with hooks of its own."""

    def test_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        loss = self.net(batch).square().mean()
        self.log("test_loss", loss)
        self.log("autocast", float(torch.is_autocast_enabled("cpu")))
        self.log("batches", 1.0, reduce_fx="sum")
        return loss

    def on_test_batch_start(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.events = [*getattr(self, "events", []), "start"]

    def on_test_batch_end(self, outputs: Tensor, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("output_bits", float(torch.finfo(outputs.dtype).bits))
        self.events = [*self.events, "end"]

    def on_test_epoch_end(self) -> None:
        self.log("hooks", float(len(self.events)))


class OnlyTest(WithTest):
    validation_step = pl.LightningModule.validation_step  # type: ignore[assignment]


@pytest.mark.parametrize("limit", [None, 1])
@pytest.mark.parametrize("num_loaders", [1, 2])
@pytest.mark.parametrize("module", [WithTest, OnlyTest])
def test_test_is_compared(
    module: type[WithTest], num_loaders: int, limit: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    comparison, logger, model = MetricComparison(limit_batches=limit), Rows(), module()
    trainer = make_trainer(comparison, logger=logger)
    with caplog.at_level(logging.INFO):
        trainer.test(model, [data() for _ in range(num_loaders)], verbose=False)
    suffixes = [""] if num_loaders == 1 else ["/dataloader_idx_0", "/dataloader_idx_1"]
    for suffix in suffixes:
        assert values(comparison, "autocast" + suffix, "amp") == [1.0]
        assert values(comparison, "autocast" + suffix, "fp32") == [0.0]
        assert values(comparison, "output_bits" + suffix, "amp") == [16.0]
        assert values(comparison, "output_bits" + suffix, "fp32") == [32.0]
        assert values(comparison, "batches" + suffix, "amp") == values(comparison, "batches" + suffix, "fp32")
        assert values(comparison, "batches" + suffix, "amp") == [limit or 4]
        (row,) = [row for row in comparison.table if row.metric == "test_loss" + suffix]
        assert 0.0 < abs(row.relative_diff) < 0.05
        for prefix, value in ((FP32_PREFIX, row.fp32), (DIFF_PREFIX, row.diff), (ABS_DIFF_PREFIX, abs(row.diff))):
            key = f"{prefix}test_loss{suffix}"
            assert float(trainer.callback_metrics[key]) == pytest.approx(value)
            assert sum(key in logged for _, logged in logger.rows) == 1
    assert values(comparison, "hooks", "diff") == [0.0]
    assert values(comparison, "hooks", "amp") == [2.0 * (limit or 4) * num_loaders]
    assert model.events.count("start") == 4 * num_loaders  # the shadow's are its own
    assert f"MetricComparison, epoch 0:\n{comparison.table}" in caplog.text


@pytest.mark.parametrize("stage", ["validate", "test"])
def test_the_text_is_of_the_last_comparison_alone(stage: str) -> None:
    comparison, model = MetricComparison(), WithTest()
    trainer = fit(comparison, model)
    getattr(trainer, stage)(model, data(), verbose=False)
    metrics = {line.split()[0] for line in str(comparison.table).splitlines()[1:]}
    assert metrics == {"autocast", "batches"} | (
        {"test_loss", "hooks", "output_bits"} if stage == "test" else {"val_loss"}
    )


@pytest.mark.parametrize(("limit", "batches"), [(None, 4), (1, 1), (3, 3), (9, 4), (0.5, 2), (0.1, 1), (1.0, 4)])
def test_limit_batches_limits_both_sides(limit: Any, batches: int) -> None:
    comparison = MetricComparison(limit_batches=limit)
    trainer = fit(comparison)
    assert values(comparison, "batches", "amp") == values(comparison, "batches", "fp32") == [batches] * 2
    assert values(comparison, "autocast", "amp") == [1.0, 1.0]
    assert float(trainer.callback_metrics["batches"]) == 4
    assert 0.0 < abs(values(comparison, "val_loss", "relative_diff")[0]) < 0.05


def test_text_table_at_the_end_of_fit(caplog: pytest.LogCaptureFixture) -> None:
    comparison = MetricComparison()
    with caplog.at_level(logging.INFO):
        fit(comparison)
    (text,) = [record.message for record in caplog.records if "MetricComparison" in record.message]
    assert text == f"MetricComparison, epoch 1:\n{comparison.table}"
    assert len(text.splitlines()) == 5


@pytest.mark.parametrize("fails", [False, True])
def test_memory_of_the_shadow_is_free_after_each_validation(fails: bool) -> None:
    buffers: list[Any] = []

    class Watched(Model):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1))

        def on_validation_epoch_end(self) -> None:
            buffers.append(weakref.ref(self.net[0].running_mean))
            if fails and type(self.trainer) is not pl.Trainer:
                raise torch.OutOfMemoryError

    module = Watched()
    gc.disable()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fit(MetricComparison(limit_batches=1), module)
        assert len(buffers) == (5 if fails else 7)  # the sanity check's, and of each validation AMP, fp32 and its copy
        assert {id(buffer()) for buffer in buffers} == {id(None), id(module.net[0].running_mean)}
    finally:
        gc.enable()


# --- tolerance ---


class Off(Model):
    """AMP and fp32 differ by as much as it is told."""

    def __init__(self, amp: float, fp32: float) -> None:
        super().__init__()
        self.amp, self.fp32 = amp, fp32

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("metric", self.amp if torch.is_autocast_enabled("cpu") else self.fp32)
        self.log("other", 0.0)


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("amp", "fp32", "tolerance", "exceeds"),
    [
        (1.5, 1.0, 0.25, True),
        (1.0, 1.5, 0.25, True),
        (1.5, 1.0, 0.5, False),
        (1.5, 1.0, {"metric": 0.25, "other": 0}, True),
        (1.5, 1.0, {"other": 0.0}, False),
        (NAN, 1.0, 1e9, True),
        (1.0, NAN, {"metric": INF}, True),
        (NAN, NAN, 0, False),
        (INF, INF, 0, False),
        (INF, -INF, 1e9, True),
        (INF, 1.0, 1e9, True),
    ],
)
def test_tolerance(amp: float, fp32: float, tolerance: Any, exceeds: bool) -> None:
    comparison, logger = MetricComparison(tolerance=tolerance, on_exceed="raise"), Rows()
    if exceeds:
        with pytest.raises(RuntimeError, match=r"more than the tolerance in epoch 0: `metric`: AMP"):
            fit(comparison, Off(amp, fp32), logger=logger)
        assert any("amp/diff/metric" in row for _, row in logger.rows)  # logged before it raised
        assert len(comparison.table) == 2
    else:
        fit(comparison, Off(amp, fp32))
        assert len(comparison.table) == 4
    if exceeds:
        with pytest.warns(UserWarning, match="more than the tolerance") as caught:
            fit(MetricComparison(tolerance=tolerance), Off(amp, fp32))
        assert count(caught) == 2


def test_no_tolerance_accepts_all() -> None:
    fit(MetricComparison(on_exceed="raise"), Off(NAN, 1.0))


def test_tolerance_for_an_unknown_metric_names_the_known() -> None:
    with pytest.raises(ValueError, match=re.escape("['acc']. Choose from ['metric', 'other']")):
        fit(MetricComparison(tolerance={"acc": 0.1, "metric": 5.0}), Off(1.0, 1.0))


def test_a_misspelt_name_is_found_in_the_sanity_check() -> None:
    module = Model()
    with pytest.raises(
        ValueError, match=r"\['val_los'\]\. Choose from .*'val_loss'\]; .*`num_sanity_val_steps=0`"
    ) as error:
        fit(MetricComparison(tolerance={"val_los": 0.1, "val_loss": 5.0}), module)
    assert module.global_step == 0
    assert "validation does not log" in str(error.value)


@pytest.mark.parametrize("loaders", [1, 2])
def test_the_advice_for_a_name_that_comes_later_is_right(loaders: int) -> None:
    class Last(Model):
        def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
            super().validation_step(batch, batch_idx)
            if batch_idx == 3:
                self.log("_".join(["val", "last"]), 1.0)  # the code does not write the name out

    name = "val_last" if loaders == 1 else "val_last/dataloader_idx_1"
    val = [data() for _ in range(loaders)]
    with pytest.raises(ValueError, match="`num_sanity_val_steps=0`"):
        make_trainer(MetricComparison(tolerance={name: 0.1})).fit(Last(), data(), val)
    make_trainer(MetricComparison(tolerance={name: 0.1}), num_sanity_val_steps=0).fit(Last(), data(), val)


@pytest.mark.parametrize("how", ["asks", "value", "batch", "keys"])
def test_a_name_that_the_sanity_check_does_not_log_yet(how: str) -> None:
    class Later(Model):
        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            super().validation_step(batch, batch_idx)
            if how == "asks" and not self.trainer.sanity_checking:
                self.log("_".join(["val", "later"]), 1.0)
            if how == "value" and self.current_epoch == 1:
                self.log("val_later", 1.0)
            if how == "batch" and batch_idx == 3:
                self.log("val_later", 1.0)

        def on_validation_epoch_end(self) -> None:
            if how == "keys" and self.global_step > 0:
                self.log_dict({"val_later": 1.0, "val_more": 2.0})

    comparison = MetricComparison(tolerance={"val_later": 0.1}, every_n_epochs=1)
    if how == "value":  # nothing says that it will be logged: an error in the first comparison, as without sanity check
        with pytest.raises(ValueError, match=r"\['val_later'\]\. Choose from .*'val_loss'\]$"):
            fit(comparison, Later())
        assert comparison.table is not None
    else:
        fit(comparison, Later())
        assert values(comparison, "val_later", "diff") == [0.0, 0.0]


def test_one_tolerance_for_validation_and_test() -> None:
    comparison = MetricComparison(tolerance={"val_loss": 5.0, "test_loss": 5.0})
    model = WithTest()
    trainer = fit(comparison, model)
    trainer.test(model, data(), verbose=False)
    wrong = MetricComparison(tolerance={"val_loss": 5.0, "test_los": 5.0})
    trainer = fit(wrong, model)
    with pytest.raises(ValueError, match=r"test does not log: \['test_los'\]\. Choose from"):
        trainer.test(model, data(), verbose=False)
    with pytest.raises(ValueError, match=r"test does not log: \['acc'\]"):
        make_trainer(MetricComparison(tolerance={"acc": 1.0})).test(OnlyTest(), data(), verbose=False)


def test_a_name_without_its_loader_is_found_in_the_sanity_check() -> None:
    class Loaders(Model):
        def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
            super().validation_step(batch, batch_idx)

    module = Loaders()
    with pytest.raises(ValueError, match=r"\['val_loss'\]\. Choose from .*'val_loss/dataloader_idx_1'"):
        make_trainer(MetricComparison(tolerance={"val_loss": 1.0})).fit(module, data(), [data(), data()])
    assert module.global_step == 0


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"every_n_epochs": 0}, "`every_n_epochs` must be an integer of at least 1, got 0"),
        ({"every_n_epochs": 1.5}, "got 1.5"),
        ({"every_n_epochs": True}, "got True"),
        ({"limit_batches": 0}, r"`limit_batches` must be .*, got 0\."),
        ({"limit_batches": 1.5}, "got 1.5"),
        ({"limit_batches": 0.0}, "got 0.0"),
        ({"limit_batches": True}, "got True"),
        ({"limit_batches": NAN}, "got nan"),
        ({"tolerance": -0.1}, "`tolerance` must be .*, got -0.1"),
        ({"tolerance": "0.1"}, "got '0.1'"),
        ({"tolerance": {"acc": -1}}, "got {'acc': -1}"),
        ({"tolerance": {3: 1.0}}, "got {3: 1.0}"),
        ({"tolerance": NAN}, "got nan"),
        ({"on_exceed": "stop"}, "`on_exceed` must be .*, got 'stop'"),
    ],
)
def test_settings_are_checked(kwargs: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        MetricComparison(**kwargs)


# --- half precision that was there before ---


class Features(Model):
    """Sees what the dtype of its batch is."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x = batch["x"][0]
        self.log("val_loss", self.net(x).square().mean(), batch_size=4)
        self.log("bits", float(torch.finfo(x.dtype).bits), batch_size=4)
        self.log("class_id", batch["y"].float().mean(), batch_size=4)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch["x"][0]).square().mean()


@pytest.mark.parametrize("limit", [None, 2])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_batches_are_upcast_for_fp32_only(dtype: torch.dtype, limit: int | None) -> None:
    batches = [{"x": (x.to(dtype),), "y": torch.tensor(3)} for x in data()]
    comparison = MetricComparison(limit_batches=limit)
    loader: Any = DataLoader(batches, batch_size=None)  # type: ignore[arg-type]
    make_trainer(comparison).fit(Features(), loader, loader)
    assert values(comparison, "bits", "amp") == [16.0, 16.0]
    assert values(comparison, "bits", "fp32") == [32.0, 32.0]
    assert values(comparison, "class_id", "diff") == [0.0, 0.0]
    assert 0.0 < abs(values(comparison, "val_loss", "relative_diff")[0]) < 0.05
    assert batches[0]["x"][0].dtype == dtype


def test_frozen_half_precision_weights_are_upcast_for_fp32_only() -> None:
    class Frozen(Model):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(4, 4).bfloat16().requires_grad_(False)
            self.register_buffer("shift", torch.zeros(4, dtype=torch.bfloat16))

        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            assert self.shift.dtype == self.body.weight.dtype
            self.log("bits", float(torch.finfo(self.shift.dtype).bits))
            self.log("val_loss", self.net(self.body(batch) + self.shift).square().mean())

    comparison, module = MetricComparison(), Frozen()
    fit(comparison, module)
    assert module.body.weight.dtype == torch.bfloat16
    assert values(comparison, "bits", "fp32") == [32.0, 32.0]
    assert 0.0 < abs(values(comparison, "val_loss", "relative_diff")[0]) < 0.05


# --- what cannot be compared ---


def test_metrics_on_one_side_only_are_named_once() -> None:
    class OneSided(Model):
        def on_validation_epoch_end(self) -> None:
            self.log("only_fp32" if type(self.trainer) is not pl.Trainer else "only_amp", 1.0)

    comparison = MetricComparison()
    with pytest.warns(UserWarning, match="one side only and not compared: only_amp, only_fp32") as caught:
        fit(comparison, OneSided())
    assert count(caught) == 1
    assert {row.metric for row in comparison.table} == {"val_loss", "autocast", "batches"}


class Fails(Model):
    """Fails in the shadow, in chosen epochs."""

    def __init__(self, error: Exception, epochs: tuple[int, ...], where: str = "validation_step") -> None:
        super().__init__()
        self.error, self.epochs, self.where = error, epochs, where

    def maybe(self, where: str, batch_idx: int = 1) -> None:
        shadow = type(self.trainer) is not pl.Trainer
        if shadow and where == self.where and batch_idx == 1 and self.current_epoch in self.epochs:
            raise self.error

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.maybe("validation_step", batch_idx)
        super().validation_step(batch, batch_idx)

    def on_validation_epoch_end(self) -> None:
        self.maybe("on_validation_epoch_end")


@pytest.mark.parametrize("where", ["validation_step", "on_validation_epoch_end"])
@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("no"), RuntimeError("CUDA error: out of memory"), RuntimeError("can't allocate memory")],
)
def test_out_of_memory_drops_this_comparison(error: Exception, where: str) -> None:
    comparison = MetricComparison()
    with pytest.warns(UserWarning, match="out of memory in the fp32 pass of epoch 1: .* dropped") as caught:
        trainer = fit(comparison, Fails(error, (1, 2), where), max_epochs=4)
    assert count(caught) == 1
    assert trainer.current_epoch == 4
    assert [row.epoch for row in comparison.table if row.metric == "val_loss"] == [0, 3]


@pytest.mark.parametrize("where", ["validation_step", "on_validation_epoch_end"])
def test_another_error_ends_the_comparisons_of_the_run(where: str) -> None:
    comparison = MetricComparison()
    with pytest.warns(UserWarning, match=r"second time \(KeyError: 'once'\)\. Comparisons are off") as caught:
        trainer = fit(comparison, Fails(KeyError("once"), (1,), where), max_epochs=4)
    assert count(caught) == 1
    assert trainer.current_epoch == 4
    assert [row.epoch for row in comparison.table if row.metric == "val_loss"] == [0]
    fit(comparison, max_epochs=1)  # a new run tries again
    assert len(comparison.table) == 3


def test_what_cannot_be_copied_is_named_when_it_is_used() -> None:
    class Reads(Model):
        def __init__(self) -> None:
            super().__init__()
            self.numbers = (float(i) for i in range(100))

        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            self.log("number", next(self.numbers), reduce_fx="sum")

    module = Reads()
    with pytest.warns(UserWarning, match=r"NotCopiedError: `Reads\.numbers` cannot be copied"):
        fit(MetricComparison(), module, num_sanity_val_steps=0)
    assert next(module.numbers) == 8.0


@pytest.mark.parametrize("stage", ["fit", "test"])
def test_a_module_without_the_step_is_left_alone(stage: str) -> None:
    class Without(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(4, 1)

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self.net(batch).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.05)

    comparison, step = MetricComparison(), "test_step" if stage == "test" else "validation_step"
    trainer = make_trainer(comparison)
    # Lightning refuses `test` without a `test_step`, and asks only after the setup of callbacks.
    run = (
        partial(trainer.fit, Without(), data())
        if stage == "fit"
        else partial(comparison.setup, trainer, Without(), stage)
    )
    with pytest.warns(UserWarning, match=f"does not run: `Without` has no `{step}`") as caught:
        run()
    assert count(caught) == 1
    assert len(comparison.table) == 0


def test_nothing_logged() -> None:
    class Silent(Model):
        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            self.log("per_step", 1.0, on_step=True, on_epoch=False)

    comparison = MetricComparison()
    with pytest.warns(UserWarning, match="nothing was logged with `on_epoch=True`") as caught:
        fit(comparison, Silent())
    assert count(caught) == 1
    assert len(comparison.table) == 0


@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no")
@pytest.mark.parametrize("how", ["no loader", "no batches"])
def test_nothing_to_compare_is_said_once(how: str) -> None:
    trainer = make_trainer(MetricComparison(), limit_val_batches=0 if how == "no batches" else None)
    with pytest.warns(UserWarning, match="no validation runs in this fit") as caught:
        trainer.fit(Model(), data(), data() if how == "no batches" else None)
    assert count(caught) == 1


@pytest.mark.parametrize("strategy", [FSDPStrategy, ModelParallelStrategy, DeepSpeedStrategy])
def test_sharded_strategies_are_refused(strategy: type) -> None:
    comparison = MetricComparison()
    trainer: Any = SimpleNamespace(strategy=object.__new__(strategy), current_epoch=0, global_step=0)
    with pytest.warns(UserWarning, match=f"does not run: .* the strategy is `{strategy.__name__}`"):
        comparison.setup(trainer, Model(), "fit")
    trainer.sanity_checking = False
    comparison.on_validation_start(trainer, Model())
    comparison.on_validation_batch_start(trainer, Model(), None, 0)
    comparison.on_validation_end(trainer, Model())
    assert len(comparison.table) == 0


def test_true_half_precision_is_refused() -> None:
    comparison = MetricComparison()
    with pytest.warns(UserWarning, match="with precision 'bf16-true' there is no fp32 to compare with"):
        fit(comparison, plugins=HalfPrecision("bf16-true"))
    assert len(comparison.table) == 0


@pytest.mark.filterwarnings("ignore:You are using the `dataloader_iter`", "ignore:Found `dataloader_iter` argument")
def test_dataloader_iter_is_refused() -> None:
    class Iterates(Model):
        def validation_step(self, dataloader_iter: Any) -> None:
            next(dataloader_iter)

    comparison = MetricComparison()
    with pytest.warns(UserWarning, match="takes a `dataloader_iter` consumes its batches"):
        fit(comparison, Iterates(), num_sanity_val_steps=0)
    assert len(comparison.table) == 0


def test_share_of_a_loader_without_length() -> None:
    class Stream(torch.utils.data.IterableDataset[Tensor]):
        def __iter__(self) -> Any:
            return iter(torch.randn(6, 4))

    trainer = make_trainer(MetricComparison(limit_batches=0.5), num_sanity_val_steps=0)
    with pytest.raises(ValueError, match="needs loaders with a length, got 0.5"):
        trainer.fit(Model(), data(), DataLoader(Stream(), batch_size=2))
    comparison = MetricComparison(limit_batches=2)
    make_trainer(comparison, num_sanity_val_steps=0).fit(Model(), data(), DataLoader(Stream(), batch_size=2))
    assert values(comparison, "batches", "amp") == values(comparison, "batches", "fp32") == [2.0, 2.0]


# --- with others ---


@pytest.mark.parametrize("mode", ["min", "max"])
def test_every_epoch_can_be_monitored(mode: str, tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path, monitor="amp/abs_diff/val_loss", mode=mode, save_top_k=-1)
    comparison = MetricComparison(every_n_epochs=3)
    seen: list[float] = []

    class Look(Callback):
        def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            seen.append(float(trainer.callback_metrics["amp/diff/val_loss"]))

    fit(comparison, callbacks=[Look(), checkpoint], max_epochs=7, enable_checkpointing=True)
    assert [row.epoch for row in comparison.table if row.metric == "val_loss"] == [0, 2, 5]
    first, third, sixth = values(comparison, "val_loss", "diff")
    assert seen == pytest.approx([first, first, third, third, third, sixth, sixth])
    best = (min if mode == "min" else max)(abs(value) for value in (first, third, sixth))
    assert float(checkpoint.best_model_score or NAN) == pytest.approx(best)


def test_a_resumed_run_has_the_last_values_before_it_compares(tmp_path: Path) -> None:
    first = MetricComparison(every_n_epochs=3)
    fit(first, max_epochs=1).save_checkpoint(tmp_path / "first.ckpt")
    second = MetricComparison(every_n_epochs=3)
    checkpoint = ModelCheckpoint(tmp_path / "best", monitor="amp/diff/val_loss", save_top_k=-1)
    trainer = make_trainer(second, checkpoint, max_epochs=2, enable_checkpointing=True)
    trainer.fit(Model(), data(), data(), ckpt_path=tmp_path / "first.ckpt", weights_only=True)
    assert list(second.table) == list(first.table)
    (diff,) = values(second, "val_loss", "diff")
    assert float(trainer.callback_metrics["amp/diff/val_loss"]) == pytest.approx(diff)


def test_a_second_fit_compares_its_first_validation() -> None:
    comparison = MetricComparison(every_n_epochs=3)
    trainer = fit(comparison, max_epochs=1)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(Model(), data(), data())
    assert [row.epoch for row in comparison.table if row.metric == "val_loss"] == [0, 1]


def test_a_failed_comparison_does_not_end_a_run_that_monitors_it(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path, monitor="amp/abs_diff/val_loss", save_top_k=1)
    with pytest.warns(UserWarning, match="Comparisons are off"):
        trainer = fit(
            MetricComparison(),
            Fails(KeyError("once"), (0, 1, 2)),
            callbacks=[checkpoint],
            enable_checkpointing=True,
        )
    assert trainer.current_epoch == 2
    assert math.isnan(float(trainer.callback_metrics["amp/abs_diff/val_loss"]))


def test_differences_can_be_monitored(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path, monitor="amp/diff/val_loss", save_top_k=-1)
    early = EarlyStopping("amp/fp32/val_loss", patience=5)
    comparison = MetricComparison()
    fit(comparison, callbacks=[early, checkpoint], enable_checkpointing=True)
    scores = sorted(float(score) for score in checkpoint.best_k_models.values())
    assert scores == pytest.approx(sorted(values(comparison, "val_loss", "diff")))
    assert float(early.best_score) == pytest.approx(min(values(comparison, "val_loss", "fp32")))


@pytest.mark.parametrize("how", ["lightning module", "function"])
def test_the_shadow_compiles_nothing(how: str) -> None:
    calls: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        calls.append(1)
        return graph.forward

    @torch.compile(backend=backend)
    def penalty(weight: Tensor) -> Tensor:
        return weight.square().sum() + weight.matmul(weight.T).sum()

    class WithFunction(Model):
        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            super().validation_step(batch, batch_idx)
            self.log("penalty", penalty(self.net.weight))

    results: list[Any] = []
    comparison = MetricComparison()
    for callbacks in ([], [comparison]):
        calls.clear()
        torch.compiler.reset()
        torch.manual_seed(0)
        module: Any = Model() if how == "lightning module" else WithFunction()
        compiled: Any = torch.compile(module, backend=backend) if how == "lightning module" else module
        make_trainer(*callbacks).fit(compiled, data(), data())
        results.append((len(calls), {name: value.tolist() for name, value in module.state_dict().items()}))
    assert results[0][0] > 0
    assert results[0] == results[1]
    assert values(comparison, "autocast", "diff") == [1.0, 1.0]


def test_resume_continues_the_table(tmp_path: Path) -> None:
    first = MetricComparison(every_n_epochs=2)
    trainer = fit(first, max_epochs=3)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    second = MetricComparison(every_n_epochs=2, tolerance=100.0)
    resumed = make_trainer(second, max_epochs=6)
    resumed.fit(Model(), data(), data(), ckpt_path=tmp_path / "last.ckpt", weights_only=True)
    assert list(second.table)[:6] == list(first.table)
    assert [row.epoch for row in second.table if row.metric == "val_loss"] == [0, 1, 3, 5]


def test_a_new_run_begins_a_new_table() -> None:
    comparison = MetricComparison()
    fit(comparison)
    fit(comparison)
    assert [row.epoch for row in comparison.table if row.metric == "val_loss"] == [0, 1]


def test_plain_fp32_has_no_difference() -> None:
    comparison = MetricComparison()
    fit(comparison, plugins=Precision())
    assert {row.diff for row in comparison.table} == {0.0}


# --- the table ---


def table() -> ComparisonTable:
    rows = [
        ComparisonRow.of(epoch, epoch * 10, metric, 1.0 + 0.1 * epoch, 1.0)
        for epoch in range(3)
        for metric in ("acc/dataloader_idx_0", "acc/dataloader_idx_1", "loss")
    ]
    return ComparisonTable(rows, tolerance={"loss": 0.15})


@pytest.mark.parametrize(
    ("amp", "fp32", "diff", "relative"),
    [
        (3.0, 2.0, 1.0, 0.5),
        (1.0, -2.0, 3.0, 1.5),
        (0.0, 0.0, 0.0, 0.0),
        (-1.0, 0.0, -1.0, -INF),
        (NAN, 0.0, NAN, NAN),
        (INF, INF, 0.0, 0.0),
    ],
)
def test_row(amp: float, fp32: float, diff: float, relative: float) -> None:
    row = ComparisonRow.of(0, 0, "m", amp, fp32)
    assert (row.diff, row.relative_diff) == pytest.approx((diff, relative), nan_ok=True)
    with pytest.raises(AttributeError):
        row.amp = 1.0  # type: ignore[misc]


def test_csv(tmp_path: Path) -> None:
    path = tmp_path / "new" / "table.csv"
    comparison = MetricComparison()
    fit(comparison)
    comparison.to_csv(path)
    comparison.to_csv(path)
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert [row["metric"] for row in rows] == [row.metric for row in comparison.table]
    assert [float(row["diff"]) for row in rows] == [row.diff for row in comparison.table]
    assert list(path.parent.iterdir()) == [path]


def test_a_failed_csv_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    table().to_csv(path)
    before = path.read_text()
    broken = table()
    broken.add([None])  # type: ignore[list-item]
    with pytest.raises(csv.Error):
        broken.to_csv(path)
    assert path.read_text() == before
    assert list(tmp_path.iterdir()) == [path]


def panels(figure: Any) -> list[tuple[Any, Any]]:
    """Pairs of the panel of values and that of differences."""
    return list(zip(figure.axes[::2], figure.axes[1::2], strict=True))


def heights(axis: Any) -> list[list[float]]:
    """What the lines that have a point per epoch show."""
    return [list(line.get_ydata()) for line in axis.get_lines() if len(line.get_xdata()) == 3]


def test_plot(tmp_path: Path) -> None:
    figure = table().plot(tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000
    (acc, acc_diff), (loss, loss_diff) = panels(figure)
    assert [axis.get_ylabel() for axis in (acc, loss)] == ["acc", "loss"]
    assert heights(loss) == [[1.0] * 3, pytest.approx([1.0, 1.1, 1.2])]
    assert heights(loss_diff) == [pytest.approx([0.0, 0.1, 0.2])]
    assert len(heights(acc)) == 4  # two loaders
    assert len(heights(acc_diff)) == 2
    assert [text.get_text() for text in acc.get_legend().get_texts()] == ["loader 0", "loader 1"]
    assert (len(acc_diff.patches), len(loss_diff.patches)) == (0, 1)
    assert loss_diff.get_ylim() == pytest.approx((-0.24, 0.24))
    low, high = loss.get_ylim()
    assert 0.9 < low < 1.0  # its size, not its difference
    assert 1.2 < high < 1.3
    ComparisonTable().plot()


def test_plot_of_one_epoch_and_of_several_validations_in_one() -> None:
    ((sizes, _),) = panels(ComparisonTable([ComparisonRow.of(3, 40, "m", 1.0, 1.0)]).plot())
    assert sizes.get_xlim() == (2.5, 3.5)
    assert list(sizes.get_xticks()) == [3]
    rows = [ComparisonRow.of(step // 20, step, "m", 1.0, 1.0) for step in (0, 10, 20)]
    ((sizes, _),) = panels(ComparisonTable(rows).plot())
    assert sizes.get_xlabel() == "step"
    assert list(sizes.get_lines()[0].get_xdata()) == [0, 10, 20]


def test_plot_marks_what_is_not_finite_and_keeps_small_differences_readable() -> None:
    rows = [ComparisonRow.of(epoch, epoch, "m", 5.0 if epoch != 1 else NAN, 5.001) for epoch in range(3)]
    ((_, differences),) = panels(ComparisonTable(rows, tolerance=100.0).plot())
    (marks,) = [line for line in differences.get_lines() if line.get_marker() == "x"]
    assert list(marks.get_xdata()) == [1]
    assert differences.get_ylim() == pytest.approx((-0.0012, 0.0012))
    assert "tolerance 100 (beyond this panel)" in {text.get_text() for text in differences.get_legend().get_texts()}


def many(number: int = 20, tolerance: Any = None) -> ComparisonTable:
    """Metric `i` differs by `i` per mille, and is of another size than its neighbours."""
    rows = [
        ComparisonRow.of(epoch, epoch, f"m{i}", 10.0 ** (i % 3) * (1 + i / 1000), 10.0 ** (i % 3))
        for epoch in range(2)
        for i in range(number)
    ]
    return ComparisonTable(rows, tolerance=tolerance)


def test_at_most_fifteen_rows_the_worst() -> None:
    lines = str(many()).splitlines()
    assert [line.split()[0] for line in lines[1:-1]] == [f"m{i}" for i in range(19, 4, -1)]
    assert lines[-1] == "These are the 15 worst of 20; `print(comparison.table.to_text(max_rows=None))` shows all."
    assert len(many().to_text(None).splitlines()) == 21
    assert [line.split()[0] for line in many().to_text(2).splitlines()] == ["metric", "m19", "m18", "These"]
    assert len(str(many(15)).splitlines()) == 16
    figure = many().plot()
    assert [values.get_ylabel() for values, _ in panels(figure)] == [f"m{i}" for i in range(19, 4, -1)]
    assert "worst 15 of 20" in figure.get_suptitle()
    assert len(panels(many().plot(max_rows=None))) == 20
    for wrong in (0, True, "3", 1.5):
        with pytest.raises(ValueError, match=f"`max_rows` must be an integer of at least 1, got {wrong!r}"):
            many().to_text(wrong)  # pyright: ignore[reportArgumentType]


def test_the_worst_are_beyond_their_tolerance_or_nan() -> None:
    table = many(tolerance={"m3": 0.0})
    table.add([*table.last, ComparisonRow.of(1, 1, "nan", NAN, 1.0), ComparisonRow.of(1, 1, "both", NAN, NAN)])
    names = [line.split()[0] for line in table.to_text(3).splitlines()]
    assert names == ["metric", "m3", "nan", "m19", "These"]
    assert "both" not in table.to_text(21)
    assert table.exceeding().startswith("`m3`: AMP")


def test_a_warning_does_not_name_a_hundred_metrics() -> None:
    assert many(100, tolerance=0.0).exceeding().endswith("; and 84 more metrics")  # m0 does not differ


def test_plot_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        MetricComparison().plot()


def test_text() -> None:
    lines = str(table()).splitlines()
    assert [line.split()[0] for line in lines] == ["metric", "acc/dataloader_idx_0", "acc/dataloader_idx_1", "loss"]
    assert lines[3].split()[1:] == ["1.2", "1", "+2.00e-01", "+2.00e-01", "2.00e-01"]
    assert str(ComparisonTable()) == "no comparison yet"
    assert repr(table()) == "ComparisonTable(9 rows)"
