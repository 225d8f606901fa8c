"""Row 22: metrics that are attributes of the module compute in fp32, in every step and in `MetricComparison`."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import pytest
import torch
from support import DEVICE, Toy, batches, evaluate, quiet_trainer
from support.promises import DIFFERS, Plugins, promise
from torch import Tensor, nn
from torchmetrics import MeanSquaredError, MetricCollection
from torchmetrics.classification import BinaryAUROC
from torchmetrics.image import StructuralSimilarityIndexMeasure
from torchmetrics.regression import ExplainedVariance, PearsonCorrCoef, R2Score

from lightning_amp import AmpPrecision, MetricComparison
from lightning_amp.precision import fp32_region

EVALUATIONS = ["validate", "test", "predict"]


class Metrics(Toy):
    """Log metrics of the batches, which no precision changes, so all values must equal fp32's."""

    def __init__(self) -> None:
        super().__init__()
        self.ssim = StructuralSimilarityIndexMeasure(data_range=1.0)
        self.all = MetricCollection({"r2": R2Score(), "ev": ExplainedVariance(), "pearson": PearsonCorrCoef()})
        self.train_mse = MeanSquaredError()
        self.in_a_list = [MeanSquaredError(), {"auroc": BinaryAUROC()}]
        self.table = torch.arange(3.0)  # a plain tensor attribute, as a user may have one, stays untouched
        self.values: dict[str, Any] = {}

    def pair(self, batch: Tensor) -> tuple[Tensor, Tensor]:
        target = (100 + batch).flatten()
        return target + 0.5 * batch.flip(0).flatten(), target

    def image(self, batch: Tensor) -> Tensor:
        smooth = nn.functional.interpolate(batch[None, None, :, :], size=(32, 32), mode="bilinear")
        return 0.5 + 0.02 * smooth

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        preds, target = self.pair(batch)
        self.train_mse(1e4 * preds, 1e4 * target)
        self.log("train_mse", self.train_mse, on_step=False, on_epoch=True)
        return self.loss(batch)

    def shared_step(self, batch: Tensor) -> None:
        noisy = self.image(batch) + 0.006 * torch.sin(1e3 * self.image(batch))
        self.ssim(noisy, self.image(batch))
        self.log("ssim", self.ssim)
        preds, target = self.pair(batch)
        self.all(preds, target)
        self.log_dict(self.all)
        self.in_a_list[0].to(batch.device).update(1e4 * preds, 1e4 * target)
        self.in_a_list[1]["auroc"].to(batch.device).update(torch.sigmoid(6 + preds - target), (target > 100).int())

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.shared_step(batch)

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.shared_step(batch)

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.ssim(self.image(batch), self.image(batch.flip(0)))

    def at_the_end(self) -> None:
        self.values = {"mse": self.in_a_list[0].compute(), "auroc": self.in_a_list[1]["auroc"].compute()}

    on_validation_epoch_end = on_test_epoch_end = at_the_end


def of_run(run: str, plugin: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    module, data = Metrics(), batches(4, 8)
    plugins = [plugin] if plugin else None
    if run == "fit":
        trainer = quiet_trainer(plugins=plugins, num_sanity_val_steps=1)
        trainer.fit(module, data, data)
    else:
        trainer, output = evaluate(run, module, data, plugins=plugins)
        if run == "predict":
            return {"output": [value.float() for value in output]}
    return {**trainer.callback_metrics, **module.values}


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("run", ["fit", *EVALUATIONS])
@promise(22, stock=DIFFERS)
def test_metrics_are_those_of_fp32(plugins: Plugins, run: str, precision: str) -> None:
    ours, reference = of_run(run, getattr(plugins, precision)()), of_run(run, None)
    if run != "predict":
        assert 0.9 < reference["ssim"] < 0.99
        assert set(ours) == {"ssim", "r2", "ev", "pearson", "mse", "auroc", *(["train_mse"] if run == "fit" else [])}
    torch.testing.assert_close(ours, reference, rtol=0, atol=0)


class HalfMetrics(Toy):
    """A metric of the model's half-precision output, and a functional metric by the documented recipe."""

    def __init__(self) -> None:
        super().__init__()
        self.r2, self.kept = R2Score(), []

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        prediction, target = self.net(batch).squeeze(1) + 100, batch.sum(1) + 100
        self.r2.update(prediction, target)
        difference = fp32_region(lambda a, b: (a @ b) / len(a))(prediction, target)
        self.kept.append((prediction, target, difference))


def test_half_precision_inputs_and_functional_metrics() -> None:
    module = HalfMetrics()
    quiet_trainer(plugins=[AmpPrecision("bf16")]).validate(module, batches(4, 16), verbose=False)
    reference = R2Score().to(DEVICE)
    for prediction, target, _ in module.kept:
        assert prediction.dtype == torch.bfloat16
        reference.update(prediction.float(), target)
    torch.testing.assert_close(module.r2.compute().cpu(), reference.compute().cpu(), rtol=0, atol=0)
    p, t, difference = module.kept[0]
    torch.testing.assert_close(difference, (p.float() @ t) / len(p), rtol=0, atol=0)


def test_threads_that_share_a_function_do_not_share_autocast() -> None:
    """One thread enters the function while another is inside, and leaves it later."""
    inside, left = Event(), Event()

    def wait(first: bool) -> None:
        (inside if first else left).set()
        (left if first else done).wait(10)

    done, shared = Event(), fp32_region(wait)

    def run(first: bool) -> bool:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=first):
            if not first:
                inside.wait(10)
            shared(first)
            done.set()
            return torch.is_autocast_enabled("cpu")

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(run, [True, False])) == [True, False]


@pytest.mark.parametrize("run", ["validate", "fit"])
def test_a_metric_that_is_made_later(run: str) -> None:
    """Each validation looks for new metrics when it starts."""
    seen: list[torch.dtype] = []

    class Recording(R2Score):
        def update(self, preds: Tensor, target: Tensor) -> None:
            seen.append(preds.dtype)
            super().update(preds, target)

    class LateMetric(HalfMetrics):
        def on_validation_epoch_start(self) -> None:
            self.r2 = Recording()

    module = LateMetric()
    trainer = quiet_trainer(plugins=[AmpPrecision("bf16")], max_epochs=2, num_sanity_val_steps=1)
    if run == "fit":
        trainer.fit(module, batches(2), batches(2, seed=1))
    else:
        trainer.validate(module, batches(2), verbose=False)
    assert seen == [torch.float32] * (5 if run == "fit" else 2)
    assert all("InFp32" not in repr(value) for value in vars(module.r2).values())


class Compared(Metrics):
    """`Metrics`, and a value computed from kept features at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []

    def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        self.kept.append(self.net[0](batch))
        self.shared_step(batch)
        return self.net(batch)

    def on_validation_batch_end(self, outputs: Tensor, *args: Any) -> None:
        assert outputs.dtype == torch.float32

    def on_validation_epoch_end(self) -> None:
        self.log("head", self.net[1:](torch.cat(self.kept)).float().mean())
        self.kept.clear()


@pytest.mark.parametrize("loaders", [1, 2])
@pytest.mark.parametrize("limit", [None, 2])
def test_comparison_sees_no_difference_in_metrics_of_inputs(limit: int | None, loaders: int) -> None:
    """This also holds where the AMP side is a shadow, because batches were left out."""
    torch.manual_seed(0)
    comparison, module = MetricComparison(limit_batches=limit), Compared()
    trainer = quiet_trainer(plugins=[AmpPrecision("bf16")], callbacks=[comparison], max_epochs=1)
    trainer.fit(module, batches(2, 8), [batches(3, 8, seed=i) for i in range(loaders)])
    differences = {row.metric: row.diff for row in comparison.table}
    assert 0 < abs(differences.pop("head")) < 0.1
    assert len(differences) == 4 * loaders
    assert set(differences.values()) == {0.0}
