"""Row 44: a backward and a step through Lightning outside of a fit behave as with Lightning's own plugin."""

from __future__ import annotations

import re
from typing import Any

import lightning as L
import pytest
import torch
from support import DEVICE, Toy, assert_as_fp32, assert_same, batches, quiet_trainer, scaled_fp32
from support.promises import OPTIMIZERS, PLAIN_AND_FUSED, plain_sgd
from torch import Tensor

from lightning_amp import AmpPrecision

PLUGINS = {
    "scaled": scaled_fp32,
    "fp32": lambda: AmpPrecision("fp32"),
    "not skipping": lambda: AmpPrecision("fp32", skip_nonfinite=False),
}


class Manual(Toy):
    """A module that takes one more step in a hook."""

    automatic_optimization = property(lambda self: False)

    def __init__(self, hook: str = "", optimizer: Any = plain_sgd, drops: bool = True) -> None:
        super().__init__(optimizer)
        self.hook, self.drops = hook, drops

    def train_batch(self, batch: Tensor) -> None:
        optimizer: Any = self.optimizers() or self.configure_optimizers()  # an evaluation has no optimizer
        if self.drops:
            optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        self.train_batch(batch)

    def run_in(self, hook: str) -> None:
        if self.hook == hook:
            self.train_batch(next(iter(batches(seed=1))).to(self.device))

    def on_fit_end(self) -> None:
        self.run_in("on_fit_end")

    def teardown(self, stage: str) -> None:
        self.run_in("teardown")


class Evaluated(Manual):
    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        if self.hook == "validation_step":
            with torch.inference_mode(False), torch.enable_grad():
                self.train_batch(batch.clone())


def trained(hook: str, plugin: Any, optimizer: Any = plain_sgd, **kwargs: Any) -> L.LightningModule:
    torch.manual_seed(0)
    module = (Evaluated if "valid" in hook else Manual)(hook, optimizer, **kwargs)
    trainer = quiet_trainer(plugins=None if plugin is None else [plugin], inference_mode=False)
    if "valid" in hook:
        trainer.validate(module, batches(2), verbose=False)
    else:
        trainer.fit(module, batches(4))
    if hook.startswith("after"):
        module.run_in(hook)
    return module


@pytest.mark.parametrize("optimizer", ["sgd", "fused adamw"])
@pytest.mark.parametrize("plugin", PLUGINS)
@pytest.mark.parametrize("hook", ["on_fit_end", "teardown", "after fit", "after validate", "validation_step"])
def test_it_is_the_step_of_fp32(hook: str, plugin: str, optimizer: str) -> None:
    make = OPTIMIZERS[optimizer]
    try:
        expected = trained(hook, None, make)
    # on a GPU, Lightning moves the module back to the CPU, but not all of a fused optimizer's state
    except RuntimeError as error:
        with pytest.raises(RuntimeError, match=re.escape(str(error))):
            trained(hook, PLUGINS[plugin](), make)
    else:
        assert_same(trained(hook, PLUGINS[plugin](), make), expected)


@pytest.mark.needs("parameters that stay")
@pytest.mark.usefixtures("where_flags_live")
@pytest.mark.parametrize("optimizer", ["sgd", "fused adamw"])
def test_gradients_that_the_fit_left_are_true_ones(optimizer: str) -> None:
    """Gradients left after the fit are unscaled, so that gradients added later have the same scale."""
    if optimizer == "fused adamw" and DEVICE != "cpu":
        pytest.skip("Lightning moves the module to the CPU after a fit, and not all of a fused optimizer's state")
    make = OPTIMIZERS[optimizer]
    one, other = (trained("on_fit_end", plugin, make, drops=False) for plugin in (scaled_fp32(), None))
    assert_same(one, other)
    for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)  # pyright: ignore[reportArgumentType]


def test_a_step_after_the_run_is_not_counted() -> None:
    plugin = scaled_fp32()
    trained("after fit", plugin)
    assert plugin.num_steps == 4


# -- other moments at which nobody expects a call ----------------------------------------------------------------------


class BackwardInHook(Manual):
    """Add the gradient of another loss right before the step."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.manual_backward(self.loss(torch.ones(4, 8, device=self.device)))


@pytest.mark.usefixtures("where_flags_live")
@pytest.mark.parametrize("optimizer", PLAIN_AND_FUSED)
@pytest.mark.parametrize("plugin", PLUGINS)
def test_a_backward_in_the_hook_before_the_step(plugin: str, optimizer: str) -> None:
    ours = PLUGINS[plugin]()
    assert_as_fp32(lambda: BackwardInHook(optimizer=OPTIMIZERS[optimizer]), ours)
    assert ours.num_steps == 8
