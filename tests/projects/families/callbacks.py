"""The callbacks that Lightning ships; what each of them did is compared, not only that it ran."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch import callbacks as cb
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.tuner import Tuner
from torch import nn

from projects import Setup, project
from projects.families.tutorials import Classifier, vectors

EPOCHS: dict[str, Any] = {"max_epochs": 3}


def callbacks(**settings: Any) -> Any:
    return project("callbacks", **settings)


def with_callbacks(*used: L.Callback, observe: Any = None, module: Any = None, **trainer: Any) -> Setup:
    trainer = {"callbacks": list(used), **trainer}
    return Setup(module or Classifier(), vectors(24), vectors(16), trainer=trainer, observe=observe)


def files(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


@callbacks()
def callback_early_stopping() -> Setup:
    """EarlyStopping with a threshold that stops the run in its second epoch."""
    stop = cb.EarlyStopping("val_loss", patience=1, min_delta=0.5)

    def observe(trainer: L.Trainer, module: L.LightningModule) -> Mapping[str, Any]:
        return {"stopped": stop.stopped_epoch, "waited": stop.wait_count, "epochs": trainer.current_epoch}

    return with_callbacks(stop, observe=observe, max_epochs=5)


@callbacks()
def callback_early_stopping_on_train_loss() -> Setup:
    """EarlyStopping on the training loss, with a check for finite values, at the end of the training epoch."""
    stop = cb.EarlyStopping("train_loss_epoch", patience=2, check_finite=True, check_on_train_epoch_end=True)
    return with_callbacks(stop, observe=lambda t, m: {"epochs": t.current_epoch}, **EPOCHS)


@callbacks(quick=True)
def callback_checkpoint_best() -> Setup:
    """ModelCheckpoint keeps the last checkpoint and the two with the best validation loss."""
    best = cb.ModelCheckpoint("checkpoints", "{epoch}-{step}", monitor="val_loss", save_top_k=2, save_last=True)

    def observe(trainer: L.Trainer, module: L.LightningModule) -> Mapping[str, Any]:
        names = sorted(Path(p).name for p in best.best_k_models)
        return {"best": names, "score": float(best.best_model_score), "files": files(Path("checkpoints"))}

    return with_callbacks(best, observe=observe, enable_checkpointing=True, **EPOCHS)


@callbacks()
def callback_checkpoint_every_steps() -> Setup:
    """ModelCheckpoint every two steps, weights only, and a check of the file's content."""
    save = cb.ModelCheckpoint("checkpoints", every_n_train_steps=2, save_top_k=-1, save_weights_only=True)

    def observe(trainer: L.Trainer, module: L.LightningModule) -> Mapping[str, Any]:
        state = torch.load(save.best_model_path, weights_only=True)["state_dict"]
        return {"files": files(Path("checkpoints")), "dtypes": sorted({str(t.dtype) for t in state.values()})}

    return with_callbacks(save, observe=observe, enable_checkpointing=True, **EPOCHS)


@callbacks(quick=True)
def callback_checkpoint_and_resume() -> Setup:
    """Train, save, and continue from the file in a second Trainer, as if the run had not stopped."""
    save = cb.ModelCheckpoint("checkpoints", save_last=True)

    def script(trainer: L.Trainer, module: L.LightningModule) -> None:
        trainer.fit(module, vectors(24), vectors(16))
        state = torch.load("checkpoints/last.ckpt", weights_only=False)
        assert state["global_step"] == 3
        trainer.fit_loop.max_epochs = 3
        trainer.fit(module, vectors(24), vectors(16), ckpt_path="checkpoints/last.ckpt")

    return Setup(
        Classifier(),
        trainer={"callbacks": [save], "enable_checkpointing": True},
        script=script,
        observe=lambda t, m: {"steps": t.global_step, "epochs": t.current_epoch},
    )


@callbacks()
def callback_checkpoint_by_metric() -> Setup:
    """ModelCheckpoint by accuracy (`mode="max"`), named after it, with every second epoch validated."""
    best = cb.ModelCheckpoint("checkpoints", "{epoch}", monitor="val_accuracy", mode="max", save_top_k=1)
    return with_callbacks(
        best,
        observe=lambda t, m: {"files": len(files(Path("checkpoints")))},
        enable_checkpointing=True,
        check_val_every_n_epoch=2,
        max_epochs=4,
    )


@callbacks()
def callback_on_exception() -> Setup:
    """OnExceptionCheckpoint: the fourth batch raises an error, and the callback writes its file."""

    class Raises(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.global_step == 3:
                raise RuntimeError("out of patience")
            return super().training_step(batch, batch_idx)

    def script(trainer: L.Trainer, module: L.LightningModule) -> None:
        with contextlib.suppress(RuntimeError):
            trainer.fit(module, vectors(), vectors(16))

    save = cb.OnExceptionCheckpoint("saved", "at_the_end")
    return Setup(
        Raises(),
        trainer={"callbacks": [save], "enable_checkpointing": True},
        script=script,
        observe=lambda t, m: {"files": files(Path("saved"))},
    )


@callbacks(quick=True, needs=["lightning.pytorch.callbacks.EMAWeightAveraging"])
def callback_ema() -> Setup:
    """EMAWeightAveraging per step; validation uses the average, and the module holds it at the end."""
    return with_callbacks(cb.EMAWeightAveraging(decay=0.5), **EPOCHS)


@callbacks(needs=["lightning.pytorch.callbacks.WeightAveraging"])
def callback_weight_averaging() -> Setup:
    """WeightAveraging with a custom average, from the second step on."""

    class FromTheSecond(cb.WeightAveraging):
        def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
            return step_idx is not None and step_idx > 1

    return with_callbacks(FromTheSecond(avg_fn=lambda a, p, n: a + (p - a) / (n + 1)), **EPOCHS)


@callbacks()
def callback_swa() -> Setup:
    """StochasticWeightAveraging from the second epoch, with its pass for batch normalisation at the end."""
    return with_callbacks(cb.StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=1), **EPOCHS)


@callbacks()
def callback_accumulation_schedule() -> Setup:
    """GradientAccumulationScheduler: 1, then 2, then 3 batches per step."""
    schedule = cb.GradientAccumulationScheduler({1: 2, 2: 3})
    return with_callbacks(schedule, observe=lambda t, m: {"steps": t.global_step}, gradient_clip_val=0.5, **EPOCHS)


class Tuned(Classifier):
    """With the attribute that the finder of learning rates writes."""

    def __init__(self, lr: float = 1e-3, batch_size: int = 4) -> None:
        super().__init__(lambda p: torch.optim.AdamW(p, lr=self.lr))
        self.lr, self.batch_size = lr, batch_size

    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(48, 16, generator=generator)
        data = torch.utils.data.TensorDataset(x, (x[:, 0] > 0).long())
        return torch.utils.data.DataLoader(data, batch_size=self.batch_size)

    def val_dataloader(self) -> Any:
        return self.train_dataloader()


@callbacks()
def tuner_lr_find() -> Setup:
    """`Tuner.lr_find`, then a fit with the rate that it found; all tried rates are compared."""

    def script(trainer: L.Trainer, module: L.LightningModule) -> None:
        found = Tuner(trainer).lr_find(module, num_training=20, min_lr=1e-5, max_lr=1.0)
        module.tried = len(found.results["lr"])
        trainer.fit(module)

    return Setup(Tuned(), script=script, observe=lambda t, m: {"tried": m.tried, "steps": t.global_step})


@callbacks()
def tuner_batch_size() -> Setup:
    """`Tuner.scale_batch_size` in three doublings, then a fit."""

    def script(trainer: L.Trainer, module: L.LightningModule) -> None:
        Tuner(trainer).scale_batch_size(module, max_trials=3, steps_per_trial=2, init_val=2)
        trainer.fit(module)

    return Setup(Tuned(), script=script, observe=lambda t, m: {"size": m.batch_size, "steps": t.global_step})


@callbacks()
def callback_lr_finder() -> Setup:
    """LearningRateFinder as a callback, then training."""
    finder = cb.LearningRateFinder(num_training_steps=15, max_lr=0.1)

    def observe(trainer: L.Trainer, module: L.LightningModule) -> Mapping[str, Any]:
        return {"tried": len(finder.optimal_lr.results["lr"]), "steps": trainer.global_step}

    return Setup(Tuned(), trainer={"callbacks": [finder]}, observe=observe)


@callbacks()
def callback_batch_size_finder() -> Setup:
    """BatchSizeFinder as a callback, then training."""
    finder = cb.BatchSizeFinder(max_trials=3, steps_per_trial=1, init_val=2)
    return Setup(Tuned(), trainer={"callbacks": [finder]}, observe=lambda t, m: {"size": m.batch_size})


@callbacks()
def callback_backbone_finetuning() -> Setup:
    """BackboneFinetuning: the backbone is unfrozen in the second epoch, as a new parameter group."""

    class WithBackbone(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU())

        def forward(self, x: Any) -> Any:
            return self.net(self.backbone(x))

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.05, momentum=0.9)

    thaw = cb.BackboneFinetuning(1, backbone_initial_ratio_lr=0.1)

    def observe(trainer: L.Trainer, module: L.LightningModule) -> Mapping[str, Any]:
        return {"groups": len(trainer.optimizers[0].param_groups), "rate": trainer.optimizers[0].param_groups[-1]["lr"]}

    return with_callbacks(thaw, module=WithBackbone(), observe=observe, **EPOCHS)


@callbacks()
def callback_pruning() -> Setup:
    """ModelPruning removes half of the weights, by magnitude; buffers hold the masks, and the weights are computed."""
    prune = cb.ModelPruning(
        "l1_unstructured", parameters_to_prune=None, amount=0.5, use_lottery_ticket_hypothesis=False
    )

    def observe(trainer: L.Trainer, module: L.LightningModule) -> Mapping[str, Any]:
        weights = [m.weight for m in module.modules() if isinstance(m, nn.Linear)]
        return {"zeros": sum(float((w == 0).sum()) for w in weights), "keys": sorted(module.state_dict())}

    return with_callbacks(prune, observe=observe, max_epochs=2)


@callbacks()
def callback_lambda() -> Setup:
    """LambdaCallback that records every event, and the gradient norm before the step."""
    events: list[str] = []
    norms: list[float] = []

    def before_step(trainer: Any, module: Any, optimizer: Any) -> None:
        norms.append(float(torch.stack([p.grad.norm() for p in module.parameters() if p.grad is not None]).norm()))

    def write(name: str) -> Any:
        return lambda *args, **kwargs: events.append(name)

    names = (
        "on_train_batch_start",
        "on_before_backward",
        "on_after_backward",
        "on_before_zero_grad",
        "on_train_batch_end",
    )
    watch = cb.LambdaCallback(on_before_optimizer_step=before_step, **{n: write(n) for n in names})
    return with_callbacks(
        watch, observe=lambda t, m: {"events": events, **{f"norm {i}": n for i, n in enumerate(norms)}}
    )


class Seen(L.Callback):
    """Looks at everything between backward and step, and at the loss before the backward."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []

    def on_before_backward(self, trainer: L.Trainer, module: L.LightningModule, loss: Any) -> None:
        self.losses.append(float(loss))

    def on_before_optimizer_step(self, trainer: L.Trainer, module: L.LightningModule, optimizer: Any) -> None:
        self.norms += [float(v) for k, v in L.pytorch.utilities.grad_norm(module, 2).items() if k.endswith("total")]


@callbacks(quick=True)
def callback_gradient_norms() -> Setup:
    """`grad_norm` before the step, and the loss before the backward, with a fused optimizer and accumulation."""
    seen = Seen()

    def observe(trainer: L.Trainer, module: L.LightningModule) -> Mapping[str, Any]:
        values = {f"loss {i}": v for i, v in enumerate(seen.losses)}
        return {**values, **{f"norm {i}": v for i, v in enumerate(seen.norms)}, "count": len(seen.norms)}

    module = Classifier(lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True))
    return with_callbacks(seen, module=module, observe=observe, accumulate_grad_batches=2)


@callbacks()
def callback_monitors() -> Setup:
    """DeviceStatsMonitor, LearningRateMonitor and ThroughputMonitor with a CSV logger."""
    throughput = cb.ThroughputMonitor(batch_size_fn=lambda batch: batch[0].shape[0], window_size=2)
    monitors = [cb.LearningRateMonitor(log_momentum=True, log_weight_decay=True), throughput]

    def observe(trainer: L.Trainer, module: L.LightningModule) -> Mapping[str, Any]:
        header = (Path(trainer.logger.log_dir) / "metrics.csv").read_text().splitlines()[0]
        return {"columns": sorted(c for c in header.split(",") if not c.startswith(("amp/", "device/")))}

    return with_callbacks(*monitors, logger=CSVLogger("logs"), observe=observe, **EPOCHS)


@callbacks(needs=("psutil",))
def callback_device_stats() -> Setup:
    """DeviceStatsMonitor with CPU statistics."""
    return with_callbacks(cb.DeviceStatsMonitor(cpu_stats=True), logger=CSVLogger("logs"))


@callbacks(needs=("rich",))
def callback_rich() -> Setup:
    """RichProgressBar and RichModelSummary."""
    bars = [cb.RichProgressBar(leave=True), cb.RichModelSummary(max_depth=2)]
    return with_callbacks(*bars, enable_progress_bar=True, enable_model_summary=True)


@callbacks()
def callback_tqdm_and_summary() -> Setup:
    """The default progress bar and the default model summary."""
    return with_callbacks(cb.TQDMProgressBar(refresh_rate=1), enable_progress_bar=True, enable_model_summary=True)


@callbacks()
def callback_timer() -> Setup:
    """Timer with a limit that is not reached."""
    timer = cb.Timer(duration="00:01:00:00")
    return with_callbacks(timer, observe=lambda t, m: {"ran": timer.time_elapsed("train") > 0, "steps": t.global_step})


@callbacks()
def callback_spike_detection() -> Setup:
    """SpikeDetection with an exponential average of the loss."""
    from lightning.fabric.utilities.spike import SpikeDetection as Detector

    assert issubclass(cb.SpikeDetection, Detector)
    return with_callbacks(cb.SpikeDetection(warmup=2, exclude_batches_path="spikes.json"))


@callbacks()
def callback_prediction_writer() -> Setup:
    """BasePredictionWriter that converts the predictions of each batch to numpy."""

    class Writer(cb.BasePredictionWriter):
        def __init__(self) -> None:
            super().__init__("batch_and_epoch")
            self.dtypes: list[str] = []

        def write_on_batch_end(self, trainer: Any, module: Any, prediction: Any, *args: Any) -> None:
            self.dtypes.append(str(prediction.numpy().dtype))

        def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, batch_indices: Any) -> None:
            self.dtypes.append(str(torch.cat(predictions).dtype))

    writer = Writer()

    def script(trainer: L.Trainer, module: L.LightningModule) -> None:
        trainer.fit(module, vectors(24), vectors(16))
        trainer.predict(module, vectors(16), return_predictions=False)

    return Setup(
        Classifier(), trainer={"callbacks": [writer]}, script=script, observe=lambda t, m: {"dtypes": writer.dtypes}
    )


@callbacks()
def fit_validate_test_fit() -> Setup:
    """Sanity check, fit, validate, test, predict, and fit again, on one Trainer."""

    class Tested(Classifier):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("test_loss", nn.functional.cross_entropy(self(batch[0]), batch[1]))

    def script(trainer: L.Trainer, module: L.LightningModule) -> None:
        trainer.fit(module, vectors(24), vectors(16))
        trainer.validate(module, vectors(16), verbose=False)
        trainer.test(module, vectors(16), verbose=False)
        trainer.predict(module, vectors(16))
        trainer.fit_loop.max_epochs = 2
        trainer.fit(module, vectors(24), vectors(16))

    return Setup(Tested(), script=script, observe=lambda t, m: {"steps": t.global_step})


@callbacks(quick=True)
def val_check_interval_and_odd_batches() -> Setup:
    """Validation within the epoch, two validation sets, a last batch of one and a limit of steps."""

    class Two(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 4))

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log("val_loss", nn.functional.cross_entropy(self(batch[0]), batch[1]))

    trainer = {"val_check_interval": 0.5, "max_steps": 5, "max_epochs": -1}
    return Setup(Two(), vectors(25), [vectors(16), vectors(9)], trainer=trainer)


@callbacks()
def detect_anomaly_and_deterministic() -> Setup:
    """`detect_anomaly=True` and `deterministic=True`, with clipping by value."""
    return with_callbacks(
        detect_anomaly=True, deterministic=True, gradient_clip_val=0.1, gradient_clip_algorithm="value"
    )
