"""The search for the cause of a skipped step, in replays of its batches."""

from __future__ import annotations

import copy
import math
import re
from typing import Any

import lightning as L
import pytest
import torch
from support import Manual, Poison, Records, Toy, assert_same, batches, fit
from torch import Tensor, nn
from zoo.faults import with_row
from zoo.overflows import BadRow, HalfBody, LargeOutput, fp16, with_bad

from lightning_amp import AmpPrecision, DynamicLossScaler, GradientMonitor, OverflowLocator
from lightning_amp.causes._lost_precision import _effect
from lightning_amp.findings import TOTAL, GradientRow, GradientSample
from lightning_amp.shadow import TrainingPass


def test_a_module_with_half_precision_weights() -> None:
    locator = OverflowLocator(max_reports=1)
    loader = torch.utils.data.DataLoader(torch.randn(8, 4).bfloat16(), batch_size=4)
    fit(HalfBody, fp16(1024.0), loader, callbacks=[locator])
    (report,) = locator.reports
    assert (report.cause, report.note) == ("backward", "")
    assert "gave a true gradient of" in str(report)


@pytest.mark.parametrize("index", [2, 3])
def test_accumulation_names_the_batch_of_the_window(index: int) -> None:
    locator = OverflowLocator()
    fit(BadRow, fp16(), with_bad(index), accumulate_grad_batches=2, callbacks=[locator])
    (report,) = locator.reports
    assert (report.batch_idx, report.window, report.num_replayed) == (index, (2, 3), index - 1)
    assert f"(batch {index} of 2 to 3, which make one step)" in str(report)


def test_a_module_that_accumulates_by_itself_has_a_window_too() -> None:
    class EverySecond(BadRow):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any = None) -> None:
            if batch_idx % 2:
                super().optimizer_step(epoch, batch_idx, optimizer, closure)
            else:
                closure()

        def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
            if batch_idx % 2 == 0:
                super().optimizer_zero_grad(epoch, batch_idx, optimizer)

    locator = OverflowLocator()
    fit(EverySecond, fp16(), with_bad(2), callbacks=[locator])
    (report,) = locator.reports
    assert (report.batch_idx, report.window, report.cause) == (2, (2, 3), "loss")


def test_accumulation_divides_the_loss() -> None:
    """2 x 40,000 overflows in fp16, 40,000 does not: without the division the replay would overflow in the forward."""

    class Big(Toy):
        def loss(self, batch: Tensor) -> Tensor:
            return self.net(batch).float().mean() * 20_000

    locator = OverflowLocator()
    plugin = AmpPrecision("fp16", scaler=4.0)
    fit(Big, plugin, batches(4), accumulate_grad_batches=2, callbacks=[locator, Poison(gradient=[1])])
    assert [(r.batch_idx, r.cause) for r in locator.reports] == [(1, "not reproduced")]


def test_a_gradient_edited_by_a_callback_is_not_reproduced_but_its_parameter_is_named() -> None:
    locator = OverflowLocator()
    fit(Toy, fp16(), callbacks=[locator, Poison(gradient=[3])])
    (report,) = locator.reports
    assert (report.cause, report.parameters) == ("not reproduced", ("net.0.weight",))
    assert "look at hooks that edit gradients" in str(report)
    assert "the gradients of `net.0.weight` are not finite" in str(report)


def test_a_step_that_counts_its_calls_is_not_reproduced() -> None:
    """Only the replay of step 2 has the fourth count, and so has only the real step 3."""

    class Counts(Toy):
        count = 0

        def loss(self, batch: Tensor) -> Tensor:
            self.count += 1
            return super().loss(batch) * (torch.inf if self.count == 4 else 1.0)

    locator = OverflowLocator()
    fit(Counts, fp16(), callbacks=[locator, Poison(gradient=[2])])
    assert [(r.record.index, r.cause) for r in locator.reports] == [(2, "not reproduced"), (3, "not reproduced")]
    assert locator.reports[0].note == "the loss is finite in the step, and not in the replay"
    assert "counters in the module, which the replay finds advanced" in str(locator.reports[1])


def test_a_remedy_is_tried_at_the_scale_that_the_run_would_have() -> None:
    for least, works in (1.0, True), (2.0**16, False):
        locator = OverflowLocator(max_reports=1)
        scaler = DynamicLossScaler(2.0**17, min_scale=least)
        fit(LargeOutput, AmpPrecision("fp16", scaler=scaler), batches(1), callbacks=[locator])
        (report,) = locator.reports
        assert (('fp32_modules=["net.0"]', True) in report.remedies) is works
        assert ('note: with fp32_modules=["net.0"], steps are skipped until the scale is ' in str(report)) is works


def test_a_note_says_to_which_scale_a_remedy_lets_the_loss_scale_fall() -> None:
    locator, plugin = OverflowLocator(max_reports=1), AmpPrecision("fp16", scaler=DynamicLossScaler(2.0**17))
    fit(LargeOutput, plugin, batches(1), callbacks=[locator])
    scale = float(eval(locator.reports[0].note.rpartition(" ")[2]))
    steps, cured = Records(), AmpPrecision("fp16", scaler=DynamicLossScaler(2.0**17), fp32_modules=["net.0"])
    fit(LargeOutput, cured, batches(1), callbacks=[steps], max_epochs=15)
    assert [record.scale for record in steps.all if record.applied] == [scale]


class Queue(Toy):
    """The keys of a teacher overflow for one batch, and the step writes them to a queue."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(8, 8).requires_grad_(False)
        self.register_buffer("queue", torch.ones(8))

    def loss(self, batch: Tensor) -> Tensor:
        loss = super().loss(batch.clamp(-9, 9)) * (self.queue * self.teacher(batch).float().mean(0)).mean()
        self.queue.copy_(self.teacher(batch).float().mean(0))
        return loss


@pytest.mark.parametrize("restores", [True, False])
def test_replays_do_not_see_what_earlier_ones_wrote(restores: bool) -> None:
    data = torch.cat(list(batches(6)))
    data[9] = 1e6  # in batch 2
    locator, plugin = (
        OverflowLocator(max_reports=1),
        AmpPrecision("fp16", restore_buffers=["queue"] * restores, scaler=64.0),
    )
    fit(Queue, plugin, torch.utils.data.DataLoader(data, batch_size=4), callbacks=[locator])
    (report,) = locator.reports
    assert report.record.index == 2
    if restores:
        assert (plugin.num_skipped, report.cause, report.module) == (1, "forward", "teacher")
        assert dict(report.remedies)['AmpPrecision("bf16")']
    else:  # the step itself has written to it
        assert (report.cause, report.parameter, report.is_buffer) == ("weights", "queue", True)
        assert "fix: `restore_buffers=['queue']`, if a skipped step wrote to it" in str(report)
        assert "no precision helps" not in str(report)


class Steep(torch.autograd.Function):
    """Multiplies by 1, and the gradient by 1e8."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 1e8


@pytest.mark.parametrize("scaler", [None, 2.0**16])
def test_the_operation_whose_gradient_leaves_the_range_is_named_with_its_size(scaler: float | None) -> None:
    class InTheMiddle(Toy):
        def loss(self, batch: Tensor) -> Tensor:
            hidden = Steep.apply(self.net[:2](batch))
            return self.net[2:](hidden).float().square().mean()

    module, locator = InTheMiddle(), OverflowLocator(max_reports=1)
    fit(lambda: copy.deepcopy(module), AmpPrecision("fp16", scaler=scaler), batches(1), callbacks=[locator])
    (report,) = locator.reports
    hidden = module.net[:2](next(iter(batches(1))))
    hidden.retain_grad()
    module.net[2:](Steep.apply(hidden)).square().mean().backward()
    assert report.operation.name == "Steep"
    assert report.operation.largest_in_fp32 == pytest.approx(float(hidden.grad.abs().max()), rel=0.01)


def test_each_update_of_a_batch_is_looked_at() -> None:
    class Updates(Manual):
        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            for power in (0.5, 1.0):
                self.zero_grad()
                self.manual_backward((0 * self.loss(batch)) ** power)
                self.optimizers().step()

    locator = OverflowLocator(max_reports=1)
    fit(Updates, AmpPrecision("bf16"), batches(1), callbacks=[locator])
    assert (locator.reports[0].cause, locator.reports[0].in_fp32) == ("backward", "not finite")


@pytest.mark.cpu  # a cell is a fused kernel on other devices
def test_an_input_whose_infinity_is_hidden_by_gates_is_named() -> None:
    locator, loader = OverflowLocator(max_reports=1), with_row(6, 1e6)(False)
    fit(lambda: Toy(torch.optim.SGD, nn.GRUCell(8, 1)), fp16(), loader, callbacks=[locator])
    assert "gru_cell takes an input of 1e+06, fp16 ends at 65,504" in str(locator.reports[0])


def test_a_remedy_that_loses_the_gradient_does_not_work() -> None:
    class Chaotic(Toy):
        def loss(self, batch: Tensor) -> Tensor:
            return 1 + torch.sin(1e6 * self.net(batch)).float().mean() / 1e3

    locator = OverflowLocator(max_reports=1)
    fit(Chaotic, fp16(), batches(1), callbacks=[locator])
    assert ('AmpPrecision("bf16")', False) in locator.reports[0].remedies


@pytest.mark.parametrize(("sqnr_db", "works"), [(12.0, False), (19.0, True)])
def test_a_setting_works_if_it_keeps_three_bits(sqnr_db: float, works: bool) -> None:
    row = GradientRow(0, TOTAL, 1.0, 10, 0.0, 0.0, 9.0, sqnr_db, 0.99, 1.0, precision="bf16")
    assert _effect(GradientSample([row._replace(sqnr_db=1.0)]), GradientSample([row]))[0] is works


def test_a_setting_does_not_work_if_it_makes_a_lost_module_worse() -> None:
    total = GradientRow(0, TOTAL, 1.0, 10, 0.0, 0.0, 9.0, 49.0, 0.99, 1.0, precision="bf16")
    lost, worse, better = (total._replace(name="q", sqnr_db=sqnr_db) for sqnr_db in (-0.1, -41.0, 14.0))
    before = GradientSample([lost, total])
    assert not _effect(before, GradientSample([worse, total]))[0]
    assert _effect(before, GradientSample([better, total])) == (True, "; `q` then keeps 2 of 8 bits")
    nothing = GradientSample([lost._replace(largest=1e-36), total])  # no optimizer sees it
    assert (before.bad(), nothing.bad()) == ([lost], [])


def test_a_derivative_that_is_nan_is_no_overflow() -> None:
    class Focal(Toy):
        def loss(self, batch: Tensor) -> Tensor:
            chance = torch.sigmoid(self.net(batch) * 0 + 9)  # in half precision it rounds to 1
            return ((1 - chance).pow(0.5) * self.net(batch)).float().mean()

    locator = OverflowLocator(max_reports=1)
    fit(Focal, fp16(), batches(1), callbacks=[locator])
    assert re.search("(NaN|infinity) in the backward at loss scale .*, in fp16 only", str(locator.reports[0]))


def test_state_in_an_attribute_is_blamed_for_its_nan() -> None:
    class Carries(Toy):
        state: Any = 0.0

        def loss(self, batch: Tensor) -> Tensor:
            hidden = self.net(batch) + self.state
            self.state = hidden.detach() * (math.nan if self.trainer.global_step == 1 else 0)
            return hidden.float().square().mean()

    locator = OverflowLocator(max_reports=1)
    fit(Carries, AmpPrecision("bf16"), batches(4), callbacks=[locator])
    (report,) = locator.reports
    assert "add gave NaN: an input is NaN that no operation of this step made" in str(report)


class Unlabelled(Toy):
    """The mean over no labels is NaN, and has finite gradients; the gradients of the other loss overflow at 2**16."""

    def loss(self, batch: Tensor) -> Tensor:
        none = self.net(batch)[:0].float()
        return 1e3 * super().loss(batch) + none.mean()


def test_a_step_that_fp32_takes_is_called_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        fit(Unlabelled, fp16(2.0**20), callbacks=[OverflowLocator(), GradientMonitor()])
    (text,) = (m for m in caplog.messages if m.startswith("Step"))
    assert "NaN in the loss, in fp32 too, which takes this step because its gradients are finite" in text
    assert "no precision helps" not in text
    (text,) = (m for m in caplog.messages if m.startswith("GradientMonitor"))
    assert "the gradient is infinite or NaN, and in fp32 it is not" in text
    caplog.clear()
    fit(Unlabelled, AmpPrecision("bf16"), callbacks=[OverflowLocator()])
    assert "(batch 0): with the weights after it, NaN in the loss, in fp32 too\n" in caplog.text


class Drops(Toy):
    def __init__(self) -> None:
        super().__init__(net=nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 1)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        out = self.net(batch).float()
        self.draws = [*getattr(self, "draws", []), float(out.detach().sum())]
        return out.square().mean() * torch.where(batch.abs().max() > 1e3, torch.inf, 1.0)


def test_the_replay_draws_the_same_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    original = TrainingPass.run

    def run(self: TrainingPass, *args: Any, **kwargs: Any) -> Any:
        out = original(self, *args, **kwargs)
        seen.append(self.module.draws[-1])
        return out

    monkeypatch.setattr(TrainingPass, "run", run)
    locator = OverflowLocator()
    trainer = fit(Drops, fp16(), with_bad(4), callbacks=[locator])
    assert seen[0] == trainer.lightning_module.draws[4]  # the other replays are in other precisions
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
    assert "cause not looked for\n" in str(report)
    assert "every replay" not in str(report)
    assert "fix:" not in str(report)
    assert report.parameters
    assert plugin.num_steps == 7


@pytest.mark.parametrize(
    ("error", "why"), [(ValueError("no fp32"), "ValueError: no fp32"), (MemoryError(), "out of memory")]
)
def test_the_cause_is_reported_although_the_run_in_fp32_fails(
    error: Exception, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> float:
        raise error

    monkeypatch.setattr("lightning_amp.shadow._training_pass.fp32_throughout", fails)
    locator = OverflowLocator(max_reports=1)
    fit(BadRow, fp16(), with_bad(2), callbacks=[locator])
    (report,) = locator.reports
    assert (report.cause, report.in_fp32, report.remedies) == ("loss", "", ())
    assert "where gave infinity" in str(report)
    assert report.note == f"it could not be run in fp32 ({why})"


def test_gan() -> None:
    class Gan(Manual):
        def __init__(self) -> None:
            super().__init__()
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
    assert report.module == "other"
    assert set(report.parameters) == {"other.weight", "other.bias"}
    alone = fit(Gan, fp16())
    assert_same(watched, alone)
    for one, two in zip(watched.optimizers, alone.optimizers, strict=True):
        assert_same(one.state_dict(), two.state_dict())
    assert (
        watched.lr_scheduler_configs[0].scheduler.state_dict() == alone.lr_scheduler_configs[0].scheduler.state_dict()
    )
