"""Rows 1, 2 and 8: a run with skipped steps equals an fp32 run that never drew the bad batches."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.tuner import Tuner
from support import (
    Manual,
    Poison,
    Toy,
    assert_as_fp32,
    assert_finite,
    assert_same,
    fit,
    quiet_trainer,
    scaled_fp32,
    weights,
    with_batch_norm,
)
from support.averages import EMAWeightAveraging, needs_averages
from support.promises import DIFFERS, OPTIMIZERS, PLAIN_AND_FUSED, Plugins, fused_adamw, plain_adamw, promise
from torch import Tensor, nn
from torch.optim import lr_scheduler as lrs
from torch.utils.data import DataLoader

SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "one cycle": lambda o: lrs.OneCycleLR(o, max_lr=0.1, total_steps=20),
    "lambda": lambda o: lrs.LambdaLR(o, lambda step: 0.9**step),
    "sequential": lambda o: lrs.SequentialLR(o, [lrs.ConstantLR(o, 0.1, 3), lrs.ExponentialLR(o, 0.9)], [3]),
    "chained": lambda o: lrs.ChainedScheduler([lrs.ConstantLR(o, 0.1, 3), lrs.ExponentialLR(o, 0.9)], o),
    "warm restarts": lambda o: lrs.CosineAnnealingWarmRestarts(o, 3),
}


def data(count: int = 10, without: Iterable[int] = (), size: int = 4) -> DataLoader[Tensor]:
    generator = torch.Generator().manual_seed(3)
    everything = [torch.randn(size, 8, generator=generator) for _ in range(count)]
    kept = [batch for i, batch in enumerate(everything) if i not in set(without)]
    return DataLoader(kept, batch_size=None)  # pyright: ignore[reportArgumentType]


def rate(trainer: L.Trainer) -> list[float]:
    return [group["lr"] for group in trainer.optimizers[0].param_groups]


@pytest.mark.parametrize(
    ("schedule", "optimizer", "bad"),
    [
        *(("one cycle", o, bad) for o in PLAIN_AND_FUSED for bad in [(0,), (3, 4)]),
        *((s, "sgd", (3, 4)) for s in SCHEDULES if s != "one cycle"),
    ],
)
@promise(1, stock=f"{DIFFERS}|lr_scheduler.step.* before `optimizer.step", raises=(AssertionError, UserWarning))
def test_schedules_see_applied_steps(plugins: Plugins, bad: tuple[int, ...], schedule: str, optimizer: str) -> None:
    make = functools.partial(Toy, OPTIMIZERS[optimizer], None, SCHEDULES[schedule])
    poison = [Poison(gradient=bad)]
    trainer, reference = assert_as_fp32(make, plugins.scaled(), data(), data(without=bad), callbacks=poison)
    torch.testing.assert_close(rate(trainer), rate(reference), rtol=0, atol=0)
    ours, theirs = (t.lr_scheduler_configs[0].scheduler for t in (trainer, reference))
    assert getattr(ours, "last_epoch", None) == getattr(theirs, "last_epoch", None)
    assert type(ours) is type(theirs)


@promise(1, stock=DIFFERS)
def test_schedules_with_accumulation(plugins: Plugins) -> None:
    """A skip drops the whole window: here batches 2 and 3, although only 2 is bad."""
    make, poison = functools.partial(Toy, fused_adamw, None, SCHEDULES["lambda"]), [Poison(gradient=[2])]
    trainer, reference = assert_as_fp32(
        make, plugins.scaled(), data(), data(without=[2, 3]), callbacks=poison, accumulate_grad_batches=2
    )
    torch.testing.assert_close(rate(trainer), rate(reference))


@pytest.mark.usefixtures("where_flags_live")
def test_rates_that_somebody_watches_are_decided_at_once() -> None:
    seen: list[float] = []

    class Watch(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
            seen.append(rate(trainer)[0])

    module = functools.partial(Toy, fused_adamw, None, lambda optimizer: lrs.ExponentialLR(optimizer, 0.5))
    fit(module, Plugins(True).scaled(), data(4), callbacks=[Poison(gradient=[1]), Watch()])
    assert seen == pytest.approx([0.005, 0.005, 0.0025, 0.00125])


class EpochSchedule(Toy):
    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(self.parameters())
        return [optimizer], [lrs.ExponentialLR(optimizer, 0.5)]


@pytest.mark.parametrize("bad", [range(10), [9]])
@promise(1, stock=None)
def test_epoch_schedules_run_as_ever(plugins: Plugins, bad: Iterable[int]) -> None:
    trainer = fit(lambda: EpochSchedule(fused_adamw), plugins.scaled(), data(), callbacks=[Poison(gradient=bad)])
    assert rate(trainer) == [0.005]


class Plateau(Toy):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.log("constant", 1.0)
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(self.parameters())
        schedule = {
            "scheduler": lrs.ReduceLROnPlateau(optimizer, patience=0),
            "monitor": "constant",
            "interval": "step",
        }
        return {"optimizer": optimizer, "lr_scheduler": schedule}


@promise(1, stock=None)
def test_plateau_schedules_run_as_ever(plugins: Plugins) -> None:
    trainer = fit(lambda: Plateau(fused_adamw), plugins.scaled(), data(3), callbacks=[Poison(gradient=[0, 1, 2])])
    assert rate(trainer) == pytest.approx([0.0001])


class OtherVerb(Toy):
    """Like timm's, this schedule is not driven through `step()`."""

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(self.parameters())
        self.scheduler = lrs.LambdaLR(optimizer, lambda step: 0.9**step)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": self.scheduler, "interval": "step"}}

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.last_epoch += 1
        for group in scheduler.optimizer.param_groups:
            group["lr"] *= 0.5


@pytest.mark.parametrize("optimizer", PLAIN_AND_FUSED)
@promise(1, stock=DIFFERS)
def test_other_verbs(plugins: Plugins, optimizer: str) -> None:
    module = functools.partial(OtherVerb, OPTIMIZERS[optimizer])
    trainer = fit(module, plugins.scaled(), data(), callbacks=[Poison(gradient=[0, 3, 9])])
    reference = fit(module, None, data(without=[0, 3, 9]))
    torch.testing.assert_close(rate(trainer), rate(reference), rtol=0, atol=0)
    assert "lr_scheduler_step" not in vars(trainer.lightning_module)


class ManualSchedule(Manual):
    def __init__(self, per: str) -> None:
        super().__init__(fused_adamw)
        self.per = per

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        super().training_step(batch, batch_idx)
        if self.per == "batch":
            self.lr_schedulers().step()

    def on_train_epoch_end(self) -> None:
        if self.per == "epoch":
            self.lr_schedulers().step()

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(self.parameters())
        return [optimizer], [lrs.ExponentialLR(optimizer, 0.5)]


@promise(1, stock=DIFFERS)
def test_manual_schedules_per_batch(plugins: Plugins) -> None:
    trainer, reference = assert_as_fp32(
        lambda: ManualSchedule("batch"), plugins.scaled(), data(4), data(4, [0, 2]), callbacks=[Poison([0, 2])]
    )
    torch.testing.assert_close(rate(trainer), rate(reference))


@promise(1, stock=None)
def test_manual_schedules_per_epoch(plugins: Plugins) -> None:
    trainer = fit(lambda: ManualSchedule("epoch"), plugins.scaled(), data(4), callbacks=[Poison(gradient=[3])])
    assert rate(trainer) == [0.005]


# -- averaged weights ---------------------------------------------------------------


@needs_averages
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("optimizer", PLAIN_AND_FUSED)
@promise(1, stock=DIFFERS)
def test_averages_see_applied_steps(plugins: Plugins, optimizer: str, accumulate: int) -> None:
    module = functools.partial(Toy, OPTIMIZERS[optimizer])
    bad, dropped = ([6], [6]) if accumulate == 1 else ([6], [6, 7])

    def run(plugin: Any, batches: DataLoader[Tensor], *callbacks: L.Callback) -> L.Trainer:
        average = EMAWeightAveraging(decay=0.5)
        trainer = fit(module, plugin, batches, callbacks=[*callbacks, average], accumulate_grad_batches=accumulate)
        assert type(average) is EMAWeightAveraging
        return trainer

    assert_same(run(plugins.scaled(), data(), Poison(gradient=bad)), run(None, data(without=dropped)))


# -- normalisation buffers ---------------------------------------------------------------


class BadForward(Toy):
    """Overflow in the forward, before the BatchNorm."""

    bad: tuple[int, ...] = ()

    def __init__(self, optimizer: Any, bad: tuple[int, ...] = ()) -> None:
        super().__init__(optimizer, with_batch_norm())
        self.bad = bad

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return super().training_step(batch * float("inf") if batch_idx in self.bad else batch, batch_idx)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("optimizer", PLAIN_AND_FUSED)
@promise(2, stock=DIFFERS)
def test_buffers_of_a_skipped_batch_are_taken_back(plugins: Plugins, optimizer: str, accumulate: int) -> None:
    kwargs: dict[str, Any] = {"accumulate_grad_batches": accumulate}
    bad = (0, 4)
    dropped = bad if accumulate == 1 else (0, 1, 4, 5)
    trainer = fit(lambda: BadForward(OPTIMIZERS[optimizer], bad), plugins.scaled(), data(), **kwargs)
    assert_same(trainer, fit(lambda: BadForward(OPTIMIZERS[optimizer]), None, data(without=dropped), **kwargs))


@pytest.mark.needs("parameters that stay")
@pytest.mark.usefixtures("where_flags_live")
@pytest.mark.parametrize("optimizer", PLAIN_AND_FUSED)
@pytest.mark.parametrize("bad", [(), (0,), (0, 1, 4)])
@pytest.mark.parametrize("precision", ["scaled", "fp32"])
@pytest.mark.few(8)
def test_statistics_of_a_lazy_layer_are_those_of_the_batches_that_were_applied(
    precision: str, bad: tuple[int, ...], optimizer: str
) -> None:
    def lazy(bad: tuple[int, ...] = ()) -> BadForward:
        module = BadForward(OPTIMIZERS[optimizer], bad)
        torch.manual_seed(0)
        module.net = nn.Sequential(nn.Linear(8, 4), nn.LazyBatchNorm1d(), nn.Linear(4, 1))
        return module

    trainer = fit(lambda: lazy(bad), getattr(Plugins(True), precision)(), data())
    assert_same(trainer, fit(lazy, None, data(without=bad)))


class NoLossIn(BadForward):
    """One batch is only evaluated, not trained on."""

    def __init__(self, without_loss: int) -> None:
        super().__init__(fused_adamw)
        self.without_loss = without_loss

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx == self.without_loss else loss


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@pytest.mark.usefixtures("where_flags_live")
@pytest.mark.parametrize("without_loss", [1, 2])
def test_a_batch_without_a_loss_is_dropped_with_its_window(without_loss: int) -> None:
    """A window ends with its step; a bad batch in its middle or at its end does not end it."""
    kwargs: dict[str, Any] = {"accumulate_grad_batches": 3}
    trainer = fit(lambda: NoLossIn(without_loss), scaled_fp32(), data(), callbacks=[Poison([0])], **kwargs)
    assert_same(trainer, fit(lambda: BadForward(fused_adamw), None, data(without=(0, 1, 2)), **kwargs))


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@promise("2+8", stock="not finite")
def test_buffers_stay_finite_without_a_scaler(plugins: Plugins, precision: str) -> None:
    plugin = plugins.bf16() if precision == "bf16" else plugins.fp32()
    trainer = fit(lambda: BadForward(plain_adamw, (2,)), plugin, data())
    assert_finite(trainer)


@pytest.mark.filterwarnings("ignore:Swapping scheduler")
@promise(2, stock="not finite")
def test_the_batch_norm_pass_of_swa(plugins: Plugins) -> None:
    class LastEpoch(BadForward):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            # the pass over the data that only updates BatchNorm comes after the last epoch
            self.bad = (2, 9) if self.trainer.current_epoch == 3 else ()
            return super().training_step(batch, batch_idx)

    swa = StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1)
    trainer = fit(lambda: LastEpoch(plain_adamw), plugins.scaled(), data(), max_epochs=3, callbacks=[swa])
    assert_finite(trainer)


# -- bf16 and fp32 ---------------------------------------------------------------


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("optimizer", PLAIN_AND_FUSED)
@pytest.mark.parametrize("kind", ["gradient", "loss"])
@promise(8, stock=DIFFERS)
def test_one_bad_batch_in_fp32(plugins: Plugins, kind: str, optimizer: str, clip: float | None) -> None:
    module = functools.partial(Toy, OPTIMIZERS[optimizer])
    assert_as_fp32(
        module, plugins.fp32(), data(), data(without=[3]), callbacks=[Poison(**{kind: [3]})], gradient_clip_val=clip,
        tolerance={"rtol": 1e-5, "atol": 1e-6} if clip else {},
    )  # fmt: skip


@pytest.mark.usefixtures("where_flags_live")
def test_bf16_is_not_advised_to_a_run_that_has_it() -> None:
    with pytest.raises(
        FloatingPointError, match="64 opt.* 0 with a non-finite loss.*with precision .fp32. to see"
    ) as caught:
        fit(Toy, Plugins(True).bf16(), data(70), callbacks=[Poison(gradient=range(70))])
    assert "'bf16'" not in str(caught.value)


# -- the LR finder ---------------------------------------------------------------


@pytest.mark.parametrize("optimizer", PLAIN_AND_FUSED)
@promise(32, stock="assert")
def test_the_lr_finder_records_no_rate_without_a_step(plugins: Plugins, optimizer: str, tmp_path: Any) -> None:
    used: list[float] = []

    class Spy(Toy):
        lr = 1e-4
        batch = 0

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=self.lr, fused=optimizer.startswith("fused"))

        def on_after_backward(self) -> None:
            if self.batch in {3, 7}:
                next(self.parameters()).grad.fill_(float("inf"))

        def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
            self.before, self.rate = weights(self), rate(self.trainer)[0]

        def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
            self.batch += 1
            if any(not torch.equal(a, b) for a, b in zip(self.before.values(), weights(self).values(), strict=True)):
                used.append(self.rate)

    torch.manual_seed(0)
    trainer = quiet_trainer(plugins=[plugins.scaled()], default_root_dir=tmp_path)
    finder = Tuner(trainer).lr_find(
        Spy(), data(20), num_training=15, min_lr=1e-4, max_lr=1e-2, early_stop_threshold=None
    )
    assert finder is not None
    assert len(used) >= 13
    unused = [r for r in finder.results["lr"] if not any(r == pytest.approx(u) for u in used)]
    assert unused == []


class Regression(L.LightningModule):
    """In bad batches the loss is as ever, but its gradients overflow."""

    lr = 1e-3

    def __init__(self, bad: Iterable[int]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bad, self.net = set(bad), nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        output = self.net(batch).float()
        loss = (output - batch.sum(1, keepdim=True)).square().mean()
        return loss + 1e5 * (output - output.detach()).sum() if batch_idx in self.bad else loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=self.lr)


@pytest.mark.usefixtures("where_flags_live")
@pytest.mark.parametrize("scale", [2.0**10, 2.0**16])
@pytest.mark.parametrize("bad", [(40,), range(12), (20, 21, 60)])
@pytest.mark.few(3)
def test_row_48_the_lr_finder_suggests_the_rate_of_fp32(bad: Iterable[int], scale: float, tmp_path: Path) -> None:
    def find(plugin: Any, bad: Iterable[int]) -> Any:
        trainer = quiet_trainer(plugins=[plugin] if plugin else None, default_root_dir=tmp_path)
        batch = next(iter(data(1, size=16)))
        return Tuner(trainer).lr_find(Regression(bad), DataLoader([batch] * 100, batch_size=None), min_lr=1e-6)  # pyright: ignore[reportArgumentType]

    found, expected = find(Plugins(True).fp16(scale), bad), find(None, ())
    assert 1 / 3 < found.suggestion() / expected.suggestion() < 3
    rates = found.results["lr"]
    assert len(found.results["loss"]) == len(rates) == len(set(rates)) <= 100 - len(set(bad))
