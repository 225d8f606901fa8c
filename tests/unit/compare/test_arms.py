"""Parsing arms as users write them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import FSDPStrategy
from torch import nn

from lightning_amp import AmpPrecision, DynamicLossScaler, FSDPAmpPrecision
from lightning_amp.compare._arms import parse_arms


def test_names_are_labels() -> None:
    arms = parse_arms(("fp32", "16-mixed", 32, torch.bfloat16, "auto"))
    assert list(arms) == ["fp32", "16-mixed", "32", "torch.bfloat16", "auto"]
    assert [arm.plugin().precision for arm in arms.values()][:4] == ["32-true", "16-mixed", "32-true", "bf16-mixed"]


def test_a_mapping() -> None:
    stock = MixedPrecision("bf16-mixed", "cpu")
    arms = parse_arms(
        {
            "reference": "fp32",
            "head in fp32": {
                "precision": "fp16",
                "fp32_modules": ["head", nn.LayerNorm],
                "scaler": DynamicLossScaler(8.0),
            },
            "stock": stock,
            "ours": AmpPrecision("bf16"),
            "default": {},
        }
    )
    assert arms["stock"].plugin() is stock
    own = arms["head in fp32"].plugin()
    assert own.fp32_modules == ("head", nn.LayerNorm)
    assert arms["head in fp32"].description.startswith("AmpPrecision('fp16', fp32_modules=['head', LayerNorm]")
    assert arms["reference"].description == "AmpPrecision('fp32')"
    assert " at 0x" not in "".join(arm.description for arm in arms.values())
    assert arms["default"].plugin()._settings.requested == "auto"


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp_cpu_offload", FSDPStrategy()])
def test_fsdp_has_a_plugin_of_its_own(strategy: Any) -> None:
    arms = parse_arms(["bf16"], strategy)
    assert type(arms["bf16"].plugin(strategy)) is FSDPAmpPrecision
    assert type(arms["bf16"].plugin("ddp")) is AmpPrecision


@pytest.mark.parametrize(
    ("precisions", "message"),
    [
        ((), "at least one"),
        ({}, "at least one"),
        ("fp32", r"Write `precisions=\['fp32'\]`"),
        (16, "a sequence of precisions"),
        (None, "a sequence of precisions"),
        ({"fp32", "bf16"}, "A set has no first one, which is the reference"),
        (("fp32", "fp4"), r"`precisions\['fp4'\]` must be one of"),
        (("fp32", "64-true"), r"`precisions\['64-true'\]` must be one of"),
        (("fp32", "fp32"), "different labels, got 'fp32' twice"),
        (("fp32", AmpPrecision("bf16")), "Give a plugin or arguments a label"),
        ((True,), "names if it is a sequence"),
        ({"a": "fp32", 1: "bf16"}, "labelled by texts"),
        ({"a": "fp32", "control": "bf16"}, "other names than 'control'"),
        ({"a": AmpPrecision}, "got the class AmpPrecision. Make one of it"),
        ({"a": {"precision": "fp16", "fp32_module": ["x"]}}, r"`precisions\['a'\]`: .*'fp32_module'.*The arguments"),
        ({"a": 3.5}, "must be one of"),
        ({"a": {"precision": "bf16", "scaler": 8.0}}, r"`precisions\['a'\]`: .*does not use a loss scaler"),
    ],
)
def test_refusals(precisions: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_arms(precisions)


class Unsendable(MixedPrecision):
    def __reduce__(self) -> Any:
        raise TypeError("I stay here")


def test_a_plugin_that_cannot_be_sent() -> None:
    with pytest.raises(ValueError, match="cannot be sent to another process: TypeError: I stay here"):
        parse_arms({"a": Unsendable("bf16-mixed", "cpu")})
