from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from support import Recorder, Toy, assert_same, batches, fit, scaled_fp32, stock
from torch import Tensor, nn

from lightning_amp import AmpPrecision, DynamicLossScaler, GradientMonitor
from lightning_amp.callbacks import _gradient_monitor
from lightning_amp.reports import _gradient_table
from lightning_amp.reports._gradient_table import GradientRow, GradientTable
from lightning_amp.scaling import OptimizerSteps
from lightning_amp.shadow import _gradient_sample

KEYS = {_gradient_monitor.UNDERFLOW_FRACTION, _gradient_monitor.HEADROOM_BITS, _gradient_monitor.GRADIENT_SQNR_DB}


def fp16(scale: float = 64.0, **kwargs: Any) -> AmpPrecision:
    return AmpPrecision("fp16", scaler=DynamicLossScaler(scale, **kwargs))


class Times(Toy):
    factor = 1.0

    def loss(self, batch: Tensor) -> Tensor:
        return super().loss(batch) * self.factor


class Tiny(Times):
    factor = 1e-9


class Huge(Times):
    factor = 1e8


def test_keys_are_those_of_the_docstring() -> None:
    recorder = Recorder()
    trainer = fit(Toy, fp16(), batches(5), logger=recorder, callbacks=[GradientMonitor(2)])
    rows = [row for row in recorder.rows if any(key.startswith("amp/") for key in row)]
    assert [set(row) for row in rows] == [KEYS | {"step"}] * 3
    assert [row["step"] for row in rows] == [0, 2, 4]
    assert {key for key in trainer.callback_metrics if key.startswith("amp/")} == KEYS
    assert all(f"`{key}`" in GradientMonitor.__doc__ for key in KEYS)


def test_values_against_the_gradient_of_a_hand_written_step() -> None:
    found: dict[str, Any] = {}

    class ByHand(L.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Tensor, batch_idx: int) -> None:
            if batch_idx == 0:
                loss = module.loss(batch)
                names = [name for name, _ in module.named_parameters()]
                found.update(zip(names, torch.autograd.grad(loss, list(module.parameters())), strict=True))

    monitor = GradientMonitor(by="parameter")
    fit(Toy, fp16(1024.0), batches(1), callbacks=[ByHand(), monitor])
    rows = {row.name: row for row in monitor.table}
    assert list(rows) == [*found, "(all)"]
    for name, gradient in found.items():
        row = rows[name]
        assert row.largest == pytest.approx(float(gradient.abs().max()))
        assert row.headroom_bits == pytest.approx(math.log2(65504 / (1024 * row.largest)), abs=1e-4)
        half = (gradient * 1024).half()
        assert row.num_values == gradient.count_nonzero()
        assert row.underflow_fraction == pytest.approx(float(((half == 0) & (gradient != 0)).float().mean()))
        assert 40 < row.sqnr_db < 100
        assert row.cosine == pytest.approx(1, abs=1e-4)
        assert monitor.histograms[name].counts.sum() == row.num_values
    total = rows["(all)"]
    assert total.num_values == sum(g.count_nonzero() for g in found.values())
    assert total.largest >= max(row.largest for row in rows.values())
    assert monitor.histograms["(all)"].counts.sum() == total.num_values


def test_in_fp32_both_sides_are_equal() -> None:
    for plugin in (AmpPrecision("fp32"), scaled_fp32(init_scale=64.0), None):
        monitor = GradientMonitor(3)
        fit(drops, plugin, callbacks=[monitor])
        assert {row.sqnr_db for row in monitor.table} == {math.inf}
        assert {round(row.cosine, 6) for row in monitor.table} == {1.0}
        assert {row.scale for row in monitor.table} == ({64.0} if plugin and plugin.scaler else {1.0})


def drops() -> Toy:
    module = Toy(net=nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 1)))
    module.generator = torch.Generator().manual_seed(3)
    module.loss = lambda batch: (  # type: ignore[method-assign]
        module.net(batch + torch.rand(batch.shape, generator=module.generator)).float().square().mean()
    )
    return module


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_fidelity_tells_precisions_apart(precision: str) -> None:
    monitor = GradientMonitor()
    fit(Toy, fp16() if precision == "fp16" else AmpPrecision("bf16"), callbacks=[monitor])
    low, high = {"bf16": (30, 55), "fp16": (55, 80)}[precision]
    assert all(low < row.sqnr_db < high for row in monitor.table)


def test_small_gradients() -> None:
    monitor = GradientMonitor()
    trainer = fit(Tiny, fp16(), callbacks=[monitor])
    assert trainer.callback_metrics["amp/underflow_fraction"] > 0.5
    assert trainer.callback_metrics["amp/headroom_bits"] > 30
    assert trainer.callback_metrics["amp/gradient_sqnr_db"] < 10
    assert monitor.recommended_scale == 2.0**24


def test_large_gradients(caplog: pytest.LogCaptureFixture) -> None:
    monitor = GradientMonitor()
    with caplog.at_level("INFO"):
        trainer = fit(Huge, fp16(), callbacks=[monitor])
    assert trainer.callback_metrics["amp/headroom_bits"] < 0
    assert "amp/gradient_sqnr_db" not in trainer.callback_metrics  # the gradient overflowed
    assert math.isnan(monitor.table.last[-1].sqnr_db)
    assert monitor.recommended_scale is not None
    assert monitor.recommended_scale < 1
    assert "divide the loss by a constant, or use 'bf16'" in caplog.text


@pytest.mark.parametrize("factor", [1e-9, 1e-4, 1.0, 1e3])
def test_the_recommended_scale_makes_the_run_healthy(factor: float) -> None:
    class Scaled(Times):
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    Scaled.factor = factor
    monitor, after = GradientMonitor(), GradientMonitor()
    fit(Scaled, AmpPrecision("bf16"), callbacks=[monitor])
    plugin = fp16(monitor.recommended_scale)
    fit(Scaled, plugin, callbacks=[after])
    assert plugin.num_skipped == 0
    total = after.table.last[-1]
    assert total.headroom_bits > 0
    assert total.underflow_fraction < 0.01
    assert total.sqnr_db > 40


def test_manual_optimization_with_two_optimizers() -> None:
    class Gan(Toy):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.other = nn.Linear(8, 1)

        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            for opt, net in zip(self.optimizers(), (self.net, self.other), strict=True):
                self.toggle_optimizer(opt)
                self.manual_backward(net(batch).float().square().mean())
                opt.step()
                opt.zero_grad()
                self.untoggle_optimizer(opt)

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(n.parameters(), lr=0.01) for n in (self.net, self.other)]

    monitor = GradientMonitor(3)
    watched, alone = fit(Gan, fp16(), callbacks=[monitor]), fit(Gan, fp16())
    assert {row.name for row in monitor.table} == {"net.0", "net.2", "other", "(all)"}
    assert all(row.sqnr_db > 40 for row in monitor.table)
    assert [row.step for row in monitor.table if row.name == "other"] == [0, 4, 6, 10, 12]  # two a batch
    assert_same(watched, alone)


def test_between_its_steps_it_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    original = _gradient_sample.take_sample

    def take(trainer: L.Trainer, *args: Any) -> Any:
        calls.append(trainer.global_step)
        return original(trainer, *args)

    monkeypatch.setattr(_gradient_monitor, "take_sample", take)
    folds: list[bool] = []
    step = OptimizerSteps.fold

    def fold(self: OptimizerSteps, *args: Any) -> bool:
        folds.append(step(self, *args))
        return folds[-1]

    monkeypatch.setattr(OptimizerSteps, "fold", fold)
    make = lambda params: torch.optim.AdamW(params, fused=True)  # noqa: E731
    fit(lambda: Toy(make), fp16(), callbacks=[GradientMonitor(3)])
    assert calls == [0, 3, 6]
    assert folds == [True] * 8  # the folded step stays


def test_sampled_steps_are_the_same_after_a_resume(tmp_path: Path) -> None:
    def run(max_epochs: int, ckpt: Path | None = None) -> tuple[GradientMonitor, L.Trainer]:
        monitor = GradientMonitor(3)
        return monitor, fit(Toy, fp16(), batches(5), max_epochs=max_epochs, callbacks=[monitor], ckpt_path=ckpt)

    whole, _ = run(2)
    _, trainer = run(1)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    torch.load(tmp_path / "half.ckpt", weights_only=True)
    resumed, _ = run(2, tmp_path / "half.ckpt")
    assert list(resumed.table) == list(whole.table)
    assert sorted({row.step for row in whole.table}) == [0, 3, 6, 9]
    assert resumed.recommended_scale == whole.recommended_scale


def test_works_with_lightnings_plugin() -> None:
    monitor = GradientMonitor()
    fit(Toy, stock("fp16", init_scale=32.0), callbacks=[monitor])
    assert monitor.table[0].scale == 32


def test_a_step_that_cannot_run_twice_is_excused() -> None:
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


@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
def test_the_gradient_of_the_loss_itself_says_nothing(precision: str) -> None:
    """A criterion, or a model of Hugging Face, puts out the loss: its gradient is the scale, in fp32."""

    class WithCriterion(Toy):
        def __init__(self) -> None:
            super().__init__()
            self.criterion = nn.MSELoss()

        def loss(self, batch: Tensor) -> Tensor:
            return self.criterion(0.1 * self.net(batch).float(), 0.1 * batch.sum(1, keepdim=True))

    monitor = GradientMonitor()
    trainer = fit(WithCriterion, AmpPrecision(precision), callbacks=[monitor])
    if precision == "fp16":
        assert trainer.precision_plugin.num_skipped == 0
    total, *rows = reversed(monitor.table.last)
    assert total.largest < 0.5
    if precision != "fp32":  # in which nothing is known of what fp16 would compute in fp32
        assert total.headroom_bits == min(row.headroom_bits for row in rows)


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
    assert "at 2**16 the gradients fit" in caplog.text


@pytest.mark.filterwarnings("ignore:.*returned `None`")  # Lightning says so once per process
def test_no_gradients() -> None:
    class Skips(Toy):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            return None

    monitor = GradientMonitor()
    fit(Skips, AmpPrecision("bf16"), callbacks=[monitor])
    assert len(monitor.table) == 0


def row(step: int, name: str, room: float = 3.0) -> GradientRow:
    return GradientRow(step, name, 1.0, 10, 0.1, 0.2, room, 50.0, 0.999, 1.0)


def test_table_prints_the_latest_sample_least_headroom_first() -> None:
    table = GradientTable([row(0, "old"), row(1, "b", 5.0), row(1, "a", -1.0), row(1, "(all)", -1.0)])
    assert str(table).splitlines() == [
        "name   to zero  subnormal   headroom     SQNR  cosine",
        "a        10.0%      20.0%  -1.0 bits  50.0 dB  0.9990",
        "b        10.0%      20.0%   5.0 bits  50.0 dB  0.9990",
        "(all)    10.0%      20.0%  -1.0 bits  50.0 dB  0.9990",
    ]
    assert table[0].name == "old"
    assert len(table[1:]) == 3


def test_table_stays_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_gradient_table, "MAX_SAMPLES", 8)
    table = GradientTable()
    for step in range(100):
        table.add([row(step, "a"), row(step, "(all)")])
    steps = [r.step for r in table if r.name == "a"]
    assert len(steps) <= 8
    assert steps[0] == 0
    assert steps[-4:] == [96, 97, 98, 99]


@pytest.mark.parametrize("quantity", ["headroom_bits", "underflow_fraction", "sqnr_db"])
def test_plot(quantity: Any, tmp_path: Path) -> None:
    monitor = GradientMonitor(2)
    fit(Toy, fp16(), callbacks=[monitor])
    figure = monitor.plot(tmp_path / "plot.png", quantity=quantity)
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    axes: Any = figure.axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["net.0", "net.2"]
    assert axes.images[0].get_array().shape == (2, 4)


def test_plot_of_nothing(tmp_path: Path) -> None:
    GradientMonitor().plot(tmp_path / "plot.png")
    with pytest.raises(ValueError, match=r"`quantity` must be one of \['headroom_bits', .* got 'speed'"):
        GradientMonitor().plot(quantity="speed")  # type: ignore[arg-type]


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


def test_gradients_that_are_not_finite_are_not_called_zero(caplog: pytest.LogCaptureFixture) -> None:
    class Infinite(Times):
        factor = math.inf

    monitor = GradientMonitor(2)
    with caplog.at_level("INFO"):
        fit(Infinite, AmpPrecision("bf16"), batches(2), callbacks=[monitor])
    assert "All gradients are zero" not in caplog.text
    assert "No sample had finite gradients in fp32" in caplog.text
    assert monitor.recommended_scale is None
