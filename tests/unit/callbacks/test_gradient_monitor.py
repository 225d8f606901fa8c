from __future__ import annotations

import math
import re
from typing import Any

import lightning as L
import pytest
import torch
from support import Manual, Recorder, Toy, batches, fit, stock
from torch import Tensor, nn
from zoo.overflows import fp16

from lightning_amp import AmpPrecision, GradientMonitor, MetricComparison
from lightning_amp.callbacks import _gradient_monitor
from lightning_amp.precision import unscale_

KEYS = {_gradient_monitor.UNDERFLOW_FRACTION, _gradient_monitor.HEADROOM_BITS, _gradient_monitor.GRADIENT_SQNR_DB}


class Times(Toy):
    factor = 1.0

    def loss(self, batch: Tensor) -> Tensor:
        return super().loss(batch) * self.factor


def test_keys_are_those_of_the_docstring() -> None:
    recorder = Recorder()
    trainer = fit(Toy, fp16(), batches(5), logger=recorder, callbacks=[GradientMonitor(2)])
    rows = [(step, row) for step, row in recorder.rows if any(key.startswith("amp/") for key in row)]
    assert [set(row) for _, row in rows] == [KEYS] * 3
    assert [step for step, _ in rows] == [1, 2, 4]
    assert {key for key in trainer.callback_metrics if key.startswith("amp/")} == KEYS
    assert all(f"`{key}`" in GradientMonitor.__doc__ for key in KEYS)


def test_works_with_lightnings_plugin() -> None:
    monitor = GradientMonitor()
    fit(Toy, stock("fp16", init_scale=32.0), callbacks=[monitor])
    assert monitor.table[0].scale == 32


def test_a_step_that_cannot_run_twice_ends_the_samples() -> None:
    class Once(Toy):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            if type(self.trainer) is not L.Trainer:
                raise ZeroDivisionError("only once")
            return self.loss(batch)

    monitor = GradientMonitor(2)
    with pytest.warns(UserWarning, match=r"run a second time \(ZeroDivisionError: only once\)") as caught:
        trainer = fit(Once, fp16(), callbacks=[monitor])
    assert sum("second time" in str(w.message) for w in caught) == 1
    assert trainer.global_step == 8
    assert monitor.recommended_scale is None


def test_a_gradient_that_is_fp32_in_mixed_precision_does_not_overflow(caplog: pytest.LogCaptureFixture) -> None:
    class Parametrized(Toy):
        def __init__(self) -> None:
            super().__init__()
            self.offset = nn.Parameter(torch.zeros(()))

        def loss(self, batch: Tensor) -> Tensor:
            return 0.01 * super().loss(batch) + 1.5 * self.offset

    monitor = GradientMonitor()
    with caplog.at_level("INFO"):
        trainer = fit(Parametrized, AmpPrecision("fp16"), callbacks=[monitor])
    assert trainer.precision_plugin.num_skipped == 0
    assert monitor.table.last[-1].headroom_bits < 0
    assert "the gradient keeps" in caplog.text
    assert "it fits" not in caplog.text


@pytest.mark.filterwarnings("ignore:.*returned `None`")  # Lightning says so once per process
def test_no_gradients() -> None:
    class Skips(Toy):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            return None

    monitor = GradientMonitor()
    fit(Skips, AmpPrecision("bf16"), callbacks=[monitor])
    assert len(monitor.table) == 0


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"every_n_steps": 0}, "`every_n_steps` must be an integer of 1 or more, got 0"),
        ({"every_n_steps": True}, "got True"),
        ({"by": "layer"}, '`by` must be "module" or "parameter", got \'layer\''),
    ],
)
def test_arguments_are_checked(kwargs: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        GradientMonitor(**kwargs)


class Infinite(Times):
    factor = math.inf


class OnlyInHalf(Toy):
    """Its gradients are zero in fp32, and NaN in half precision."""

    def loss(self, batch: Tensor) -> Tensor:
        out = self.net(batch)
        return (out * (0 if out.dtype == torch.float32 else math.nan)).float().mean()


@pytest.mark.parametrize(
    ("module", "text"),
    [
        (Infinite, "the gradient is (infinite|NaN) in fp32 too: no precision and no loss scale helps"),
        (OnlyInHalf, "the forward is infinite or NaN, and in fp32 it is not"),
    ],
)
def test_gradients_that_are_not_finite_are_not_called_zero(
    module: Any, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    monitor = GradientMonitor(2)
    with caplog.at_level("INFO"):
        fit(module, AmpPrecision("bf16"), batches(2), callbacks=[monitor])
    assert "all gradients are zero" not in caplog.text
    assert re.search(text, caplog.text)
    assert module is OnlyInHalf or monitor.recommended_scale is None


def test_a_bf16_run_prints_nothing_about_fp16(caplog: pytest.LogCaptureFixture) -> None:
    monitor = GradientMonitor()
    with caplog.at_level("INFO"):
        fit(Toy, AmpPrecision("bf16"), callbacks=[monitor])
    (text,) = (m for m in caplog.messages if m.startswith("GradientMonitor"))
    assert re.fullmatch(
        r"GradientMonitor, step 8: the gradient keeps 7 of 8 bits \(4\d dB\), in `net.0` \d of 8 bits.", text
    )
    table = str(monitor.table)
    assert "of 8 bits" in table
    assert "headroom" not in table
    assert "to zero" not in table
    assert monitor.recommended_scale is not None


@pytest.mark.parametrize("plugin", [lambda: AmpPrecision("fp16"), lambda: stock("fp16")])
def test_the_first_sample_follows_the_first_applied_step(plugin: Any) -> None:
    monitor = GradientMonitor(100)
    plugin = plugin()
    fit(Toy, plugin, batches(30), callbacks=[monitor], max_epochs=1)
    step, last = dict.fromkeys(row.step for row in monitor.table)  # and the last batch
    assert last == 30
    scale = monitor.table[0].scale
    assert scale < 2.0**16  # some steps were skipped before
    assert step == 16 - math.log2(scale) + 1
    assert monitor.table[-1].sqnr_db > 40


def test_a_run_of_few_steps_is_not_judged_by_its_first_step_alone() -> None:
    class Fades(Toy):
        def loss(self, batch: Tensor) -> Tensor:
            return super().loss(batch) * (1.0 if self.trainer.global_step < 3 else 1e-9)

    monitor = GradientMonitor()
    fit(Fades, fp16(), callbacks=[monitor])
    first, last = (row for row in monitor.table if row.name == "(all)")
    assert (first.step, last.step) == (1, 8)
    assert first.underflow_fraction < 0.01
    assert last.underflow_fraction > 0.5


@pytest.mark.parametrize("callback", [GradientMonitor, MetricComparison])
def test_without_mixed_precision_one_line_says_so(callback: Any, caplog: pytest.LogCaptureFixture) -> None:
    found = callback()
    with caplog.at_level("INFO"):
        fit(Toy, None, callbacks=[found])
    (text,) = (m for m in caplog.messages if callback.__name__ in m)
    assert "stands aside: this run has no mixed precision" in text
    assert len(found.table) == 0


def test_an_infinite_gradient_that_reaches_no_parameter_does_not_count(caplog: pytest.LogCaptureFixture) -> None:
    class Masked(Toy):
        def loss(self, batch: Tensor) -> Tensor:
            return super().loss(batch) + torch.sqrt(torch.relu(self.net(batch) - 1e4)).mean()

    with caplog.at_level("INFO"):
        fit(Masked, AmpPrecision("bf16"), callbacks=[GradientMonitor(2)])
    (text,) = (m for m in caplog.messages if m.startswith("GradientMonitor"))
    assert "keeps" in text


def test_a_loss_that_computes_in_fp32_does_not_use_up_the_headroom() -> None:
    """`cross_entropy` casts its inputs, so that the scale itself, which fp16 cannot hold, is a gradient in fp32."""

    class Classifies(Toy):
        def loss(self, batch: Tensor) -> Tensor:
            out = self.net(batch)
            return nn.functional.cross_entropy(out, torch.zeros(len(out), dtype=torch.long, device=out.device))

    monitor, plugin = GradientMonitor(2), AmpPrecision("fp16", scaler=2.0**16)
    net = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
    fit(lambda: Classifies(net=net), plugin, callbacks=[monitor])
    assert plugin.num_skipped == 0
    assert min(row.headroom_bits for row in monitor.table) > 0.1


class Clips(Manual):
    unscales = False

    def edit(self, optimizer: Any, batch_idx: int) -> None:
        if self.unscales:
            unscale_(self.trainer, optimizer)
        self.clip(self.parameters(), 0.1)

    clip = staticmethod(nn.utils.clip_grad_norm_)


class ByValue(Clips):
    clip = staticmethod(nn.utils.clip_grad_value_)


class Unscaled(Clips):
    unscales = True


class WithoutTheScale(Clips):
    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.loss(batch).backward()
        self.clip(self.parameters(), 0.1)
        optimizer.step()


class Assigned(Manual):
    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer, found = self.optimizers(), list[Any]()
        for part in batch.chunk(2):
            optimizer.zero_grad()
            self.manual_backward(self.loss(part))
            unscale_(self.trainer, optimizer)
            found.append([p.grad for p in self.parameters()])
        for parameter, *both in zip(self.parameters(), *found, strict=True):
            parameter.grad = sum(both)
        optimizer.step()


class PlainFirst(Manual):
    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        self.optimizers().zero_grad()
        sum(p.square().sum() for p in self.parameters()).backward()
        self.manual_backward(self.loss(batch))
        self.optimizers().step()


class OneOfTwo(Clips):
    """Clips the gradients of the first of two optimizers while they are scaled."""

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.net[0].parameters(), 0.01), torch.optim.SGD(self.net[2].parameters(), 0.01)]

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        first, second = self.optimizers()
        self.manual_backward(self.loss(batch))
        nn.utils.clip_grad_norm_(self.net[0].parameters(), 0.1)
        for optimizer in (first, second):
            optimizer.step()
            optimizer.zero_grad()


class InTheHook(Toy):
    """Clips in the hook that the backward calls."""

    unscales = False

    def on_after_backward(self) -> None:
        if self.unscales:
            unscale_(self.trainer, self.optimizers())
        self.log("norm", nn.utils.clip_grad_norm_(self.parameters(), 0.1))


class UnscaledInTheHook(InTheHook):
    unscales = True


class Short(Toy):
    """Its gradients are a sum of values that bfloat16 rounds down, so that they are shorter than in fp32."""

    def loss(self, batch: Tensor) -> Tensor:
        out = self.net(batch)
        return super().loss(batch) + (0 if out.dtype == torch.float32 else -0.6) * super().loss(batch)

    def on_after_backward(self) -> None:
        assert all(p.grad.isfinite().all() for p in self.parameters())


@pytest.mark.parametrize("plugin", [fp16, lambda: AmpPrecision("bf16")])
def test_a_hook_that_only_reads_is_not_blamed(plugin: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        fit(Short, plugin(), callbacks=[GradientMonitor(2)])
    (text,) = (m for m in caplog.messages if m.startswith("GradientMonitor"))
    assert "the gradient keeps 0 of " in text
    assert "clips scaled gradients" not in text


@pytest.mark.parametrize("module", [Clips, ByValue, OneOfTwo, InTheHook])
def test_clipping_of_scaled_gradients_is_named_with_its_cure(module: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        fit(module, fp16(), callbacks=[GradientMonitor(2)])
    (text,) = (m for m in caplog.messages if m.startswith("GradientMonitor"))
    assert re.match(r"GradientMonitor, step [24], .* times its length", text), "it is said at the second sample"
    assert "`training_step` or `on_after_backward` clips scaled gradients" in text
    assert "fix: `lightning_amp.precision.unscale_(self.trainer, optimizer)` before code that clips gradients" in text


@pytest.mark.parametrize("module", [Unscaled, WithoutTheScale, UnscaledInTheHook, Assigned, PlainFirst])
@pytest.mark.parametrize("plugin", [fp16, lambda: AmpPrecision("bf16")])
def test_clipping_of_true_gradients_is_not_noticed(plugin: Any, module: Any) -> None:
    monitor = GradientMonitor(2)
    fit(module, plugin(), callbacks=[monitor])
    assert all(row.sqnr_db > 40 and abs(row.norm_ratio - 1) < 0.02 for row in monitor.table)


class Adversaries(Manual):
    """The loss of the second optimizer adds to the gradients with which the first has stepped, as in most GANs."""

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        for optimizer, sign in zip(self.optimizers(), (1, -1), strict=True):
            optimizer.zero_grad()
            self.manual_backward(sign * self.loss(batch))
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.net[i].parameters(), lr=0.01) for i in (2, 0)]


def test_a_vector_of_losses_with_its_own_gradient_is_sampled() -> None:
    class Vector(Manual):
        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.net(batch).float().square()[:3, 0], gradient=torch.ones(3, device=self.device))
            optimizer.step()

    monitor = GradientMonitor(2)
    fit(Vector, fp16(), callbacks=[monitor])
    assert all(row.sqnr_db > 40 for row in monitor.table)
    assert len(monitor.table) > 0


def test_a_later_backward_does_not_change_the_gradient_of_a_step() -> None:
    monitor = GradientMonitor()
    fit(Adversaries, AmpPrecision("fp16"), batches(6), callbacks=[monitor])
    assert min(row.sqnr_db for row in monitor.table) > 30
