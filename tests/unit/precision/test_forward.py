"""The contexts of steps, and the precision of each step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import Toy, batches, fit
from torch import Tensor

from lightning_amp import AmpPrecision
from lightning_amp.casting import Choice
from lightning_amp.precision._forward import ForwardContexts, autocast


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

    def make() -> torch.autocast:
        made.append(autocast(it.choice, "cpu"))
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
    with it.evaluation_step(it.module):
        assert it.choice.name == "fp32"
        assert not torch.is_autocast_enabled("cpu")
        with it.evaluation_step(it.module):  # a validation that asks for another
            assert it.choice.name == "fp32"
        assert it.choice.name == "fp32"
    assert it.choice.name == "fp16"
    with pytest.raises(KeyError, match="fails"), it.evaluation_step(it.module):
        raise KeyError("fails")
    assert it.choice.name == "fp16"
