"""Lightning's hooks of the plugin: without a run there is autocast only."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import DEVICE, Toy, assert_same, batches, quiet_trainer, scaled_fp32
from torch import Tensor

from lightning_amp import AmpPrecision

STEPS = ["train_step_context", "val_step_context", "test_step_context", "predict_step_context", "forward_context"]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(("precision", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16), ("fp32", None)])
def test_without_a_run_a_step_is_in_plain_autocast(precision: str, dtype: torch.dtype | None, step: str) -> None:
    plugin = AmpPrecision(precision, eval_precision="fp32")
    context = getattr(plugin, step)()
    assert type(context) is torch.autocast
    with context:
        assert torch.is_autocast_enabled(plugin.device) == (dtype is not None)
        if dtype is not None:
            assert torch.get_autocast_dtype(plugin.device) == dtype
            assert not torch.is_autocast_cache_enabled()
    assert not torch.is_autocast_enabled(plugin.device)


def test_without_a_run_nothing_is_unscaled_or_written() -> None:
    plugin = AmpPrecision("fp16")
    optimizer = torch.optim.SGD([parameter := torch.nn.Parameter(torch.ones(2))], lr=0.1)
    parameter.grad = torch.full((2,), 3.0)
    plugin.unscale_(optimizer)
    assert_same(parameter.grad, torch.full((2,), 3.0))
    plugin.flush()
    plugin.teardown()
    assert plugin.num_steps == 0


class Differentiates(Toy):
    """Computes gradients in an evaluation, as adversarial tests do."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.gradients: list[Tensor] = []
        self.autocast: list[bool] = []

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        with torch.enable_grad():
            batch = batch.clone().requires_grad_()
            self.manual_backward(self.loss(batch))
        assert batch.grad is not None
        self.gradients.append(batch.grad)

    test_step = validation_step

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        self.autocast.append(torch.is_autocast_enabled(DEVICE))
        super().backward(loss, *args, **kwargs)


@pytest.mark.parametrize("run", ["validate", "test"])
def test_a_backward_in_an_evaluation_is_not_scaled(run: str) -> None:
    """Nothing would divide by the scale."""
    modules: list[Differentiates] = []
    for plugin in (scaled_fp32(init_scale=1024.0), None):
        torch.manual_seed(0)
        modules.append(Differentiates())
        trainer = quiet_trainer(plugins=[] if plugin is None else [plugin], inference_mode=False)
        getattr(trainer, run)(modules[-1], batches(2), verbose=False)
    assert_same(modules[0].gradients, modules[1].gradients)
    quiet_trainer(plugins=[AmpPrecision("bf16")], inference_mode=False).validate(
        mixed := Differentiates(), batches(2), verbose=False
    )
    assert mixed.autocast == [False, False]  # the step is under autocast, its backward is not
