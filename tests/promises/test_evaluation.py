"""Row 23: outputs of evaluation are fp32, and epoch-end hooks can use tensors that steps kept."""

from __future__ import annotations

import dataclasses
from typing import Any

import lightning as L
import pytest
import torch
from support import DEVICE, FEATURES, Toy, attributes, batches, evaluate, fit, quiet_trainer
from support.promises import Plugins, promise
from torch import Tensor, nn
from torchmetrics.regression import R2Score

from lightning_amp import AmpPrecision
from lightning_amp.casting._method_override import MethodOverride

EVALUATIONS = ["validate", "test", "predict"]


@dataclasses.dataclass
class Output:
    logits: Tensor
    extra: Any


class Outputs(Toy):
    """Return nested half-precision outputs, keep features, and use them in the hooks at the end of epochs."""

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
        self.seen[name] = self.head(torch.cat(features)), torch.is_autocast_enabled(DEVICE)
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
    """Record the outputs of each step that callbacks receive."""

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
    evaluate(run, module, batches(2), plugins=[getattr(plugins, precision)()], callbacks=[seen])
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


def test_each_training_epoch_ends_in_the_context_of_its_steps() -> None:
    class Ends(Toy):
        def __init__(self) -> None:
            super().__init__()
            self.r2, self.seen = R2Score(), []

        def on_train_epoch_end(self) -> None:
            self.r2.reset()
            self.r2.update(torch.arange(99.0, 103.0), torch.arange(100.0, 104.0).bfloat16())
            self.seen.append((torch.is_autocast_enabled(DEVICE), float(self.r2.compute())))

    assert fit(Ends, AmpPrecision("bf16"), max_epochs=3).lightning_module.seen == [(True, pytest.approx(0.2))] * 3


def test_fp32_leaves_outputs_and_hooks_alone() -> None:
    class Half(Outputs):
        def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            self.features["evaluate"].append(self.net[0](batch))
            return self.net(batch).half()

    module = Half()
    predictions = quiet_trainer(plugins=[AmpPrecision("fp32")]).predict(module, batches(2))
    assert predictions[0].dtype == torch.float16  # the user's own dtype stays, as in fp32
    assert module.seen["predict"][1] is False


@pytest.mark.needs("nccl")
def test_outputs_under_ddp() -> None:
    """There, Lightning redirects the step through the wrapper's forward."""
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
    quiet_trainer(plugins=[AmpPrecision("bf16", fp32_modules=["head"])]).validate(compiled, batches(2), verbose=False)
    assert module.seen["validate"][0].dtype == torch.float32
    assert not isinstance(vars(module).get("validation_step"), MethodOverride)


@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize("export", ["script", "export"])
def test_a_model_that_is_used_many_times_can_be_exported_in_an_epoch_end_hook(export: str) -> None:
    x = torch.ones(2, FEATURES, device=DEVICE)

    class Exports(Toy):
        outputs: Any = None

        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            self.net(self.net(batch))

        def on_validation_epoch_end(self) -> None:
            if export == "script":
                self.outputs = torch.jit.script(self.net)(x)
            else:
                self.outputs = torch.export.export(self.net, (x,)).module()(x)

    module = Exports(net=nn.Linear(FEATURES, FEATURES))
    quiet_trainer(plugins=[AmpPrecision("bf16")]).validate(module, batches(), verbose=False)
    torch.testing.assert_close(module.outputs.float().cpu(), module.net(x.cpu()), rtol=0.05, atol=0.05)
