"""`FabricAmpPrecision` on a GPU: as `AmpPrecision` in a Trainer, also with a clipped fused optimizer."""

from __future__ import annotations

import lightning as L
import pytest
import torch
from multi_rank.ranks import Infinite
from torch import Tensor, nn

from lightning_amp import DynamicLossScaler, FabricAmpPrecision

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def trained(precision: str, bad: tuple[int, ...] = ()) -> tuple[list[Tensor], FabricAmpPrecision]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 1))
    amp = FabricAmpPrecision(precision, scaler=DynamicLossScaler(1024.0) if precision == "fp16" else None)
    fabric = L.Fabric(accelerator="cuda", devices=1, plugins=[amp])
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), 0.01, fused=True))
    for number in range(8):
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(number)).to(fabric.device)
        optimizer.zero_grad()
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        fabric.backward(Infinite.apply(loss) if number in bad else loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
    return [value.cpu() for value in net.state_dict().values()], amp


@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32", "auto"])
def test_a_clipped_fused_optimizer_trains_as_in_fp32(precision: str) -> None:
    exact, _ = trained("fp32")
    values, amp = trained(precision)
    assert amp.num_steps == 8
    one, other = (torch.cat([value.double().flatten() for value in all_of]) for all_of in (values, exact))
    assert (one - other).norm() < 0.05 * other.norm()


def test_an_overflow_skips_the_step_and_restores_the_statistics() -> None:
    values, amp = trained("fp16", (3,))
    assert (amp.num_steps, amp.num_skipped) == (7, 1)
    assert all(bool(value.isfinite().all()) for value in values)
    assert values[-3] == 7, "`num_batches_tracked`"


def test_calls_after_a_step_wait_for_no_device() -> None:
    _, amp = trained("fp16")
    calls: list[int] = []
    amp.on_applied(calls.append, 1)
    assert calls == []
    amp.flush()
    assert calls == [1]
