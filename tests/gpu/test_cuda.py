"""Behaviour that only a CUDA device shows. `LIGHTNING_AMP_TEST_DEVICE=cuda make test-all` runs the other tests there,
too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
from support import Poison, Toy, assert_same, batches, fit, weights
from support.promises import fused_adamw, fused_sgd, plain_adamw
from torch.optim.lr_scheduler import ExponentialLR

from lightning_amp import AmpPrecision, DynamicLossScaler, ScaleMonitor

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

PLUGINS: dict[str, Callable[[], AmpPrecision]] = {
    "bf16": lambda: AmpPrecision("bf16"),
    "fp16": lambda: AmpPrecision("fp16", scaler=DynamicLossScaler(1024.0)),
    "fp32": lambda: AmpPrecision("fp32"),
}


class Looks(Toy):
    def on_before_optimizer_step(self, optimizer: Any) -> None: ...


def run(plugin: AmpPrecision, module: Toy | Callable[[], Toy], **kwargs: Any) -> L.Trainer:
    return fit(module, plugin, kwargs.pop("data", batches(6)), accelerator="cuda", **kwargs)


@pytest.mark.parametrize("optimizer", [plain_adamw, fused_adamw, fused_sgd])
@pytest.mark.parametrize("plugin", PLUGINS)
def test_a_skipped_step_leaves_no_trace(plugin: str, optimizer: Any) -> None:
    amp = PLUGINS[plugin]()
    module = Toy(optimizer, None, lambda o: ExponentialLR(o, 0.9))
    monitor = ScaleMonitor()
    trainer = run(amp, module, callbacks=[Poison(gradient=[0, 3]), monitor])
    assert (amp.num_steps, amp.num_skipped) == (4, 2)
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(module.lr_schedulers().base_lrs[0] * 0.9**4)
    assert all(w.isfinite().all() for w in weights(module).values())
    assert [r.index for r in monitor.history if r.skipped] == [0, 3]


def test_folded_equals_plain() -> None:
    folded, plain = (run(PLUGINS["fp16"](), partial(kind, fused_adamw), gradient_clip_val=0.3) for kind in (Toy, Looks))
    assert_same(folded, plain, rtol=1e-5, atol=1e-6)


def test_auto_picks_what_the_device_has() -> None:
    plugin = AmpPrecision()
    run(plugin, Toy())
    expected = "bf16-mixed" if torch.cuda.is_bf16_supported(including_emulation=False) else "16-mixed"
    assert plugin.precision == expected
    assert plugin.device == "cuda"


def test_the_gradients_it_writes_back_are_true() -> None:
    """After a step with folded unscaling, `p.grad` holds the same values as after the plain order of calls."""
    grads: dict[str, list[torch.Tensor]] = {}

    class Keep(L.Callback):
        def __init__(self, name: str) -> None:
            self.name = name

        def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *args: Any) -> None:
            grads[self.name] = [p.grad.clone() for p in module.parameters()]

    for name, kind in (("folded", Toy), ("plain", Looks)):
        module = partial(kind, fused_adamw)
        run(PLUGINS["fp16"](), module, data=batches(1), gradient_clip_val=0.3, callbacks=[Keep(name)])
    assert_same(grads["folded"], grads["plain"], rtol=1e-5, atol=1e-7)
