"""Row 26: batches of float64, and the precision of each step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import FEATURES, Toy, batches, fit, quiet_trainer
from support.promises import Plugins, promise
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_amp import AmpPrecision
from lightning_amp.casting import Choice
from lightning_amp.precision._forward import ForwardContexts


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@promise(26, stock="same dtype|dtype", raises=RuntimeError)
def test_float64_batches(plugins: Plugins, precision: str) -> None:
    data = DataLoader(torch.randn(8, FEATURES, dtype=torch.float64), batch_size=4)
    trainer = fit(Toy, getattr(plugins, precision)(), data)
    assert trainer.global_step == 2


@pytest.mark.parametrize("validating", [False, True])
def test_fp32_names_what_is_float64_in_a_batch(validating: bool) -> None:
    """Torch says only "mat1 and mat2 must have the same dtype"."""

    class Named(Toy):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x = batch["inputs"][0]
            return self.loss(x.float() if validating else x)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.loss(batch["inputs"][0])

    rows = [{"inputs": (torch.randn(FEATURES, dtype=torch.float64),), "index": torch.tensor(i)} for i in range(4)]
    loader = DataLoader(rows, batch_size=2)
    trainer = quiet_trainer(plugins=[AmpPrecision("fp32")], num_sanity_val_steps=0)
    with pytest.raises(RuntimeError, match=r"`batch\['inputs'\]\[0\]` is float64.*Make the dataset return float32"):
        trainer.fit(Named(), loader, loader)


def test_an_error_of_another_kind_stays_as_it_is() -> None:
    class Fails(Toy):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise RuntimeError("double trouble" if batch.dtype == torch.float32 else "something else")

    for dtype in (torch.float32, torch.float64):
        loader = DataLoader(torch.randn(4, FEATURES, dtype=dtype), batch_size=2)
        with pytest.raises(RuntimeError, match="^(double trouble|something else)$"):
            fit(Fails, AmpPrecision("fp32"), loader)


def test_float64_modules_keep_their_batches() -> None:
    seen: list[torch.dtype] = []

    class Double(Toy):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            seen.append(batch.dtype)
            return (self.net(batch).float() ** 2).mean()

    module = Double()
    module.net.double()
    fit(module, Plugins(True).bf16(), DataLoader(torch.randn(8, FEATURES, dtype=torch.float64), batch_size=4))
    assert seen == [torch.float64] * 2


def test_batches_are_not_copied_for_nothing() -> None:
    batch = next(iter(batches(1)))
    plugin = AmpPrecision("bf16")
    fit(Toy, plugin)
    seen: list[Any] = []

    class Looks(Toy):
        def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
            seen.append(self.trainer.precision_plugin.convert_input({"x": batch})["x"] is batch)
            return super().transfer_batch_to_device(batch, device, dataloader_idx)

    fit(Looks, plugin)
    assert seen == [True] * 8
    assert plugin.convert_input(batch) is batch


class TrainsInValidation(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.dtype] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.seen.append(self.net(batch).dtype)
        return self.loss(batch)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.trainer.strategy.training_step(batch, batch_idx)

    def val_dataloader(self) -> Any:
        return batches(1)


def test_a_training_step_in_validation_leaves_training_as_it_is() -> None:
    """The sanity check comes first."""
    module = TrainsInValidation()
    fit(module, AmpPrecision("bf16", eval_precision="fp32"), batches(2))
    assert module.seen == [torch.float32, torch.bfloat16, torch.bfloat16, torch.float32]


# -- the contexts alone ------------------------------------------------------------------------------------------------


def contexts(
    training: str = "fp16", evaluation: str = "bf16", *, autocast_stays: bool = True
) -> tuple[ForwardContexts, list[Any]]:
    """Return the contexts of a module, and a list that grows with each new autocast."""
    module, made = Toy(), list[Any]()
    module.trainer = quiet_trainer()

    def make() -> torch.autocast:
        choice = it.choice
        made.append(torch.autocast("cpu", choice.dtype if choice.mixed else None, enabled=choice.mixed))
        return made[-1]

    choices = Choice.of(training), Choice.of(evaluation)
    it = ForwardContexts(module, "cpu", *choices, [], make, autocast_stays=autocast_stays)
    return it, made


def test_training_uses_its_autocast_again() -> None:
    for stays, number in ((True, 1), (False, 3)):  # unless a subclass of the plugin makes it, perhaps another each time
        it, made = contexts(autocast_stays=stays)
        for _ in range(3):
            with it.training_step(None):
                assert torch.get_autocast_dtype("cpu") == torch.float16
                assert torch.is_autocast_enabled("cpu")
        assert len(made) == number


@pytest.mark.parametrize("name", ["autocast_context_manager", "forward_context"])
def test_a_plugin_with_an_autocast_of_its_own_makes_it_for_each_step(name: str) -> None:
    made: list[str] = []

    def make(self: AmpPrecision) -> Any:
        made.append(name)
        return getattr(AmpPrecision, name)(self)

    fit(Toy, type("Own", (AmpPrecision,), {name: make})("bf16"), batches(5))
    assert len(made) == 5


def test_a_training_step_inside_of_another_has_contexts_of_its_own() -> None:
    it, made = contexts()
    with it.training_step(None), it.training_step(None):
        assert torch.is_autocast_enabled("cpu")
    assert not torch.is_autocast_enabled("cpu")
    assert len(made) == 2


def test_evaluation_has_its_precision_and_training_its_own_afterwards() -> None:
    it, _ = contexts("fp16", "fp32")
    assert it.choice.name == "fp16"
    with it.evaluation_step(None):
        assert it.choice.name == "fp32"
        assert not torch.is_autocast_enabled("cpu")
        with it.evaluation_step(None):  # a validation that asks for another
            assert it.choice.name == "fp32"
        assert it.choice.name == "fp32"
    assert it.choice.name == "fp16"
    with pytest.raises(KeyError, match="fails"), it.evaluation_step(None):
        raise KeyError("fails")
    assert it.choice.name == "fp16"


def test_only_a_mixture_of_float64_is_explained() -> None:
    it, _ = contexts("fp32", "fp32")
    half, double = (torch.ones(2, dtype=dtype) for dtype in (torch.float16, torch.float64))
    error = RuntimeError("expected Float but found Double")
    assert it.convert_input([half]) == [half]
    it.explain(error)  # its batch has none
    it.convert_input({"x": [half, double]})
    for other in (None, ValueError("Double"), RuntimeError("out of memory")):
        it.explain(other)
    with pytest.raises(RuntimeError, match=r"`batch\['x'\]\[1\]` is float64") as caught:
        it.explain(error)
    assert caught.value.__cause__ is error
    it.convert_input([half])  # the next batch is fine
    it.explain(error)


@pytest.mark.parametrize(
    ("training", "evaluation", "dtype"),
    [("fp16", "fp32", torch.float32), ("fp32", "bf16", torch.float32), ("fp32", "fp32", torch.float64)],
)
def test_who_casts_float64(training: str, evaluation: str, dtype: torch.dtype) -> None:
    """The Trainer does not train here; in `test_float64_batches` it does."""
    it, _ = contexts(training, evaluation)
    converted = it.convert_input({"x": torch.ones(2, dtype=torch.float64), "y": 1})
    assert (converted["x"].dtype, converted["y"]) == (dtype, 1)
