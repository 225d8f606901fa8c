"""The device that Lightning would train on is found, and a private fit restores the current device."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import Trainer
from lightning.pytorch.accelerators import Accelerator

from lightning_amp.shadow import device_of_trainer, private_trainer, unnoticed


class Elsewhere(Accelerator):
    """An accelerator for a device that Lightning does not know, as other packages provide it."""

    def setup_device(self, device: torch.device) -> None: ...

    def teardown(self) -> None: ...

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        return {}

    @staticmethod
    def parse_devices(devices: Any) -> Any:
        return list(range(devices)) if isinstance(devices, int) else devices

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        return [torch.device("xpu", index) for index in devices]

    @staticmethod
    def auto_device_count() -> int:
        return 4

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def name() -> str:
        return "elsewhere"


@pytest.mark.parametrize(
    ("trainer_kwargs", "expected"),
    [
        ({"accelerator": "cpu"}, "cpu"),
        ({"accelerator": "cpu", "devices": 2}, "cpu"),
        ({"accelerator": Elsewhere()}, "xpu:0"),
        ({"accelerator": Elsewhere(), "devices": [2, 3]}, "xpu:2"),
        ({"accelerator": Elsewhere(), "devices": 1, "strategy": "ddp"}, "xpu:0"),
    ],
)
def test_the_first_device_that_a_trainer_would_train_on(trainer_kwargs: dict[str, Any], expected: str) -> None:
    assert device_of_trainer(trainer_kwargs) == torch.device(expected)


def test_a_trainer_of_the_users_own_chooses_the_same(device: torch.device, accelerator: str) -> None:
    for asked in ({}, {"accelerator": accelerator}):
        with unnoticed(torch.device("cpu")):
            trainer = Trainer(**asked, devices=1, logger=False)
        assert device_of_trainer(asked) == trainer.strategy.root_device
    if device.type != "cpu":
        assert device_of_trainer({"accelerator": accelerator, "devices": [1]}) == torch.device(device.type, 1)


def test_a_device_that_is_not_there() -> None:
    with pytest.raises(ValueError, match=r"{'accelerator': 'tpu', 'devices': 8}, which this machine has not: "):
        device_of_trainer({"accelerator": "tpu", "devices": 8, "max_epochs": 1})


def test_devices_that_lightning_does_not_know(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    xpu = torch.device("xpu", 1)
    with pytest.raises(ValueError, match="Lightning has no accelerator for 'xpu'. Pass the one that you train with"):
        private_trainer(xpu, None, [], {"accelerator": "cpu"})
    assert list(tmp_path.iterdir()) == []
    theirs = Elsewhere()
    with unnoticed(torch.device("cpu")):
        trainer = private_trainer(xpu, None, [], {"accelerator": theirs})
    assert trainer.accelerator is theirs
    assert trainer.strategy.root_device == xpu
