from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from support import Poison, Recorder, Toy, assert_same, batches, fit, stock
from torch import Tensor, nn

from lightning_amp import AmpPrecision, DynamicLossScaler, OverflowLocator, StepRecord
from lightning_amp.callbacks import _overflow_locator
from lightning_amp.reports._overflow_report import OverflowReport
from lightning_amp.shadow import _overflow_search
from lightning_amp.tracing import replay


def fp16(scale: float = 64.0, **kwargs: Any) -> AmpPrecision:
    return AmpPrecision("fp16", scaler=DynamicLossScaler(scale, **kwargs))


class BadRow(Toy):
    """The loss of the batches that hold a row of the value `marker` is not finite."""

    def loss(self, batch: Tensor) -> Tensor:
        return super().loss(batch) * torch.where(batch.abs().max() > 1e3, torch.inf, 1.0)


def with_bad(*indices: int, count: int = 8) -> Any:
    data = torch.cat(list(batches(count)))
    for index in indices:
        data[4 * index] = 1e4
    return torch.utils.data.DataLoader(data, batch_size=4)


def test_keys_are_those_of_the_docstring() -> None:
    recorder = Recorder()
    trainer = fit(BadRow, fp16(), with_bad(1, 2), logger=recorder, callbacks=[OverflowLocator(max_reports=1)])
    rows = [row for row in recorder.rows if any(key.startswith("amp/") for key in row)]
    assert {key for row in rows for key in row} == {"step", _overflow_locator.OVERFLOWS}
    assert f"`{_overflow_locator.OVERFLOWS}`" in OverflowLocator.__doc__
    assert [row["amp/overflows"] for row in rows] == [0, 1, 2, 2, 2, 2, 2, 2]
    assert trainer.callback_metrics["amp/overflows"] == 2


def test_healthy_runs_report_nothing(caplog: pytest.LogCaptureFixture) -> None:
    locator = OverflowLocator()
    fit(Toy, fp16(), callbacks=[locator])
    assert locator.reports == []
    assert [r for r in caplog.records if r.levelno >= logging.WARNING] == []


def test_report_has_everything(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    locator = OverflowLocator(dirpath=tmp_path / "out")
    fit(BadRow, fp16(), with_bad(5), callbacks=[locator])
    (report,) = locator.reports
    assert report.record == StepRecord(5, 0, 64.0, 64.0, skipped=True, reason="loss")
    assert (report.rank, report.world_size, report.epoch, report.batch_idx) == (0, 1, 0, 5)
    assert (report.window, report.num_replayed, report.cause, report.note) == ((5, 5), 1, "loss", "")
    assert report.parameters[0] == "net.0.weight"
    (file,) = (tmp_path / "out").iterdir()
    assert file.name == "overflow_step00005_rank0.json"
    assert json.loads(file.read_text()) == json.loads(report.to_json())
    assert str(report) in caplog.text
    assert "step 5 was skipped: epoch 0, batch 5, loss scale 64\n  cause: the loss: every module's" in str(report)
    with pytest.raises(AttributeError):
        report.rank = 1


class HalfBody(L.LightningModule):
    """Frozen weights, and features, that are bfloat16 already."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4).bfloat16().requires_grad_(False), nn.Linear(4, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return 1e6 * self.head(self.body(batch)).float().square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def test_half_precision_that_was_there_before_is_no_reason_to_give_up() -> None:
    locator = OverflowLocator(max_reports=1)
    loader = torch.utils.data.DataLoader(torch.randn(8, 4).bfloat16(), batch_size=4)
    fit(HalfBody, fp16(1024.0), loader, callbacks=[locator])
    (report,) = locator.reports
    assert (report.cause, report.note) == ("backward", "")
    assert "largest true gradient of this batch is" in str(report)


def test_at_most_max_reports_then_silent_and_free(caplog: pytest.LogCaptureFixture) -> None:
    locator, plugin = OverflowLocator(max_reports=2), fp16()
    waits: list[tuple[int, bool]] = []

    class Look(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
            waits.append((args[-1], any(s.at_once for s in plugin.records.subscriptions)))

    fit(BadRow, plugin, with_bad(1, 2, 4), callbacks=[locator, Look()])
    assert [r.batch_idx for r in locator.reports] == [1, 2]
    assert waits == [(i, i < 2) for i in range(8)]
    assert not locator._window
    assert caplog.text.count("was skipped") == 2
    assert "2 skipped steps looked into; no more in this run" in caplog.text
    assert plugin.num_skipped == 3


def test_none_is_none() -> None:
    locator, plugin = OverflowLocator(max_reports=0), fp16()
    fit(BadRow, plugin, with_bad(1), callbacks=[locator])
    assert locator.reports == []
    assert locator.state_dict() == {"num_overflows": 1, "num_located": 0, "reports": []}


@pytest.mark.parametrize("index", [2, 3])
def test_accumulation_names_the_batch_of_the_window(index: int) -> None:
    locator = OverflowLocator()
    fit(BadRow, fp16(), with_bad(index), accumulate_grad_batches=2, callbacks=[locator])
    (report,) = locator.reports
    assert (report.batch_idx, report.window, report.num_replayed) == (index, (2, 3), index - 1)
    assert f"batch {index} (of batches 2 to 3, which make one step)" in str(report)


def test_a_window_that_is_too_large_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_overflow_search, "_WINDOW_BYTES", 300)  # two batches of 128 bytes
    locator = OverflowLocator()
    fit(BadRow, fp16(), with_bad(0, 7), accumulate_grad_batches=4, callbacks=[locator])
    assert [(r.batch_idx, r.cause) for r in locator.reports] == [(3, "not reproduced"), (7, "loss")]
    assert locator.reports[0].window == (0, 3)


def test_accumulation_divides_the_loss() -> None:
    """2 x 40,000 overflows in fp16, 40,000 does not: a replay without the division would find what was not there."""

    class Big(Toy):
        def loss(self, batch: Tensor) -> Tensor:
            return self.net(batch).float().mean() * 20_000

    locator = OverflowLocator()
    plugin = AmpPrecision("fp16", scaler=4.0)
    fit(Big, plugin, batches(4), accumulate_grad_batches=2, callbacks=[locator, Poison(gradient=[1])])
    assert [(r.batch_idx, r.cause) for r in locator.reports] == [(1, "not reproduced")]


def test_what_only_a_callback_did_is_not_found_but_its_parameter_is() -> None:
    locator = OverflowLocator()
    fit(Toy, fp16(), callbacks=[locator, Poison(gradient=[3])])
    (report,) = locator.reports
    assert (report.cause, report.parameters) == ("not reproduced", ("net.0.weight",))
    assert "look at what edits gradients" in str(report)


def test_the_scale_that_would_fit() -> None:
    locator = OverflowLocator()
    fit(Toy, AmpPrecision("fp16", scaler=DynamicLossScaler(2.0**24)), batches(2), callbacks=[locator])
    report = locator.reports[0]
    assert report.cause == "backward"
    advised = float(eval(str(report).split("fits at a scale of ")[1].split(",")[0]))  # such as 2**13
    plugin = AmpPrecision("fp16", scaler=advised)
    fit(Toy, plugin, batches(1), callbacks=[locator])
    assert plugin.num_skipped == 0
    plugin = AmpPrecision("fp16", scaler=advised * 4)
    fit(Toy, plugin, batches(1), callbacks=[locator])
    assert plugin.num_skipped == 1


def test_a_scale_that_fits_already_is_not_advised() -> None:
    """A huge input meets saturated gates: its weight gradient is 0 times infinity in fp16, and small in fp32."""

    class Saturates(Toy):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.GRUCell(8, 8)

        def loss(self, batch: Tensor) -> Tensor:
            return self.cell(batch).float().square().mean()

    batch = torch.randn(4, 8)
    batch[0, 0] = 1e30
    data = torch.utils.data.DataLoader(batch, batch_size=4)
    locator = OverflowLocator()
    fit(Saturates, AmpPrecision("fp16", scaler=64.0), data, callbacks=[locator])
    (report,) = locator.reports
    assert report.cause == "backward"
    assert "which fits; something on the way to it does not" in str(report)
    assert "there by itself" not in str(report)
    advised = AmpPrecision("bf16")
    fit(Saturates, advised, data)
    assert advised.num_skipped == 0


def test_bf16_is_not_advised_in_bf16() -> None:
    class Explodes(Toy):
        def __init__(self) -> None:
            super().__init__(net=nn.Linear(8, 1))
            nn.init.ones_(self.net.weight)

        def loss(self, batch: Tensor) -> Tensor:
            return self.net(batch).float().sum()  # gradients of finite numbers would be taken

    data = torch.utils.data.DataLoader(torch.full((4, 8), 3e38), batch_size=4)
    locator = OverflowLocator()
    fit(Explodes, AmpPrecision("bf16"), data, callbacks=[locator])
    (report,) = locator.reports
    assert (report.cause, report.diagnosis.dtype) == ("forward", "bfloat16")
    assert "'fp32' holds no larger numbers than bfloat16" in str(report)
    assert "'bf16'" not in str(report)


class Drops(Toy):
    def __init__(self) -> None:
        super().__init__(net=nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 1)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        out = self.net(batch).float()
        self.draws = [*getattr(self, "draws", []), float(out.detach().sum())]
        return out.square().mean() * torch.where(batch.abs().max() > 1e3, torch.inf, 1.0)


def test_the_replay_draws_the_same_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    original = _overflow_search._run

    def run(trainer: Any, replay: Any, step: Any, scale: float) -> Any:
        out = original(trainer, replay, step, scale)
        seen.append(replay.module.draws[-1])
        return out

    monkeypatch.setattr(_overflow_search, "_run", run)
    locator = OverflowLocator()
    trainer = fit(Drops, fp16(), with_bad(4), callbacks=[locator])
    assert seen == [trainer.lightning_module.draws[4]]
    assert len(trainer.lightning_module.draws) == 8


def test_edited_batches_are_copied_from_the_second_on() -> None:
    class Edits(BadRow):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            loss = self.loss(batch)
            batch.zero_()
            return loss

    locator = OverflowLocator()
    fit(Edits, fp16(), with_bad(0, 3), callbacks=[locator])
    first, second = locator.reports
    assert (first.cause, "edited its batch in place" in first.note) == ("not reproduced", True)
    assert (second.cause, second.note) == ("loss", "")


def test_a_step_that_cannot_run_twice_is_excused() -> None:
    class Once(BadRow):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            if type(self.trainer) is not L.Trainer:
                raise ZeroDivisionError("only once")
            return self.loss(batch)

    locator, plugin = OverflowLocator(), fp16()
    fit(Once, plugin, with_bad(1), callbacks=[locator])
    (report,) = locator.reports
    assert report.note == "the training step could not be run a second time (ZeroDivisionError: only once)"
    assert "cause: not looked for\n" in str(report)
    assert "every replay" not in str(report)
    assert "try:" not in str(report)
    assert report.parameters
    assert plugin.num_steps == 7


@pytest.mark.parametrize(
    ("error", "why"), [(ValueError("no fp32"), "ValueError: no fp32"), (MemoryError(), "out of memory")]
)
def test_a_cause_that_is_known_stays_if_it_cannot_be_measured(
    error: Exception, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> float:
        raise error

    monkeypatch.setattr("lightning_amp.shadow._overflow_search._largest_true_gradient", fails)
    locator = OverflowLocator(max_reports=1)
    loader = torch.utils.data.DataLoader(torch.randn(8, 4).bfloat16(), batch_size=4)
    fit(HalfBody, fp16(1024.0), loader, callbacks=[locator])
    (report,) = locator.reports
    assert (report.cause, report.largest_gradient) == ("backward", None)
    assert report.note == f"the true gradients could not be measured in fp32 ({why})"


def test_the_last_of_too_many_skips_is_reported_too() -> None:
    locator = OverflowLocator()
    with pytest.raises(FloatingPointError):
        fit(BadRow, fp16(max_consecutive_skips=3), with_bad(2, 3, 4), callbacks=[locator])
    assert [r.batch_idx for r in locator.reports] == [2, 3, 4]


def test_gan() -> None:
    class Gan(Toy):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.other = nn.Linear(8, 1)

        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            a, b = self.optimizers()
            schedule = self.lr_schedulers()
            for opt, net, factor in ((a, self.net, 1.0), (b, self.other, 1e9 if batch_idx == 2 else 1.0)):
                with opt.toggle_model():
                    opt.zero_grad()
                    self.manual_backward(net(batch).float().square().mean() * factor)
                    self.clip_gradients(opt, 1.0, "norm")
                    opt.step()
                    for p in net.parameters():
                        p.data.clamp_(-2, 2)
            schedule.step()

        def configure_optimizers(self) -> Any:
            a = torch.optim.SGD(self.net.parameters(), lr=0.01)
            b = torch.optim.Adam(self.other.parameters(), lr=0.01)
            return [a, b], [torch.optim.lr_scheduler.StepLR(a, 2)]

    locator = OverflowLocator()
    watched = fit(Gan, fp16(), callbacks=[locator])
    (report,) = locator.reports
    assert (report.record.optimizer_idx, report.batch_idx, report.cause) == (1, 2, "backward")
    assert report.diagnosis.module == "other"
    assert set(report.parameters) == {"other.weight", "other.bias"}
    alone = fit(Gan, fp16())
    assert_same(watched, alone)
    for one, two in zip(watched.optimizers, alone.optimizers, strict=True):
        assert_same(one.state_dict(), two.state_dict())
    assert (
        watched.lr_scheduler_configs[0].scheduler.state_dict() == alone.lr_scheduler_configs[0].scheduler.state_dict()
    )


def test_bundle(tmp_path: Path) -> None:
    locator = OverflowLocator(dirpath=tmp_path, save_bundles=True)
    net = lambda: nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 1))  # noqa: E731
    plugin = AmpPrecision("fp16", scaler=DynamicLossScaler(2.0**24))
    fit(lambda: Toy(net=net()), plugin, batches(1), callbacks=[locator])
    path = tmp_path / "overflow_step00000_rank0.pt"
    again = replay(path, lambda: Toy(net=net()), precision="fp16")
    report = locator.reports[0]
    assert (again.diagnosis, again.parameters) == (report.diagnosis, report.parameters)
    fp32 = replay(path, lambda: Toy(net=net()))
    assert fp32.diagnosis.cause == "none"
    assert fp32.headroom_bits < 0
    lower = 2.0**24 * 2.0 ** int(fp32.headroom_bits - 4)
    assert replay(path, lambda: Toy(net=net()), precision="fp16", scale=lower).diagnosis.cause == "none"


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    locator = OverflowLocator(dirpath=tmp_path / "file" / "out")
    with pytest.warns(UserWarning, match="could not write to .* Training is not affected") as caught:
        fit(BadRow, fp16(), with_bad(1, 2), callbacks=[locator])
    assert sum("could not write" in str(w.message) for w in caught) == 1
    assert len(locator.reports) == 2


def test_without_our_plugin_it_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        fit(Toy, stock("fp16", init_scale=64.0), batches(2), callbacks=[OverflowLocator()])
    assert "`OverflowLocator` has nothing to look at: the precision plugin MixedPrecision" in caplog.text


@pytest.mark.filterwarnings(
    "ignore:You are using the `dataloader_iter` step flavor", "ignore:Found `dataloader_iter` argument"
)
def test_dataloader_iter_is_counted_only(caplog: pytest.LogCaptureFixture) -> None:
    class Iterates(Toy):
        def training_step(self, dataloader_iter: Any) -> Any:
            batch, _, _ = next(dataloader_iter)
            return self.loss(batch)

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
    assert [row["amp/overflows"] for row in recorder.rows if "amp/overflows" in row] == [1, 2, 3, 3]
    assert len(locator.reports) == min(max_reports, 3)


@pytest.mark.parametrize("max_reports", [0, 1])
def test_the_count_goes_on_in_a_second_fit(max_reports: int) -> None:
    locator = OverflowLocator(max_reports=max_reports)
    trainer = fit(Toy, fp16(), callbacks=[locator, Poison(gradient=[2, 7, 8, 15])], log_every_n_steps=3)
    assert locator.state_dict()["num_overflows"] == 2
    trainer.fit_loop.max_epochs = 2
    trainer.fit(trainer.lightning_module, batches())
    assert locator.state_dict()["num_overflows"] == 4


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


def test_bundles_need_a_folder() -> None:
    with pytest.raises(ValueError, match="pass `dirpath`"):
        OverflowLocator(save_bundles=True)


def test_count_and_reports_continue_after_a_resume(tmp_path: Path) -> None:
    trainer = fit(BadRow, fp16(), with_bad(1, 2), callbacks=[OverflowLocator()])
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    locator = OverflowLocator()
    trainer = fit(BadRow, fp16(), with_bad(3), callbacks=[locator], max_epochs=2, ckpt_path=tmp_path / "a.ckpt")
    assert trainer.callback_metrics["amp/overflows"] == 3
    assert [(r.epoch, r.batch_idx) for r in locator.reports] == [(0, 1), (0, 2), (1, 3)]


class RootOfZero(Toy):
    """The derivative of a root at 0 is infinite, and times the 0 before it NaN, in every precision."""

    def loss(self, batch: Tensor) -> Tensor:
        out = self.net(batch).float()
        return out.square().mean() + (out - out.detach()).square().sum().sqrt()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_no_precision_is_advised_for_what_fp32_cannot_either(precision: str) -> None:
    locator = OverflowLocator()
    fit(RootOfZero, AmpPrecision(precision), batches(1), callbacks=[locator])
    (report,) = locator.reports
    assert report.cause == "backward"
    assert "no precision can help" in str(report)
    assert "'bf16'" not in str(report)
    assert ("the scaled backward alone" in str(report)) == (precision == "fp16")


def test_bf16_is_not_advised_in_bf16_for_a_gradient() -> None:
    """Two numbers that are the same in bfloat16 only: the advice is to compute them in fp32, which helps."""

    class Close(Toy):
        def __init__(self) -> None:
            super().__init__()
            self.other = nn.Linear(8, 1)

        def loss(self, batch: Tensor) -> Tensor:
            with torch.no_grad():
                self.other.load_state_dict({"weight": torch.ones(1, 8), "bias": torch.zeros(1)})
            out = self.other(batch)
            return (out - self.other(batch * (1 + 1e-4)).detach()).float().square().sum().sqrt()

    data = torch.utils.data.DataLoader(torch.ones(4, 8), batch_size=4)
    locator = OverflowLocator()
    fit(Close, AmpPrecision("bf16"), data, callbacks=[locator])
    (report,) = locator.reports
    assert report.cause == "backward"
    assert "`fp32_modules`" in str(report)
    assert "'bf16'" not in str(report)
    advised = AmpPrecision("bf16", fp32_modules=["other"])
    fit(Close, advised, data)
    assert (advised.num_steps, advised.num_skipped) == (1, 0)


@pytest.mark.parametrize("scaler", [2.0**22, DynamicLossScaler(2.0**22, min_scale=2.0**22)], ids=["static", "floor"])
def test_a_scale_that_does_not_fall_is_not_said_to(scaler: Any) -> None:
    locator = OverflowLocator()
    plugin = AmpPrecision("fp16", scaler=scaler)
    fit(Toy, plugin, batches(4), callbacks=[locator])
    assert plugin.num_skipped == 4
    report = str(locator.reports[0])
    assert "there by itself" not in report
    advised = float(eval(report.partition("a loss scale of ")[2].partition(" or below")[0]))  # such as 2**13
    plugin = AmpPrecision("fp16", scaler=advised)
    fit(Toy, plugin, batches(1))
    assert plugin.num_skipped == 0


def test_reports_of_older_checkpoints_still_load() -> None:
    locator = OverflowLocator()
    fit(BadRow, fp16(), with_bad(5), callbacks=[locator])
    (report,) = locator.reports
    values = report.as_dict()
    del values["precision"]
    assert OverflowReport.from_dict(values).precision == ""
