"""What is put back after something ran unnoticed; settings of torch are in `test_private_fit.py`."""

from __future__ import annotations

import torch

from lightning_amp.shadow import unnoticed


def test_the_device_is_the_current_one_until_it_ends(device: torch.device) -> None:
    if device.type == "cpu":
        return
    before = torch.accelerator.current_device_index()
    with unnoticed(torch.device(device.type, 1)):
        assert torch.accelerator.current_device_index() == 1
        torch.accelerator.set_device_index(1 - before)
    assert torch.accelerator.current_device_index() == before
