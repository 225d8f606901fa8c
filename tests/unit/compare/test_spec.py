"""Arms as users write them, and factories that travel by value."""

from __future__ import annotations

import importlib.util
import pickle
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import FSDPStrategy
from torch import nn
from zoo.compared import Waves

from lightning_amp import AmpPrecision, DynamicLossScaler, FSDPAmpPrecision
from lightning_amp.compare import check_factory, parse_arms
from lightning_amp.compare._spec import dumps

# -- arms --------------------------------------------------------------------------------------------------------------


def test_names_are_labels() -> None:
    arms = parse_arms(("fp32", "16-mixed", 32, torch.bfloat16, "auto"))
    assert list(arms) == ["fp32", "16-mixed", "32", "torch.bfloat16", "auto"]
    assert [arm.plugin().precision for arm in arms.values()][:4] == ["32-true", "16-mixed", "32-true", "bf16-mixed"]


def test_a_mapping() -> None:
    stock = MixedPrecision("bf16-mixed", "cpu")
    own = {"precision": "fp16", "fp32_modules": ["head", nn.LayerNorm], "scaler": DynamicLossScaler(8.0)}
    arms = parse_arms({"reference": "fp32", "head in fp32": own, "stock": stock, "ours": AmpPrecision("bf16")})
    assert arms["stock"].plugin() is stock
    assert arms["head in fp32"].plugin().fp32_modules == ("head", nn.LayerNorm)
    assert arms["head in fp32"].description.startswith("AmpPrecision('fp16', fp32_modules=['head', LayerNorm]")
    assert arms["reference"].description == "AmpPrecision('fp32')"
    assert " at 0x" not in "".join(arm.description for arm in arms.values())


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp_cpu_offload", FSDPStrategy()])
def test_fsdp_has_a_plugin_of_its_own(strategy: Any) -> None:
    arms = parse_arms(["bf16"], strategy)
    assert type(arms["bf16"].plugin(strategy)) is FSDPAmpPrecision
    assert type(arms["bf16"].plugin("ddp")) is AmpPrecision


# -- factories ---------------------------------------------------------------------------------------------------------


def needs(width: int) -> Waves:
    return Waves(width)


class Maker:
    def make(self) -> Waves:
        return Waves()


@pytest.mark.parametrize("factory", [Waves, partial(needs, 3), Maker().make, lambda: Waves(4), lambda: needs(4)])
def test_factories_that_travel(factory: Any) -> None:
    check_factory("make_module", factory, L.LightningModule)
    assert isinstance(pickle.loads(dumps(factory))(), Waves)


def test_without_cloudpickle_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(ModuleNotFoundError, match="Run `pip install cloudpickle scipy`"):
        check_factory("make_module", Waves, L.LightningModule)


@pytest.mark.parametrize("name", ["odd_place", "json"])  # no module of that name is found, or another one
def test_a_module_that_another_process_does_not_find_travels_by_value(name: str, tmp_path: Path) -> None:
    file = tmp_path / f"{name}.py"
    file.write_text(
        "SIZE = 3\ndef size():\n    return SIZE\nclass Made:\n    def __init__(self):\n        self.n = size()\n"
    )
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        sent = dumps([module.Made], module.Made)
    code = "import pickle, sys; print(pickle.loads(sys.stdin.buffer.read())[0]().n)"
    done = subprocess.run([sys.executable, "-c", code], input=sent, capture_output=True, check=False)
    assert done.stdout == b"3\n", done.stderr
