"""fp8 in a fit: its messages, its errors, and its end with the fit."""

from __future__ import annotations

import copy
import logging
import pickle
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning
from support import DEVICE, Toy, attributes, batches, fit, quiet_trainer
from support.fp8 import Deep, emulated, float8, needs_torchao

from lightning_amp import AmpPrecision, GradientMonitor
from lightning_amp._compat import _torchao

pytestmark = needs_torchao
EMULATED = "ignore:lightning_amp. fp8 is emulated"


def plugin(**kwargs: Any) -> AmpPrecision:
    return AmpPrecision("fp8", **({"fp8_recipe": emulated()} | kwargs))


def net(**kwargs: Any) -> Toy:
    torch.manual_seed(0)
    return Toy(net=Deep(**kwargs))


@pytest.mark.filterwarnings(EMULATED)
def test_the_first_line_says_how_many_layers(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        fit(net(), plugin(), batches(1))
    assert (
        "lightning_amp: fp8 products in 4 of 6 linear layers (about 93.4 % of their FLOPs, own recipe, emulated), bf16"
        f" autocast on {DEVICE}, evaluation in bf16; non-finite steps are skipped."
        in [text.replace(" (emulated, which is slow)", "") for text in caplog.messages]
    )


@pytest.mark.filterwarnings(EMULATED)
def test_layers_are_known_from_the_fit_on() -> None:
    amp, module = plugin(), net()
    assert dict(amp.fp8_layers) == {}
    before = attributes(module)
    quiet_trainer(plugins=[amp]).validate(Validated(module), batches(1))
    assert dict(amp.fp8_layers) == {}
    fit(module, amp)
    assert dict(amp.fp8_layers) == {
        "net.0": "the first linear layer", "net.2": None, "net.4": None, "net.6": None, "net.8": None,
        "net.10": "the last linear layer",
    }  # fmt: skip
    assert attributes(module) == before
    copied = copy.deepcopy(amp.fp8_layers)
    assert copied == pickle.loads(pickle.dumps(copied)) == amp.fp8_layers
    copied.clear()  # pyright: ignore[reportAttributeAccessIssue]
    amp.fp8_layers.clear()  # pyright: ignore[reportAttributeAccessIssue]
    assert len(amp.fp8_layers) == 6


class Validated(Toy):
    def __init__(self, toy: Toy) -> None:
        super().__init__(net=toy.net)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(batch)


@pytest.mark.parametrize("verb", ["validate", "test", "predict"])
def test_where_nothing_is_trained_nothing_is_needed(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_torchao, "torchao_float8", lambda: pytest.fail("needs no torchao"))

    class Whole(Validated):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.loss(batch)

        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return self.loss(batch)

    getattr(quiet_trainer(plugins=[AmpPrecision("fp8")]), verb)(Whole(net()), batches(1))


@pytest.mark.cpu
def test_a_device_without_fp8_is_refused_before_anything_runs() -> None:
    module = net()
    module.training_step = lambda *args: pytest.fail("reached the first batch")
    with pytest.raises(ValueError, match="cannot run precision 'fp8'"):
        fit(module, AmpPrecision("fp8"))
    assert "forward" not in vars(module.net[2])


def test_no_layer_qualifies() -> None:
    with pytest.raises(ValueError, match=r"(?s)none of the 6 linear layers qualifies.*8 x 8: not both.*fp8.md"):
        fit(net(width=8), plugin())


@pytest.mark.filterwarnings(EMULATED, "ignore:torch.get_autocast_gpu_dtype")  # by torchao
def test_layers_that_the_user_converted_count(caplog: pytest.LogCaptureFixture) -> None:
    convert_to_float8_training = float8().convert_to_float8_training
    module = net()
    theirs = convert_to_float8_training(module.net[4], config=emulated())
    theirs.register_forward_pre_hook(lambda layer, args: (args[0].bfloat16(),))  # which torchao does on CUDA alone
    module.net[4] = theirs
    amp = plugin()
    with caplog.at_level(logging.INFO):
        fit(module, amp, batches(1))
    assert "fp8 products in 3 of 6 linear layers (about 70" in caplog.text
    assert "in addition to 1 that you converted yourself" in caplog.text
    assert module.net[4] is theirs
    assert amp.fp8_layers["net.4"] == "converted to fp8 by you already"


@pytest.mark.filterwarnings(EMULATED, "ignore:The model layers do not require gradients", "ignore:.*in eval mode")
def test_a_backbone_that_is_unfrozen_later_is_in_fp8_from_then_on() -> None:
    class Unfreeze(BaseFinetuning):
        def freeze_before_training(self, pl_module: Any) -> None:
            self.freeze(list(pl_module.net)[:-1])

        def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
            if epoch == 1:
                self.unfreeze_and_add_param_group(list(pl_module.net)[:-1], optimizer)

    amp, module = plugin(), Toy(lambda params: torch.optim.SGD([p for p in params if p.requires_grad], 0.01), Deep())
    monitor = GradientMonitor(1)
    trainer = fit(module, amp, batches(2), max_epochs=2, callbacks=[Unfreeze(), monitor])
    assert trainer.global_step == 4
    assert amp.fp8_layers["net.4"] == "frozen; it runs in fp8 once it is unfrozen"
    assert next(row for row in monitor.table.last if row.name == "net.4").sqnr_db < 38
    with pytest.raises(ValueError, match="(?s)none of the 6 linear layers qualifies.*frozen"):
        fit(Toy(lambda p: torch.optim.SGD([*p][-2:], 0.01), Deep().requires_grad_(False)), plugin())
