"""The plugin's records of its steps, and its settings in a copy."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import Manual, Poison, Toy, batches, fit, scaled_fp32
from support.promises import OPTIMIZERS, PLAIN_AND_FUSED
from torch import Tensor

from lightning_amp import AmpPrecision
from lightning_amp.findings import StepRecord


class Asks(Manual):
    """Asks the plugin right after the optimizer's step has returned."""

    def __init__(self, optimizer: Any, ask: Callable[[Any], Any]) -> None:
        super().__init__(optimizer)
        self.ask = ask
        self.answers: list[Any] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()
        self.answers.append(self.ask(self.trainer.precision_plugin))


@pytest.mark.usefixtures("where_flags_live")
@pytest.mark.parametrize("optimizer", PLAIN_AND_FUSED)
@pytest.mark.parametrize("bad", [{0, 2}, {1, 2}])
def test_a_step_is_known_as_soon_as_it_returned(bad: set[int], optimizer: str) -> None:
    """The scale moves at the end of the batch; until then `next_scale` is the scale in force."""
    module = Asks(OPTIMIZERS[optimizer], lambda p: (p.num_steps, p.num_skipped, p.last_step, p.scaler.get_scale()))
    plugin = scaled_fp32(init_scale=64.0)
    fit(module, plugin, batches(4), callbacks=[Poison(gradient=bad)])
    for i, (num_steps, num_skipped, last, scale) in enumerate(module.answers):
        skips = len(bad & {*range(i + 1)})
        assert (num_steps, num_skipped) == (i + 1 - skips, skips)
        assert scale == 64.0 * 0.5 ** len(bad & {*range(i)})
        assert last == StepRecord(i, 0, scale, scale, i in bad, "gradient" if i in bad else "none", "fp16")
    assert plugin.last_step == StepRecord(3, 0, 16.0, 16.0, False, "none", "fp16")
    assert (plugin.num_steps, plugin.num_skipped) == (2, 2)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda plugin: pickle.loads(pickle.dumps(plugin))])
def test_a_copy_takes_settings_and_scale_along_and_not_the_run(copied: Callable[[Any], Any]) -> None:
    """The module of the run could not even be pickled: `Toy` has a lambda."""
    module = Asks(OPTIMIZERS["sgd"], copied)
    plugin = AmpPrecision("fp16", scaler=torch.amp.GradScaler("cpu", init_scale=64.0), fp32_modules=["net.0"])
    fit(module, plugin, batches(2), callbacks=[Poison(gradient=[0])])
    second = module.answers[1]
    assert (second.num_steps, second.num_skipped, second.last_step) == (0, 0, None)
    assert (second.fp32_modules, second.precision, second.scaler.get_scale()) == (("net.0",), "16-mixed", 32.0)
    assert second.evaluation_context(module).__class__ is torch.autocast  # attached to nothing
    assert plugin.num_steps == 1
    fit(Toy, second)
    assert second.num_steps == 8
