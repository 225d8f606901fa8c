from __future__ import annotations

import copy
import json
import math
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import lightning as L
import pytest
import torch
from support import Manual, Poison, Recorder, Toy, assert_same, batches, fit, flags_on_a_device, stock
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from zoo.overflows import BadRow, fp16, with_bad
from zoo.toy import Quantized

from lightning_amp import AmpPrecision, DynamicLossScaler, OverflowLocator, StepRecord
from lightning_amp.callbacks import _overflow_locator
from lightning_amp.reports import Overflow


class TwoFaults(BadRow):
    """Bad batches of odd index show one fault, bad batches of even index another."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        if batch_idx % 2:
            return self.loss(batch)
        return Toy.loss(self, batch) / torch.where(batch.abs().max() > 1e3, 0.0, 1.0)


def test_keys_are_those_of_the_docstring() -> None:
    recorder = Recorder()
    trainer = fit(BadRow, fp16(), with_bad(1, 2), logger=recorder, callbacks=[OverflowLocator(max_reports=1)])
    rows = [row for _, row in recorder.rows if any(key.startswith("amp/") for key in row)]
    assert {key for row in rows for key in row} == {_overflow_locator.OVERFLOWS}
    assert f"`{_overflow_locator.OVERFLOWS}`" in OverflowLocator.__doc__
    assert [row["amp/overflows"] for row in rows] == [0, 1, 2, 2, 2, 2, 2, 2]
    assert trainer.callback_metrics["amp/overflows"] == 2


def test_report_has_everything(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    locator = OverflowLocator(dirpath=tmp_path / "out")
    fit(BadRow, fp16(), with_bad(5), callbacks=[locator])
    (report,) = locator.reports
    assert report.record == StepRecord(5, 0, 64.0, 64.0, skipped=True, reason="loss", precision="fp16")
    assert (report.rank, report.world_size, report.epoch, report.batch_idx) == (0, 1, 0, 5)
    assert (report.window, report.num_replayed, report.cause, report.note) == ((5, 5), 1, "loss", "")
    assert report.parameters[0] == "net.0.weight"
    (file,) = (tmp_path / "out").iterdir()
    assert file.name == "overflow_step00005_rank0.json"
    assert json.loads(file.read_text()) == json.loads(report.to_json())
    assert str(report) in caplog.text
    assert str(report).startswith(
        "Step 5 skipped (batch 5): infinity in the loss, in fp32 too\n"
        "  training_step: where gave infinity      overflows.py:"
    )
    assert report.line.startswith("overflows.py:")
    with pytest.raises(AttributeError):
        report.rank = 1


def test_after_max_reports_it_neither_prints_nor_waits(caplog: pytest.LogCaptureFixture) -> None:
    locator, plugin = OverflowLocator(max_reports=2), fp16()
    waits: list[tuple[int, bool]] = []

    class Look(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
            waits.append((args[-1], any(s.at_once for s in plugin.records.subscriptions)))

    fit(TwoFaults, plugin, with_bad(1, 2, 4), callbacks=[locator, Look()])
    assert [r.batch_idx for r in locator.reports] == [1, 2]
    assert waits == [(i, i < 2) for i in range(8)]
    assert not locator._window
    assert caplog.text.count(" skipped (batch") == 2
    assert "2 different causes reported; it looks no more in this run" in caplog.text
    assert plugin.num_skipped == 3


def test_a_cause_is_printed_once_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    locator = OverflowLocator(max_reports=3)
    with caplog.at_level("INFO"):
        fit(TwoFaults, fp16(), with_bad(0, 1, 3, 5, 6, count=9), callbacks=[locator])
    assert [r.batch_idx for r in locator.reports] == [0, 1, 3]
    assert caplog.text.count(" skipped (batch") == 2
    assert "OverflowLocator: 3 steps more skipped like a reported one, and not looked into." in caplog.text


def test_known_causes_and_harmless_skips_do_not_use_up_the_reports() -> None:
    locator = OverflowLocator(max_reports=2)
    fit(TwoFaults, fp16(), with_bad(1, 3, 5, 6), callbacks=[locator])
    assert [r.batch_idx for r in locator.reports] == [1, 6]


def test_a_scale_that_settles_is_no_fault(caplog: pytest.LogCaptureFixture) -> None:
    locator, plugin = OverflowLocator(max_reports=1), AmpPrecision("fp16", scaler=DynamicLossScaler(2.0**24))
    with caplog.at_level("INFO"):
        fit(BadRow, plugin, with_bad(7), callbacks=[locator], max_epochs=3)
    assert plugin.num_skipped > 5
    (report,) = locator.reports  # the report of the bad row, after all other skips
    assert report.cause == "loss"
    assert caplog.text.count(" skipped (batch") == 1
    assert "steps skipped while the scale settled, which is how dynamic scaling works" in caplog.text
    fit(Toy, fp16(2.0**30, max_scale=2.0**30), batches(10), callbacks=[locator])
    assert "10 steps skipped while the scale fell, most of the fit" in caplog.text


def test_it_still_looks_after_many_harmless_skips() -> None:
    locator, plugin = OverflowLocator(max_reports=1), fp16(2.0**16, growth_interval=1)
    fit(BadRow, plugin, with_bad(63, count=64), callbacks=[locator], max_epochs=1)
    assert plugin.num_skipped > 25
    (report,) = locator.reports
    assert (report.batch_idx, report.cause) == (63, "loss")
    assert locator.state_dict()["num_harmless"] == plugin.num_skipped - 1
    assert locator.state_dict()["num_repeated"] == 0


@pytest.mark.parametrize("name", ["explain", "origins", "BatchWindow.add"])  # the last one cannot copy a batch
def test_a_failure_inside_ends_the_search_and_not_the_fit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise ZeroDivisionError("a fault of ours")

    monkeypatch.setattr(f"{_overflow_locator.__name__}.{name}", fails)
    locator, plugin = OverflowLocator(), fp16()
    with pytest.warns(UserWarning, match="looks no more: ZeroDivisionError: a fault of ours. Training goes on") as said:
        trainer = fit(BadRow, plugin, with_bad(1, 2), callbacks=[locator])
    assert len([one for one in said if "looks no more" in str(one.message)]) == 1
    assert (plugin.num_steps, plugin.num_skipped, locator.reports) == (6, 2, [])
    assert trainer.callback_metrics["amp/overflows"] == 2


@pytest.mark.parametrize("precision", ["fp16", "bf16"])  # bf16 skips no step
def test_a_learning_rate_that_explodes_is_named(precision: str, caplog: pytest.LogCaptureFixture) -> None:
    class Explodes(Toy):
        def __init__(self) -> None:
            layers = nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 1)
            super().__init__(partial(torch.optim.Adam, lr=10.0), nn.Sequential(*layers))
            self.table = nn.Embedding(1, 8, dtype=torch.float64)  # it hides, at the start, how the others grow

    with caplog.at_level("INFO"):
        fit(Explodes, AmpPrecision(precision), batches(16), callbacks=[OverflowLocator()])
    assert "fix: a lower learning rate (not tried): the typical weight has grown" in caplog.text


def test_without_reports_skips_are_only_counted() -> None:
    locator, plugin = OverflowLocator(max_reports=0), fp16()
    fit(BadRow, plugin, with_bad(1), callbacks=[locator])
    assert locator.reports == []
    state = {"num_overflows": 1, "num_harmless": 0, "num_repeated": 0, "weights": None, "reports": []}
    assert locator.state_dict() == state


def test_the_last_of_too_many_skips_is_reported_too() -> None:
    locator = OverflowLocator()
    with pytest.raises(FloatingPointError):
        fit(BadRow, fp16(max_consecutive_skips=3), with_bad(2, 3, 4), callbacks=[locator])
    assert [r.batch_idx for r in locator.reports] == [2, 3, 4]
    assert (locator.state_dict()["num_harmless"], locator.state_dict()["num_repeated"]) == (0, 2)


def test_reports_at_a_url(folder_url: str) -> None:
    locator = OverflowLocator(dirpath=folder_url)
    assert copy.deepcopy(locator).dirpath == pickle.loads(pickle.dumps(locator)).dirpath == folder_url
    fit(BadRow, fp16(), with_bad(5), callbacks=[locator])
    (report,) = locator.reports
    with fsspec.open(f"{folder_url}/overflow_step00005_rank0.json", "r") as file:
        assert file.read() == report.to_json()


def test_one_file_per_report(tmp_path: Path) -> None:
    fit(TwoFaults, fp16(), with_bad(2, 5), callbacks=[OverflowLocator(dirpath=tmp_path)])
    names = [f"overflow_step0000{step}_rank0.json" for step in (2, 5)]
    assert sorted(path.name for path in tmp_path.iterdir()) == names


@pytest.mark.parametrize(
    ("plugin", "why"),
    [
        (lambda: stock("fp16", init_scale=64.0), "MixedPrecision does not say which steps it skips"),
        (lambda: None, "this run has no mixed precision"),
    ],
)
def test_without_our_plugin_it_stands_aside(plugin: Any, why: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        trainer = fit(Toy, plugin(), batches(2), callbacks=[OverflowLocator()])
    assert f"`OverflowLocator` stands aside: {why}" in caplog.text
    assert "amp/overflows" not in trainer.callback_metrics


@pytest.mark.filterwarnings(
    "ignore:You are using the `dataloader_iter` step flavor", "ignore:Found `dataloader_iter` argument"
)
def test_dataloader_iter_is_counted_only(caplog: pytest.LogCaptureFixture) -> None:
    class Iterates(Toy):
        def training_step(self, dataloader_iter: Any) -> Any:
            batch, _, _ = next(dataloader_iter)
            return self.loss(batch.to(self.device))

    locator = OverflowLocator()
    with caplog.at_level("INFO"):
        trainer = fit(Iterates, fp16(), callbacks=[locator, Poison(gradient=[1])])
    assert "counts, but does not look for causes: a `training_step` that takes a `dataloader_iter`" in caplog.text
    assert locator.reports == []
    assert trainer.callback_metrics["amp/overflows"] == 1


@pytest.mark.parametrize("max_reports", [0, 1, 10])
def test_every_skip_counts_at_every_log_point(max_reports: int) -> None:
    recorder, locator = Recorder(), OverflowLocator(max_reports=max_reports)
    bad = Poison(gradient=[1, 2, 5])
    fit(Toy, fp16(), callbacks=[locator, bad], logger=recorder, log_every_n_steps=2)
    assert [row["amp/overflows"] for _, row in recorder.rows if "amp/overflows" in row] == [1, 2, 3, 3]
    assert len(locator.reports) == min(max_reports, 3)


def test_skips_before_a_crash_count() -> None:
    class Crashes(Toy):
        def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
            if batch_idx == 3:
                raise ZeroDivisionError

    locator = OverflowLocator(max_reports=0)
    with pytest.raises(ZeroDivisionError):
        fit(Crashes, fp16(), callbacks=[locator, Poison(gradient=[1])], log_every_n_steps=50)
    assert locator.state_dict()["num_overflows"] == 1


@pytest.mark.parametrize("value", [-1, 1.5, True, None])
def test_max_reports_is_checked(value: Any) -> None:
    with pytest.raises(ValueError, match="`max_reports` must be an integer of 0 or more, got"):
        OverflowLocator(max_reports=value)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_the_host_waits_for_the_device_once_a_batch(
    precision: str, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[int] = [0]
    to_list = torch.Tensor.tolist

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            reads[-1] += func is torch.ops.aten._local_scalar_dense.default
            return func(*args, **(kwargs or {}))

    class Next(L.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            reads.append(0)

    def counted(tensor: Tensor) -> Any:  # does not dispatch on the CPU
        reads[-1] += 1
        return to_list(tensor)

    monkeypatch.setattr(torch.Tensor, "tolist", counted)
    plugin = fp16() if precision == "fp16" else AmpPrecision(precision)
    module = Toy(lambda params: torch.optim.SGD(params, lr=0.05, fused=fused))
    locator = OverflowLocator()
    with flags_on_a_device(), Count():
        fit(module, plugin, callbacks=[locator, Poison(gradient=[4]), Next()], log_every_n_steps=50)
    assert [report.record.index for report in locator.reports] == [4]
    assert [number for batch, number in enumerate(reads[1:8], start=1) if batch != 4] == [1] * 6


class NoLabels(Toy):
    """The loss of chosen batches is the mean over nothing: NaN, with gradients of 0."""

    empty = (2, 3, 5)

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        each = (self.net(batch).float() - batch.sum(1, keepdim=True)).square()
        return each[: 0 if batch_idx in self.empty else 4].mean()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
def test_a_bad_loss_with_good_gradients_is_said_once_and_its_step_taken(
    precision: str, fused: bool, where_flags_live: str, caplog: pytest.LogCaptureFixture
) -> None:
    def run(*callbacks: Any) -> tuple[L.Trainer, AmpPrecision]:
        plugin = fp16() if precision == "fp16" else AmpPrecision(precision)
        module = NoLabels(lambda params: torch.optim.AdamW(params, lr=0.05, fused=fused))
        return fit(module, plugin, callbacks=list(callbacks)), plugin

    torch.manual_seed(0)
    locator = OverflowLocator()
    watched, plugin = run(locator)
    torch.manual_seed(0)
    assert_same(watched, run()[0])
    (report,) = locator.reports
    assert (plugin.num_steps, plugin.num_skipped) == (8, 0)
    assert (report.record.index, report.record.skipped, report.batch_idx, report.cause) == (2, False, 2, "loss")
    assert report.operation is not None
    assert (report.operation.name, report.operation.kind) == ("mean", "empty")
    assert caplog.text.count("was taken although its loss is not finite") == 1
    assert " skipped (batch" not in caplog.text
    assert watched.callback_metrics["amp/overflows"] == 0


def test_a_bad_loss_in_a_window() -> None:
    locator = OverflowLocator()
    fit(NoLabels, fp16(), callbacks=[locator], accumulate_grad_batches=2)
    (report,) = locator.reports
    assert (report.record.index, report.window, report.batch_idx) == (1, (2, 3), 2)


def test_a_bad_loss_in_manual_optimization() -> None:
    class Manual(NoLabels):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()

    locator = OverflowLocator()
    fit(Manual, fp16(), callbacks=[locator])
    assert [(r.batch_idx, r.record.skipped) for r in locator.reports] == [(2, False)]


def test_a_cause_that_skips_a_later_step_is_only_counted(caplog: pytest.LogCaptureFixture) -> None:
    class Later(NoLabels):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            if batch_idx == 5:  # the same operation; now the gradients are NaN too
                loss = loss * self.net[0].weight.sum()
            return loss

    locator = OverflowLocator()
    with caplog.at_level("INFO"):
        fit(Later, fp16(), callbacks=[locator])
    assert [(r.batch_idx, r.record.skipped) for r in locator.reports] == [(2, False), (5, True)]
    assert caplog.text.count("  fix: ") == 1
    assert "OverflowLocator: 1 step more skipped like a reported one, and not looked into." in caplog.text


def test_the_error_of_a_stuck_run_repeats_the_cause_and_what_helps() -> None:
    class TooLarge(Toy):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            return (self.net(batch) * 1e6).float().mean()

    for callbacks in ([OverflowLocator()], []):
        with pytest.raises(FloatingPointError) as error:
            fit(TooLarge, fp16(max_consecutive_skips=5), callbacks=callbacks)
        text = str(error.value)
        assert "The forward pass itself is broken" not in text
        assert ("Attach `OverflowLocator()`" in text) == (not callbacks)
        found = "The cause, as `OverflowLocator` found it: fp16 overflow in the loss; training_step: mul gave"
        assert (found in text) == bool(callbacks)
        assert ('AmpPrecision("bf16") (tried: works)' in text) == bool(callbacks)


# -- values and learning rates that are not finite ---------------------------------------------------------------------


def test_values_that_are_not_finite_at_the_start_are_named() -> None:
    class Bad(Toy):
        def __init__(self) -> None:
            super().__init__()
            self.net[0].weight.data[1, 1] = math.nan
            self.norm = nn.BatchNorm1d(3)
            self.norm.running_var[1] = math.inf
            self.register_buffer("inverse_std", torch.tensor([1.0, math.nan]))

    with pytest.warns(UserWarning, match="infinity: `net.0.weight`, `inverse_std`, `norm.running_var`. No step"):
        fit(Bad, AmpPrecision("bf16"), batches(1), callbacks=[OverflowLocator()])


def test_masks_and_markers_are_not_named() -> None:
    class Masks(Toy):
        def __init__(self) -> None:
            super().__init__()
            mask = torch.full((4, 4), -math.inf).triu(1)
            self.register_buffer("mask", mask)
            self.frozen_mask = nn.Parameter(mask.clone(), requires_grad=False)
            self.register_buffer("best", torch.tensor(math.inf))
            self.register_buffer("unset", torch.full((3,), math.nan))
            self.register_buffer("distance", torch.tensor([[0, math.inf], [math.inf, 0]]))
            self.register_buffer("empty", torch.zeros(0))

    fit(Masks, AmpPrecision("bf16"), batches(1), callbacks=[OverflowLocator()])


@pytest.mark.parametrize("is_parameter", [True, False])
def test_a_quantized_base_does_not_end_the_fit(is_parameter: bool) -> None:
    class Based(Toy):
        def __init__(self) -> None:
            super().__init__()
            base = torch.ones(8).as_subclass(Quantized)
            if is_parameter:
                self.base = nn.Parameter(base, requires_grad=False)
            else:
                self.register_buffer("base", base)

    locator = OverflowLocator()
    fit(Based, fp16(), callbacks=[locator, Poison(gradient=[2])])
    assert len(locator.reports) == 1


class SetsRate(Toy):
    """The learning rate of one step is not finite."""

    def __init__(self, value: float, skips: bool = False, manual: bool = False) -> None:
        super().__init__(lambda params: torch.optim.AdamW(params, lr=0.01, fused=True))
        self.value, self.skips, self.automatic_optimization = value, skips, not manual

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        optimizer: Any = self.trainer.optimizers[0]
        optimizer.param_groups[0]["lr"] = self.value if batch_idx == 3 else 0.01
        loss = self.loss(batch) * (math.inf if self.skips and batch_idx == 3 else 1.0)
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return None


@pytest.mark.parametrize("manual", [True, False])
@pytest.mark.parametrize(("value", "words"), [(math.nan, "NaN"), (math.inf, "infinite")])
def test_a_learning_rate_that_broke_the_weights_is_the_cause(value: float, words: str, manual: bool) -> None:
    locator = OverflowLocator()
    fit(lambda: SetsRate(value, manual=manual), AmpPrecision("bf16"), callbacks=[locator])
    report = locator.reports[0]
    assert (report.cause, report.record.index, report.bad_rate[0]) == ("learning rate", 4, 3)
    assert f"`net.0.weight` is not finite since step 3, whose learning rate was {words}" in str(report)
    assert repr(Overflow.from_dict(report.as_dict())) == repr(report)


def test_a_skipped_step_uses_no_learning_rate() -> None:
    class Breaks(SetsRate):
        def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
            if batch_idx == 5:
                self.net[0].weight.data[0] = math.nan

    locator = OverflowLocator()
    fit(lambda: Breaks(math.nan, skips=True), AmpPrecision("bf16"), callbacks=[locator])
    assert [report.cause for report in locator.reports[:2]] == ["loss", "weights"]


class Masked(Toy):
    """Has an infinite gradient that a ReLU drops, so that no parameter gets it."""

    def loss(self, batch: Tensor) -> Tensor:
        return super().loss(batch) + torch.sqrt(torch.relu(self.net(batch).float() - 1e4)).mean()


class ClearsAtTheEnd(Manual):
    """Has no gradients left when its step ends; the third one overflows."""

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        self.manual_backward(self.loss(batch) * (1e9 if batch_idx == 2 else 1.0))
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(("module", "scale", "names"), [(Masked, 2.0**24, []), (ClearsAtTheEnd, 8.0, ["backward"])])
def test_gradients_that_the_optimizer_gets_decide(module: Any, scale: float, names: list[str]) -> None:
    locator = OverflowLocator()
    trainer = fit(module, AmpPrecision("fp16", scaler=DynamicLossScaler(scale)), callbacks=[locator])
    assert trainer.precision_plugin.num_skipped > 0
    assert [report.cause for report in locator.reports] == names
