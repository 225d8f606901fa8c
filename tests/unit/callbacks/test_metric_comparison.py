"""`MetricComparison`: keys, table, tolerance, limits, bad input. `tests/promises` compares the bits of runs."""

import logging
import math
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins import HalfPrecision, MixedPrecision
from lightning.pytorch.strategies import DeepSpeedStrategy
from support import DEVICE, Recorder
from torch import Tensor, nn
from zoo.validated import Fails, Model, OnlyTest, WithTest, count, data, fit, make_trainer, values

from lightning_amp.callbacks._metric_comparison import ABS_DIFF_PREFIX, DIFF_PREFIX, FP32_PREFIX, MetricComparison

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*is deprecated"),
]


def test_keys_rows_and_steps() -> None:
    comparison, logger = MetricComparison(), Recorder()
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

    comparison, logger = MetricComparison(), Recorder()
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
    assert "MetricComparison, epoch 0: `autocast` differs most: AMP 1, fp32 0." in caplog.text


@pytest.mark.parametrize("limit", [None, 1])
@pytest.mark.parametrize("num_loaders", [1, 2])
@pytest.mark.parametrize("module", [WithTest, OnlyTest])
@pytest.mark.few(4)
def test_test_is_compared(
    module: type[WithTest], num_loaders: int, limit: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    comparison, logger, model = MetricComparison(limit_batches=limit), Recorder(), module()
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
    assert model.events.count("start") == 4 * num_loaders  # the shadow has events of its own
    assert "MetricComparison, epoch 0: `autocast" in caplog.text


@pytest.mark.parametrize("stage", ["validate", "test"])
def test_the_text_is_of_the_last_comparison_alone(stage: str) -> None:
    comparison, model = MetricComparison(), WithTest()
    trainer = fit(comparison, model)
    getattr(trainer, stage)(model, data(), verbose=False)
    metrics = {line.split()[0] for line in str(comparison.table).splitlines()[1:]}
    assert metrics == {"autocast", "batches"} | (
        {"test_loss", "hooks", "output_bits"} if stage == "test" else {"val_loss"}
    )


def test_one_line_at_the_end_of_fit(caplog: pytest.LogCaptureFixture) -> None:
    comparison = MetricComparison()
    with caplog.at_level(logging.INFO):
        fit(comparison)
    (text,) = [record.message for record in caplog.records if "MetricComparison" in record.message]
    assert text == (
        "MetricComparison, epoch 1: `autocast` differs most: AMP 1, fp32 0. `print(comparison.table)` shows 3 metrics."
    )
    assert len(str(comparison.table).splitlines()) == 4


# --- tolerance ---


class Off(Model):
    """Logs one given value in AMP, and another in fp32."""

    def __init__(self, amp: float, fp32: float) -> None:
        super().__init__()
        self.amp, self.fp32 = amp, fp32

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("metric", self.amp if torch.is_autocast_enabled(DEVICE) else self.fp32)
        self.log("other", 0.0)


NAN, INF = math.nan, math.inf


@pytest.mark.filterwarnings("ignore:`MetricComparison`. `metric` is nan in AMP")
def test_a_metric_that_only_fp32_keeps_finite_is_said_first(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        fit(MetricComparison(tolerance={"other": 0.0}), Off(NAN, 40676.0))
    assert "only: `metric` (AMP nan, fp32 40676)\n  fix: `eval_precision='fp32'`" in caplog.text


@pytest.mark.filterwarnings("ignore:`MetricComparison`. `metric` is (nan|inf) in AMP")
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
    comparison, logger = MetricComparison(tolerance=tolerance, on_exceed="raise"), Recorder()
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
        assert sum("more than the tolerance" in str(warning.message) for warning in caught) == 2
        assert count(caught) == 2


def test_no_tolerance_accepts_all() -> None:
    with pytest.warns(UserWarning, match="`metric` is nan in AMP and 1 in fp32") as caught:
        fit(MetricComparison(on_exceed="raise"), Off(NAN, 1.0))
    assert count(caught) == 1


def test_tolerance_for_an_unknown_metric_names_the_known() -> None:
    with pytest.raises(ValueError, match=re.escape("['acc']. Choose from ['metric', 'other']")):
        fit(MetricComparison(tolerance={"acc": 0.1, "metric": 5.0}), Off(1.0, 1.0))


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"every_n_epochs": 0}, "`every_n_epochs` must be an integer of 1 or more, got 0"),
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


def test_one_tolerance_for_validation_and_test() -> None:
    comparison = MetricComparison(tolerance={"val_loss": 5.0, "test_loss": 5.0})
    model = WithTest()
    trainer = fit(comparison, model)
    trainer.test(model, data(), verbose=False)
    trainer = fit(MetricComparison(tolerance={"val_loss": 5.0, "test_los": 5.0}), model)
    with pytest.raises(ValueError, match=r"not logged: \['test_los'\]\. Choose from"):
        trainer.test(model, data(), verbose=False)
    with pytest.raises(ValueError, match=r"not logged: \['acc'\]"):
        make_trainer(MetricComparison(tolerance={"acc": 1.0})).test(OnlyTest(), data(), verbose=False)


# --- metrics and modules that cannot be compared ---


def test_metrics_on_one_side_only_are_named_once() -> None:
    class OneSided(Model):
        def on_validation_epoch_end(self) -> None:
            self.log("only_fp32" if type(self.trainer) is not pl.Trainer else "only_amp", 1.0)

    comparison = MetricComparison()
    with pytest.warns(UserWarning, match="one side only and not compared: only_amp, only_fp32") as caught:
        fit(comparison, OneSided())
    assert count(caught) == 1
    assert {row.metric for row in comparison.table} == {"val_loss", "autocast", "batches"}


@pytest.mark.parametrize("stage", ["fit", "test"])
def test_a_module_without_the_step_is_left_alone(stage: str, caplog: pytest.LogCaptureFixture) -> None:
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
    with caplog.at_level(logging.INFO):
        run()
    assert caplog.text.count(f"`MetricComparison` stands aside: `Without` has no `{step}`") == 1
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
def test_nothing_to_compare_is_said_once(how: str, caplog: pytest.LogCaptureFixture) -> None:
    trainer = make_trainer(MetricComparison(), limit_val_batches=0 if how == "no batches" else None)
    with caplog.at_level(logging.INFO):
        trainer.fit(Model(), data(), data() if how == "no batches" else None)
    assert caplog.text.count("`MetricComparison` stands aside: no validation runs in this fit") == 1


def test_deepspeed_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    class StandIn(SimpleNamespace): ...

    comparison = MetricComparison()
    plugin, strategy = MixedPrecision("bf16-mixed", DEVICE), object.__new__(DeepSpeedStrategy)
    trainer: Any = StandIn(strategy=strategy, precision_plugin=plugin, current_epoch=0, global_step=0)
    with caplog.at_level(logging.INFO):
        comparison.setup(trainer, Model(), "fit")
    assert "stands aside: it works on one device, in DDP, FSDP and tensor parallel" in caplog.text
    trainer.sanity_checking = False
    comparison.on_validation_start(trainer, Model())
    comparison.on_validation_batch_start(trainer, Model(), None, 0)
    comparison.on_validation_end(trainer, Model())
    assert len(comparison.table) == 0


def test_true_half_precision_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    comparison = MetricComparison()
    with caplog.at_level(logging.INFO):
        fit(comparison, plugins=HalfPrecision("bf16-true"))
    assert "stands aside: with precision 'bf16-true' there is no fp32 to compare with" in caplog.text
    assert len(comparison.table) == 0


@pytest.mark.filterwarnings("ignore:You are using the `dataloader_iter`", "ignore:Found `dataloader_iter` argument")
def test_dataloader_iter_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    class Iterates(Model):
        def validation_step(self, dataloader_iter: Any) -> None:
            next(dataloader_iter)

    comparison = MetricComparison()
    with caplog.at_level(logging.INFO):
        fit(comparison, Iterates(), num_sanity_val_steps=0)
    assert "takes a `dataloader_iter` consumes its batches" in caplog.text
    assert len(comparison.table) == 0


@pytest.mark.parametrize("by_module", [False, True])
def test_a_tensor_that_cannot_be_looked_at_ends_nothing(by_module: bool) -> None:
    class Opaque(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func in (torch.isfinite, torch.isnan, Tensor.float):
                raise NotImplementedError("not for a quantized tensor")
            return super().__torch_function__(func, types, args, kwargs or {})

    class Wraps(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.as_subclass(Opaque)

    class Quantized(Model):
        def __init__(self) -> None:
            super().__init__()
            self.base, self.wraps = nn.Parameter(torch.ones(2).as_subclass(Opaque), requires_grad=False), Wraps()

        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            super().validation_step(self.wraps(batch).as_subclass(Tensor), batch_idx)
            self.log("bad", math.nan)

    words = r"`bad` is nan in AMP, and nan in fp32 too .*\n  parameters, buffers and . of . batches were checked"
    with pytest.warns(UserWarning, match=words):
        trainer = fit(MetricComparison(by_module=by_module), Quantized())
    assert trainer.current_epoch == 2


# --- with other callbacks, and after a resume ---


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


@pytest.mark.usefixtures("weights_only")
def test_a_resumed_run_has_the_last_values_before_it_compares(tmp_path: Path) -> None:
    first = MetricComparison(every_n_epochs=3)
    fit(first, max_epochs=1).save_checkpoint(tmp_path / "first.ckpt")
    second = MetricComparison(every_n_epochs=3)
    checkpoint = ModelCheckpoint(tmp_path / "best", monitor="amp/diff/val_loss", save_top_k=-1)
    trainer = make_trainer(second, checkpoint, max_epochs=2, enable_checkpointing=True)
    trainer.fit(Model(), data(), data(), ckpt_path=tmp_path / "first.ckpt")
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


# --- by module, and attached to anything ---


def test_by_module() -> None:
    comparison = MetricComparison(by_module=True)
    fit(comparison)
    assert [(row.epoch, row.name, row.kind, row.num_calls) for row in comparison.module_table] == [
        (0, "net", "Linear", 4), (1, "net", "Linear", 4),
    ]  # fmt: skip
    assert all(30 < row.sqnr_db < 80 and row.cosine > 0.999 for row in comparison.module_table)
    again = MetricComparison(by_module=True)
    again.load_state_dict(comparison.state_dict())
    assert [*again.module_table] == [*comparison.module_table]
    assert len(MetricComparison().module_table) == 0


@pytest.mark.parametrize("limit", [1, 2])
def test_by_module_over_limited_batches_of_two_loaders(limit: int) -> None:
    comparison = MetricComparison(by_module=True, limit_batches=limit)
    make_trainer(comparison).test(WithTest(), [data(), data()], verbose=False)
    assert [row.num_calls for row in comparison.module_table] == [2 * limit]


def test_attached_where_nothing_is_validated(caplog: pytest.LogCaptureFixture) -> None:
    class Predicts(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(4, 1)

        def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self.net(batch)

    comparison = MetricComparison(by_module=True)
    with caplog.at_level(logging.INFO):
        make_trainer(comparison).predict(Predicts(), data())
    assert "MetricComparison" not in caplog.text
    assert comparison.report is None
