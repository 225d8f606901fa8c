"""`MetricComparison`: keys, table, tolerance, limits, bad input. Bit-identity is tested in tests/integration."""

import csv
import gc
import logging
import math
import re
import warnings
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from comparison_models import Rows
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.plugins import HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_amp.callbacks._comparison_table import ComparisonRow, ComparisonTable
from lightning_amp.callbacks._metric_comparison import DIFF_PREFIX, FP32_PREFIX, MetricComparison

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
    keys = {prefix + name for prefix in (FP32_PREFIX, DIFF_PREFIX) for name in names}
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
    assert values(comparison, "autocast", "amp") == [1.0, 1.0]
    assert values(comparison, "autocast", "fp32") == [0.0, 0.0]
    assert all(f"`{prefix}<metric>`" in str(MetricComparison.__doc__) for prefix in (FP32_PREFIX, DIFF_PREFIX))


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
        ({"every_n_epochs": 2}, [1, 3]),
        ({"every_n_epochs": 2, "val_check_interval": 0.5}, [0, 1, 2, 3]),
        ({"every_n_epochs": 2, "check_val_every_n_epoch": 2}, [3]),
        ({"every_n_epochs": 9}, []),
    ],
)
def test_which_validations_are_compared(kwargs: dict[str, Any], epochs: list[int]) -> None:
    comparison = MetricComparison(kwargs.pop("every_n_epochs", 1))
    fit(comparison, max_epochs=4, **kwargs)
    assert [row.epoch for row in comparison.table if row.metric == "val_loss"] == epochs


def test_validate_alone_compares(caplog: pytest.LogCaptureFixture) -> None:
    comparison = MetricComparison(every_n_epochs=5)
    with caplog.at_level(logging.INFO):
        make_trainer(comparison).validate(Model(), data(), verbose=False)
    assert len(comparison.table) == 3
    assert "AMP - fp32" in caplog.text


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


def test_no_validation_step() -> None:
    class Without(pl.LightningModule):
        def training_step(self, batch: Tensor, batch_idx: int) -> None: ...

        def configure_optimizers(self) -> None: ...

    with pytest.raises(ValueError, match=r"`Without` has no `validation_step`\. Define one, or remove the callback"):
        make_trainer(MetricComparison()).fit(Without(), data())


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
    assert list(second.table)[:3] == list(first.table)
    assert [row.epoch for row in second.table if row.metric == "val_loss"] == [1, 3, 5]


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
    broken = ComparisonTable([*table(), None])  # type: ignore[list-item]
    with pytest.raises(csv.Error):
        broken.to_csv(path)
    assert path.read_text() == before
    assert list(tmp_path.iterdir()) == [path]


def test_plot(tmp_path: Path) -> None:
    figure = table().plot(tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000
    assert [axis.get_ylabel().splitlines()[0] for axis in figure.axes] == ["acc", "loss"]
    lines = [line for line in figure.axes[0].get_lines() if len(line.get_xdata()) == 3]
    assert [list(line.get_xdata()) for line in lines] == [[0, 1, 2]] * 2
    assert len(figure.axes[1].patches) == 1
    assert len(figure.axes[0].patches) == 0
    ComparisonTable().plot()


def test_plot_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install matplotlib"):
        MetricComparison().plot()


def test_text() -> None:
    lines = str(table()).splitlines()
    assert [line.split()[0] for line in lines] == ["metric", "acc/dataloader_idx_0", "acc/dataloader_idx_1", "loss"]
    assert lines[3].split()[1:] == ["1.2", "1", "+2.00e-01", "+2.00e-01", "2.00e-01"]
    assert str(ComparisonTable()) == "no comparison yet"
    assert repr(table()) == "ComparisonTable(9 rows)"
