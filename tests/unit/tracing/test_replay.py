"""A replay runs the same step, in another precision or at another scale, and changes nothing else."""

from __future__ import annotations

import copy
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_amp.tracing import RandomState, make_bundle, replay


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        noise = random.random() + float(np.random.rand())
        return self.net(batch["x"]).float().sum() * (1 + noise) + 0 * batch_idx


def bundle(module: nn.Module, scale: float = 64.0, batch: Any = None) -> dict[str, Any]:
    return make_bundle(
        module_state=module.state_dict(),
        batch={"x": torch.randn(3, 4), "names": ["a"]} if batch is None else batch,
        batch_idx=2,
        random_state=RandomState.capture("cpu"),
        scale=scale,
        loss_divisor=2.0,
        report={"why": "test"},
    )


def test_it_is_the_same_step(tmp_path: Path) -> None:
    module = Net()
    saved = bundle(module)
    torch.save(saved, tmp_path / "a.pt")
    loss = module.training_step(saved["batch"], 2)
    found = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    result = replay(tmp_path / "a.pt", Net)
    assert result.loss == float(loss.detach())
    assert result.diagnosis.cause == "none"
    assert result.parameters == ()
    assert found == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())


def test_a_factory_in_half_precision_gets_the_saved_float32() -> None:
    """A run with `upcast_parameters` saves such weights; weights that were saved in half precision stay so."""
    module = Net()
    module.net[2].to(torch.bfloat16).requires_grad_(False)

    def half() -> nn.Module:
        return Net().to(torch.bfloat16)

    def step(module: Any, batch: Any) -> Tensor:
        assert [p.dtype for p in module.parameters()] == [torch.float32] * 2 + [torch.bfloat16] * 2
        return module.net[0](batch["x"]).sum()

    saved = bundle(module)
    assert replay(saved, half, step=step).loss == float(module.net[0](saved["batch"]["x"]).sum().detach())


def test_precision_and_scale() -> None:
    saved = bundle(Net(), scale=2.0**40)
    assert replay(saved, Net).diagnosis.cause == "none"
    assert replay(saved, Net).headroom_bits < 0
    bad = replay(saved, Net, precision="fp16")
    assert (bad.diagnosis.cause, bad.diagnosis.module) == ("backward", "net.2")
    assert bad.parameters == ("net.0.weight", "net.0.bias", "net.2.weight", "net.2.bias")
    lower = replay(saved, Net, precision=torch.float16, scale=8.0)
    assert lower.diagnosis.cause == "none"
    assert lower.headroom_bits > 0
    assert replay(saved, Net, scale=4.0).headroom_bits - replay(saved, Net, scale=8.0).headroom_bits == 1
    half = replay(saved, Net, step=lambda module, batch: 0.5 * module.training_step(batch, 0), scale=8.0)  # type: ignore[operator]
    assert half.headroom_bits - replay(saved, Net, scale=8.0).headroom_bits == 1


def test_nothing_to_differentiate() -> None:
    saved = bundle(Net())
    result = replay(saved, Net, step=lambda module, batch: batch["x"].sum().requires_grad_())
    assert result.headroom_bits == math.inf


def test_a_damaged_bundle() -> None:
    with pytest.raises(ValueError, match="its entry `random_state` cannot be used"):
        replay({**bundle(Net()), "random_state": {"cpu": torch.ones(3)}}, Net)


def test_a_batch_that_weights_only_refuses(tmp_path: Path) -> None:
    """Other batches and other damage: `test_bundles.py`."""
    torch.save(bundle(Net(), batch={"x": torch.randn(3, 4), "ids": np.arange(3)}), tmp_path / "a.pt")
    with pytest.raises(ValueError, match=r"numpy.*pass `weights_only=False` to `replay`"):
        replay(tmp_path / "a.pt", Net)
    assert replay(tmp_path / "a.pt", Net, weights_only=False).diagnosis.cause == "none"


def test_a_module_in_place_of_a_factory_is_copied() -> None:
    module, other = Net(), Net()
    saved = bundle(other)
    other.zero_grad()
    before = copy.deepcopy(module.state_dict())
    (module.net[0].weight.sum() * 3).backward()
    module.eval()
    assert replay(saved, module) == replay(saved, Net)
    torch.testing.assert_close(module.state_dict(), before, rtol=0, atol=0)
    assert (module.net[0].weight.grad == 3).all()
    assert not module.training


def test_errors_name_a_result_that_is_no_module_or_no_loss() -> None:
    with pytest.raises(TypeError, match="`module_fn` must return a module, its result is a `NoneType`"):
        replay(bundle(Net()), lambda: None)  # type: ignore[arg-type, return-value]
    with pytest.raises(TypeError, match="The step returned no loss, but a `NoneType`. Pass one that does, `step="):
        replay(bundle(Net()), Net, step=lambda module, batch: None)
    with pytest.raises(TypeError, match="no loss"):
        replay(bundle(Net()), Net, step=lambda module, batch: {"other": 1})


def test_extra_state_of_a_module_that_is_no_tensor() -> None:
    class Extra(Net):
        def get_extra_state(self) -> Any:
            return {"step": 3}

        def set_extra_state(self, state: Any) -> None:
            self.state = state

    module = Extra()
    assert replay(bundle(module), Extra).diagnosis.cause == "none"


@pytest.mark.parametrize("precision", ["half", "16-mixed", 16, "e4m3"])
def test_another_precision_is_refused_by_the_name_of_the_argument(precision: Any) -> None:
    with pytest.raises(ValueError, match=f"`precision` must be 'fp32', 'fp16' or 'bf16'; got {precision!r}"):
        replay(bundle(Net()), Net, precision=precision)
