"""Arguments that are refused before anything runs."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from lightning import LightningDataModule, LightningModule

from lightning_amp import DynamicLossScaler
from lightning_amp.tune.fp32_modules._request import Request

CPU = {"accelerator": "cpu"}


def request(precision: Any, tolerance: Any, kwargs: Any) -> Request:
    return Request(LightningModule, LightningDataModule, precision, tolerance, kwargs)


def test_what_is_measured_and_what_makes_no_difference() -> None:
    arm = {"precision": "16-mixed", "fp32_modules": ["head"], "scaler": DynamicLossScaler()}
    asked = request(arm, 0.05, CPU | {"max_epochs": 3})
    assert (asked.name, asked.tolerance, asked.rules) == ("fp16", 0.05, ("head",))
    assert asked.arguments == {"precision": "fp16", "fp32_modules": ["head"]}
    assert asked.device == torch.device("cpu")
    assert request(torch.bfloat16, 1, CPU).name == "bf16"


@pytest.mark.parametrize("tolerance", [0, -0.1, math.inf, math.nan, "0.05", None, True])
def test_a_tolerance(tolerance: Any) -> None:
    with pytest.raises(ValueError, match=r"`tolerance` must be a finite number above 0, such as 0.05, got "):
        request("fp16", tolerance, CPU)


@pytest.mark.parametrize(
    ("precision", "text"),
    [
        ("fp32", "must be 'fp16' or 'bf16', got 'fp32': all modules are in fp32 already"),
        ("fp8", "must be 'fp16' or 'bf16', got 'fp8'. Search in 'bf16'"),
        ("half", "must be one of 'auto', 'bf16'"),
        ({"precision": "fp16", "fp32_module": ["head"]}, "unexpected keyword argument 'fp32_module'"),
        ({"precision": "bf16", "scaler": 2.0}, "scaler"),
        ({"precision": "fp16", "fp32_modules": "head"}, r"`fp32_modules` must be a sequence of rules"),
    ],
)
def test_a_precision(precision: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        request(precision, 0.05, CPU)


@pytest.mark.parametrize(
    ("kwargs", "text"),
    [
        ({"plugins": []}, "must not have 'plugins', which is what is searched for. Pass it as `precision=`"),
        ({"precision": "16-mixed"}, "must not have 'precision'"),
        ({"max_epoch": 1}, "Did you mean 'max_epochs'"),
        ([1], "must be a mapping"),
    ],
)
def test_trainer_kwargs(kwargs: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        request("fp16", 0.05, kwargs)


def test_the_device_is_that_of_the_accelerator(device: torch.device, accelerator: str) -> None:
    assert request("bf16", 0.05, {"accelerator": accelerator}).device.type == device.type
    assert request("bf16", 0.05, CPU).device == torch.device("cpu")
