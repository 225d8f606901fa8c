from __future__ import annotations

import copy
import math
import random
import sys
from collections import UserDict, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_amp.tracing import make_bundle, pack_random_state, replay
from lightning_amp.tracing._bundles import copy_to


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        noise = random.random() + float(np.random.rand())
        return self.net(batch["x"]).float().sum() * (1 + noise) + 0 * batch_idx


@dataclass(frozen=True)
class Sample:
    x: Tensor
    name: str = "a"

    def __getitem__(self, key: str) -> Tensor:
        return getattr(self, key)


class Encoding(UserDict):  # type: ignore[type-arg]
    """As `transformers.BatchEncoding`: a mapping that moves itself."""

    def to(self, device: Any) -> Encoding:
        return Encoding({key: value.to(device) for key, value in self.items()})


class Moves:
    def __init__(self, x: Tensor) -> None:
        self.x = x

    def to(self, device: Any) -> Moves:
        return Moves(self.x.to(device))

    def __getitem__(self, key: str) -> Tensor:
        return getattr(self, key)


REFUSED = {
    "dataclass": (Sample, "Sample"),
    "numpy array": (lambda x: {"x": x, "ids": np.arange(3)}, "numpy"),
    "numpy scalar": (lambda x: {"x": x, "id": np.int64(3)}, "numpy"),
    "BatchEncoding": (lambda x: Encoding({"x": x}), "Encoding"),
    "defaultdict": (lambda x: defaultdict(list, {"x": x}), "collections.defaultdict"),
    "a class": (Moves, "Moves"),
}


def bundle(module: nn.Module, scale: float = 64.0, batch: Any = None) -> dict[str, Any]:
    return make_bundle(
        module_state=module.state_dict(),
        batch={"x": torch.randn(3, 4), "names": ["a"]} if batch is None else batch,
        batch_idx=2,
        random_state=pack_random_state(random.getstate(), np.random.get_state(), torch.get_rng_state(), None),
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


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match=r"This is not a bundle .* it has \['a'\]"):
        replay({"a": 1}, Net)
    with pytest.raises(ValueError, match="`precision` must be 'fp32', 'fp16' or 'bf16'; got 'e4m3'"):
        replay(bundle(Net()), Net, precision="e4m3")


@pytest.mark.parametrize("kind", REFUSED)
def test_a_batch_that_weights_only_refuses(kind: str, tmp_path: Path) -> None:
    """The error names what is in the file and the argument; and the argument works."""
    make, name = REFUSED[kind]
    torch.save(bundle(Net(), batch=make(torch.randn(3, 4))), tmp_path / "a.pt")
    with pytest.raises(ValueError, match=rf"{name}.*If you trust it, pass `weights_only=False` to `replay`") as caught:
        replay(tmp_path / "a.pt", Net)
    assert len(str(caught.value).splitlines()) == 1
    assert replay(tmp_path / "a.pt", Net, weights_only=False).diagnosis.cause == "none"


@pytest.mark.parametrize("make", [Sample, Moves, lambda x: Encoding({"x": x}), lambda x: defaultdict(list, {"x": x})])
def test_such_a_batch_goes_to_the_device(make: Any) -> None:
    seen: list[torch.device] = []

    def step(module: nn.Module, batch: Any) -> Tensor:
        seen.append(batch["x"].device)
        return torch.zeros((), requires_grad=True)

    batch = make(torch.randn(3, 4))
    saved = bundle(Net(), batch=batch)
    assert type(saved["batch"]) is type(batch)
    replay(saved, Net, step=step)
    assert seen == [torch.device("cpu")]
    moved = copy_to(batch, torch.device("meta"))
    assert moved["x"].device.type == "meta"
    assert batch["x"].device.type == "cpu"


def test_a_class_that_is_not_there_any_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save(bundle(Net(), batch=Sample(torch.randn(3, 4))), tmp_path / "a.pt")
    monkeypatch.delattr(sys.modules[__name__], "Sample")
    with pytest.raises(ValueError, match=r"cannot be found here \(.*Sample.*\). Call `replay` where the class"):
        replay(tmp_path / "a.pt", Net, weights_only=False)


@pytest.mark.parametrize("weights_only", [True, False])
def test_what_is_no_bundle_is_not_advised_to_be_trusted(weights_only: bool, tmp_path: Path) -> None:
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(ValueError, match="This is not a bundle .* it is a `list`"):
        replay(tmp_path / "list.pt", Net, weights_only=weights_only)
    (tmp_path / "text.pt").write_text("nothing")
    with pytest.raises(ValueError, match=r"This is not a bundle .*text.pt` cannot be loaded"):
        replay(tmp_path / "text.pt", Net, weights_only=weights_only)
    with pytest.raises(FileNotFoundError):
        replay(tmp_path / "missing.pt", Net, weights_only=weights_only)


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


def test_what_is_no_module_and_what_is_no_loss_is_said() -> None:
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


@pytest.mark.parametrize("precision", ["half", "16-mixed", 16])
def test_another_precision_is_refused_by_the_name_of_the_argument(precision: Any) -> None:
    with pytest.raises(ValueError, match=f"`precision` must be 'fp32', 'fp16' or 'bf16'; got {precision!r}"):
        replay(bundle(Net()), Net, precision=precision)
