"""Rows 22 to 24: what validation, test and prediction mean in fp32 they mean under mixed precision."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import lightning as L
import pytest
import torch
from helpers import FEATURES, Toy, assert_same, batches, fit, quiet_trainer, stock, weights
from lightning.pytorch.callbacks import EMAWeightAveraging
from promises import DIFFERS, Plugins, promise
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanSquaredError, MetricCollection
from torchmetrics.classification import BinaryAUROC
from torchmetrics.image import StructuralSimilarityIndexMeasure
from torchmetrics.regression import ExplainedVariance, PearsonCorrCoef, R2Score

from lightning_amp import AmpPrecision, MetricComparison
from lightning_amp.precision import fp32_region

EVALUATIONS = ["validate", "test", "predict"]


def attributes(module: nn.Module) -> dict[str, set[str]]:
    """All there is on a module, except what Lightning itself adds to the root while it trains."""
    own = {name: set(vars(m)) for name, m in module.named_modules()}
    own[""] = {n for n in own[""] if n == "forward" or n.startswith("on_") or n.endswith("_step")}
    return own


# -- row 22: metrics ---------------------------------------------------------------------------------------------------


class Metrics(Toy):
    """Logs metrics of its batches, which no precision changes, so all values must be those of fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.ssim = StructuralSimilarityIndexMeasure(data_range=1.0)
        self.all = MetricCollection({"r2": R2Score(), "ev": ExplainedVariance(), "pearson": PearsonCorrCoef()})
        self.train_mse = MeanSquaredError()
        self.in_a_list = [MeanSquaredError(), {"auroc": BinaryAUROC()}]
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
        self.in_a_list[0].update(1e4 * preds, 1e4 * target)
        self.in_a_list[1]["auroc"].update(torch.sigmoid(6 + preds - target), (target > 100).int())

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
    trainer = quiet_trainer(plugins=[plugin] if plugin else None, num_sanity_val_steps=1)
    if run == "fit":
        trainer.fit(module, data, data)
    else:
        output = getattr(trainer, run)(module, data, **({} if run == "predict" else {"verbose": False}))
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
    """A metric of what the model computed, in half precision; and a functional one, by the recipe."""

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
    reference = R2Score()
    for prediction, target, _ in module.kept:
        assert prediction.dtype == torch.bfloat16
        reference.update(prediction.float(), target)
    torch.testing.assert_close(module.r2.compute(), reference.compute(), rtol=0, atol=0)
    p, t, difference = module.kept[0]
    torch.testing.assert_close(difference, (p.float() @ t) / len(p), rtol=0, atol=0)


class LateMetric(HalfMetrics):
    def on_validation_epoch_start(self) -> None:
        self.r2 = R2Score()


@pytest.mark.parametrize("run", ["validate", "fit"])
def test_a_metric_that_is_made_later(run: str) -> None:
    """At the start of each validation the metrics are looked for again."""
    module = LateMetric()
    seen: list[torch.dtype] = []
    original = R2Score.update

    class Spy(L.Callback):
        def on_validation_batch_start(self, *args: Any) -> None:
            module.r2.register_buffer("mark", torch.zeros(1))

    class Recording(R2Score):
        def update(self, preds: Tensor, target: Tensor) -> None:
            seen.append(preds.dtype)
            original(self, preds, target)

    LateMetric.on_validation_epoch_start = lambda self: setattr(self, "r2", Recording())  # type: ignore[method-assign]
    trainer = quiet_trainer(plugins=[AmpPrecision("bf16")], max_epochs=2, num_sanity_val_steps=1)
    if run == "fit":
        trainer.fit(module, batches(2), batches(2, seed=1))
    else:
        trainer.validate(module, batches(2), verbose=False)
    assert seen == [torch.float32] * (5 if run == "fit" else 2)
    assert all("_InFp32" not in repr(value) for value in vars(module.r2).values())


# -- row 23: outputs and epoch-end hooks -------------------------------------------------------------------------------


@dataclasses.dataclass
class Output:
    logits: Tensor
    extra: Any


class Outputs(Toy):
    """Returns nested half-precision outputs, keeps features, and uses them in the hooks at the end of epochs."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(16, 3)
        self.features: dict[str, list[Tensor]] = {"train": [], "evaluate": []}
        self.seen: dict[str, Any] = {}

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.features["train"].append(self.net[0](batch).detach())
        return (self.net(batch) + self.head(self.net[0](batch))).float().square().mean()

    def step(self, batch: Tensor, batch_idx: int) -> Any:
        self.features["evaluate"].append(self.net[0](batch))
        out = self.net(batch)
        return {"out": out, "nested": [(out, "text"), Output(out, {"x": out})], "index": torch.tensor([batch_idx])}

    validation_step = test_step = predict_step = step

    def at_the_end(self, name: str) -> None:
        features = self.features["train" if name == "train" else "evaluate"]
        self.seen[name] = self.head(torch.cat(features)), torch.is_autocast_enabled("cpu")
        features.clear()

    def on_train_epoch_end(self) -> None:
        self.at_the_end("train")

    def on_validation_epoch_end(self) -> None:
        self.at_the_end("validate")

    def on_test_epoch_end(self) -> None:
        self.at_the_end("test")

    def on_predict_epoch_end(self) -> None:
        self.at_the_end("predict")


class Batches(L.Callback):
    """What callbacks get of each step."""

    def __init__(self) -> None:
        self.outputs: list[Any] = []

    def on_validation_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, *args: Any) -> None:
        self.outputs.append(outputs)

    def on_test_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, *args: Any) -> None:
        self.outputs.append(outputs)

    def on_predict_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, *args: Any) -> None:
        self.outputs.append(outputs)


@pytest.mark.parametrize("run", EVALUATIONS)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@promise(
    23,
    stock="must (be|have) (the )?same|float32.*(Half|Float16|BFloat16)|.*dtype",
    raises=(RuntimeError, AssertionError),
)
def test_outputs_are_fp32_and_kept_features_match_the_head(plugins: Plugins, precision: str, run: str) -> None:
    module, seen = Outputs(), Batches()
    trainer = quiet_trainer(plugins=[getattr(plugins, precision)()], callbacks=[seen])
    getattr(trainer, run)(module, batches(2))
    for output in seen.outputs:
        nested = output["nested"]
        tensors = [output["out"], nested[0][0], nested[1].logits, nested[1].extra["x"]]
        assert {tensor.dtype for tensor in tensors} == {torch.float32}
        assert output["index"].dtype == torch.long
        assert nested[0][1] == "text"
    logits, autocast = module.seen[run]
    assert logits.shape == (8, 3)
    assert autocast


@promise(23, stock="unsupported ScalarType BFloat16", raises=TypeError)
def test_predictions_to_numpy(plugins: Plugins) -> None:
    class Predictor(Toy):
        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

    predictions = quiet_trainer(plugins=[plugins.bf16()]).predict(Predictor(), batches(2))
    assert torch.cat(predictions).numpy().dtype == "float32"


@promise(23, stock="dtype", raises=RuntimeError)
def test_epoch_end_hooks_in_fit(plugins: Plugins) -> None:
    module = Outputs()
    trainer = quiet_trainer(plugins=[plugins.bf16()], max_epochs=2, num_sanity_val_steps=1)
    between: list[set[str]] = []

    class Look(L.Callback):
        def on_train_epoch_start(self, *args: Any) -> None:
            between.append(attributes(module)[""])

    trainer.callbacks.append(Look())
    trainer.fit(module, batches(2), batches(2, seed=1))
    assert {name: autocast for name, (_, autocast) in module.seen.items()} == {"validate": True, "train": True}
    assert [*between, attributes(module)[""]] == [set()] * 3


def test_fp32_leaves_outputs_and_hooks_alone() -> None:
    class Half(Outputs):
        def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            self.features["evaluate"].append(self.net[0](batch))
            return self.net(batch).half()

    module = Half()
    predictions = quiet_trainer(plugins=[AmpPrecision("fp32")]).predict(module, batches(2))
    assert predictions[0].dtype == torch.float16  # the user's own wish, as in fp32
    assert module.seen["predict"][1] is False


def test_outputs_under_ddp() -> None:
    """Lightning redirects the step through the wrapper's forward there."""
    module, seen = Outputs(), Batches()
    try:
        trainer = quiet_trainer(plugins=[AmpPrecision("bf16")], callbacks=[seen], strategy="ddp")
        trainer.fit(module, batches(2), batches(1, seed=1))
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    assert seen.outputs
    assert all(output["out"].dtype == torch.float32 for output in seen.outputs)
    assert module.seen["validate"][1]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_module() -> None:
    torch._dynamo.reset()
    compiled: Any = torch.compile(Outputs(), backend="eager")
    module = compiled._orig_mod
    step = vars(module)["validation_step"]
    quiet_trainer(plugins=[AmpPrecision("bf16", fp32_modules=["head"])]).validate(compiled, batches(2), verbose=False)
    assert module.seen["validate"][0].dtype == torch.float32
    assert vars(module)["validation_step"] is step


class Broken(Outputs):
    def validation_step(self, batch: Tensor, batch_idx: int) -> Any:
        super().validation_step(batch, batch_idx)
        if batch_idx == 1:
            raise KeyError("broken")


@pytest.mark.parametrize("run", ["fit", "validate"])
def test_nothing_stays_after_an_exception(run: str) -> None:
    module = Broken()
    module.mse = MeanSquaredError()
    found, update = attributes(module), vars(module.mse)["update"]
    trainer = quiet_trainer(plugins=[AmpPrecision("bf16", fp32_modules=["head"])])
    with pytest.raises(KeyError, match="broken"):
        getattr(trainer, run)(module, batches(2), **({"val_dataloaders": batches(2)} if run == "fit" else {}))
    assert attributes(module) == found
    assert vars(module.mse)["update"] is update
    assert not torch.is_autocast_enabled("cpu")


# -- row 24: fp32 modules and evaluation precision ---------------------------------------------------------------------


class Rotary(nn.Module):
    """Positional phases as they are written everywhere: with an explicit `.float()`, which autocast ignores."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", 1.0 / 10_000 ** (torch.arange(0, 8, 2) / 8))

    def forward(self, positions: Tensor) -> Tensor:
        return (self.frequencies[:, None].float() @ positions[None, :].float()).mT


class Positions(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.decoder = nn.ModuleDict({"rotary": Rotary()})
        self.distinct = 0

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        phases = self.decoder["rotary"](torch.arange(4096.0))
        self.distinct = len(phases[:, 0].unique())


@promise(24, stock="769 == 4096")
def test_rotary_positions_are_distinct(plugins: Plugins) -> None:
    module = Positions()
    plugin = AmpPrecision("bf16", fp32_modules=["decoder.rotary"]) if plugins.ours else plugins.bf16()
    quiet_trainer(plugins=[plugin]).validate(module, batches(1), verbose=False)
    assert module.distinct == 4096


class ByHand(Toy):
    def loss(self, batch: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            hidden = self.net[0](batch)
        hidden = self.net[1](hidden)
        with torch.autocast("cpu", enabled=False):
            out = self.net[2](hidden.float())
        return nn.functional.mse_loss(out, batch.sum(1, keepdim=True))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("rules", [["net.0", "net.2"], ["net.[02]"], [nn.Linear], ["net.2", nn.Linear]])
@pytest.mark.filterwarnings("ignore:lightning_amp. precision")  # `ByHand` has an autocast of its own
def test_training_equals_islands_by_hand(rules: list[Any], precision: str) -> None:
    reference = fit(ByHand, AmpPrecision(precision))
    ours = fit(Toy, AmpPrecision(precision, fp32_modules=rules))
    assert_same(ours, reference)
    with pytest.raises(AssertionError, match=DIFFERS):
        assert_same(fit(Toy, AmpPrecision(precision)), reference)
    assert attributes(ours.lightning_module) == attributes(Toy())


def test_all_layers_in_fp32_is_fp32() -> None:
    assert_same(fit(Toy, AmpPrecision("bf16", fp32_modules=["net"])), fit(Toy))


def test_averaged_weights_and_copies_in_training() -> None:
    """Averages copy the module before and during training; copies compute like the original, with their own weights."""
    copies: list[Any] = []

    class Copy(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *args: Any) -> None:
            if not copies:
                copies.append((copy.deepcopy(module.net), weights(module.net)))

    plugin = AmpPrecision("bf16", fp32_modules=["net.*"])
    trainer = fit(Toy, plugin, callbacks=[Copy(), EMAWeightAveraging(decay=0.5)])
    copied, at_the_time = copies[0]
    assert_same(copied, at_the_time)
    x = torch.randn(4, FEATURES)
    with torch.autocast("cpu", torch.bfloat16):
        assert copied(x).dtype == torch.float32
        assert trainer.lightning_module.net(x).dtype == torch.bfloat16


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_rule_that_matches_nothing(precision: str) -> None:
    module = Toy()
    with pytest.raises(ValueError, match="'net.7', which matches no module. Close to it are: 'net.[012]'"):
        fit(module, AmpPrecision(precision, fp32_modules=["net.7"]))
    assert all("forward" not in vars(m) for m in module.modules())


def test_bce_in_fp32_is_not_reported() -> None:
    class Loss(Toy):
        def __init__(self) -> None:
            super().__init__()
            self.losses = nn.ModuleList([nn.BCELoss()])

        def loss(self, batch: Tensor) -> Tensor:
            return self.losses[0](torch.sigmoid(self.net(batch)), (batch.sum(1, keepdim=True) > 0).float())

    fit(Loss, AmpPrecision("bf16", fp32_modules=["losses"]))
    with pytest.warns(UserWarning, match="`nn.BCELoss` .`losses.0`"):
        fit(Loss, AmpPrecision("bf16"))


class Evaluated(Toy):
    def evaluate(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.log("loss", self.loss(batch))
        self.enabled = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        return self.net(batch)

    validation_step = test_step = evaluate

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.trained = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        return self.loss(batch)


@pytest.mark.parametrize("run", EVALUATIONS)
@promise(24, stock=DIFFERS)
def test_evaluation_in_fp32(plugins: Plugins, run: str) -> None:
    def results(plugin: Any) -> Any:
        torch.manual_seed(0)
        trainer, module = quiet_trainer(plugins=[plugin]), Evaluated()
        output = getattr(trainer, run)(module, batches(3), **({} if run == "predict" else {"verbose": False}))
        return [x.float() for x in output] if run == "predict" else trainer.callback_metrics

    plugin = AmpPrecision("fp16", eval_precision="fp32") if plugins.ours else plugins.fp16()
    torch.testing.assert_close(results(plugin), results(AmpPrecision("fp32")), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("train", "evaluate", "expected"),
    [
        ("fp16", "fp32", (torch.float16, None)),
        ("fp16", torch.bfloat16, (torch.float16, torch.bfloat16)),
        ("bf16", "16-mixed", (torch.bfloat16, torch.float16)),
        ("fp32", 16, (None, torch.float16)),
        ("auto", "32-true", (..., None)),
        ("fp16", "auto", (torch.float16, ...)),
        ("bf16", None, (torch.bfloat16, torch.bfloat16)),
    ],
)
def test_spellings_and_switching_in_fit(train: Any, evaluate: Any, expected: tuple[Any, Any]) -> None:
    plugin, module = AmpPrecision(train, eval_precision=evaluate), Evaluated()
    quiet_trainer(plugins=[plugin], max_epochs=2).fit(module, batches(2), batches(2))
    for (enabled, dtype), wanted in zip((module.trained, module.enabled), expected, strict=True):
        if wanted is not ...:
            assert (dtype if enabled else None) == wanted
    assert plugin.dtype == (expected[0] or torch.float32) if expected[0] is not ... else True


def test_training_is_the_same_whatever_evaluates() -> None:
    runs: list[L.LightningModule] = []
    for evaluate in (None, "fp32", "fp16"):
        torch.manual_seed(0)
        runs.append(Evaluated())
        trainer = quiet_trainer(plugins=[AmpPrecision("bf16", eval_precision=evaluate)], val_check_interval=2)
        trainer.fit(runs[-1], batches(), batches(2))
    assert_same(runs[0], runs[1])
    assert_same(runs[0], runs[2])


def test_what_cannot_run_is_said_when_the_trainer_attaches(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="`eval_precision` must be one of 'auto', .*; got 'half'"):
        AmpPrecision("bf16", eval_precision="half")
    with pytest.raises(ValueError, match="`eval_precision='fp8'` is not available"):
        AmpPrecision("bf16", eval_precision="fp8")
    monkeypatch.setattr("lightning_amp.precision._choice.runnable", lambda device: ["bf16", "fp32"])
    with pytest.raises(ValueError, match="cannot run eval_precision 'fp16'. It can run: 'bf16', 'fp32'"):
        quiet_trainer(plugins=[AmpPrecision("bf16", eval_precision="fp16")]).validate(Evaluated(), batches(1))


def float64_batches() -> Any:
    return DataLoader(torch.randn(8, FEATURES, dtype=torch.float64), batch_size=4)


@pytest.mark.parametrize(("train", "evaluate"), [("bf16", None), ("bf16", "fp32"), ("fp32", "bf16")])
def test_float64_batches(train: str, evaluate: str | None) -> None:
    """Row 26 holds for evaluation, too; training in fp32 is left alone."""
    module = Evaluated()
    quiet_trainer(plugins=[AmpPrecision(train, eval_precision=evaluate)]).validate(
        module, float64_batches(), verbose=False
    )
    if train == "fp32":
        with pytest.raises(RuntimeError, match="dtype"):
            fit(Toy, AmpPrecision(train, eval_precision=evaluate), float64_batches())


# -- MetricComparison --------------------------------------------------------------------------------------------------


class Compared(Metrics):
    """`Metrics`, and a value that is computed from kept features at the end."""

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
    """Also where the AMP side is a shadow, because batches were left out: it is treated as the module is."""
    torch.manual_seed(0)
    comparison, module = MetricComparison(limit_batches=limit), Compared()
    trainer = quiet_trainer(plugins=[AmpPrecision("bf16")], callbacks=[comparison], max_epochs=1)
    trainer.fit(module, batches(2, 8), [batches(3, 8, seed=i) for i in range(loaders)])
    differences = {row.metric: row.diff for row in comparison.table}
    assert 0 < abs(differences.pop("head")) < 0.1
    assert len(differences) == 4 * loaders
    assert set(differences.values()) == {0.0}


def test_stock_plugin_still_compares() -> None:
    comparison = MetricComparison(limit_batches=1)

    class TwoLoaders(Toy):
        def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log("loss", self.loss(batch))

    trainer = quiet_trainer(plugins=[stock("bf16")], callbacks=[comparison])
    trainer.fit(TwoLoaders(), batches(2), [batches(2), batches(2)])
    assert {row.metric for row in comparison.table} == {"loss/dataloader_idx_0", "loss/dataloader_idx_1"}
