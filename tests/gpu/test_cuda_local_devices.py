"""`LocalDevices` on GPUs: each run sees its own device, and the record names it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from zoo.compared import TRAINER, Sea, Waves

from lightning_amp import LocalDevices, compare_precisions

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
KWARGS = {**TRAINER, "accelerator": "cuda", "devices": 1}


@pytest.mark.slow
def test_a_run_on_each_device_at_once(tmp_path: Path) -> None:
    devices = LocalDevices()
    assert devices.num_at_once == torch.cuda.device_count()
    report = compare_precisions(Waves, Sea, ["fp32", "bf16"], trainer_kwargs=KWARGS, executor=devices)
    alone = compare_precisions(Waves, Sea, ["fp32", "bf16"], trainer_kwargs=KWARGS)
    for label, arm in report.arms.items():
        (run,), (same,) = arm.runs, alone.arms[label].runs
        assert run.error is None
        assert run.curves.keys() == same.curves.keys()
        for name, points in run.curves.items():
            assert [p.value for p in points] == [p.value for p in same.curves[name]]
        assert len(run.devices) == 1
        assert run.devices[0].startswith("cuda:")
    if devices.num_at_once == 1:  # one after the other: nobody shared the device
        assert not report.arms["bf16"].not_compared


def test_other_devices_than_a_run_gets_are_refused() -> None:
    with pytest.raises(ValueError, match=r"`LocalDevices` gives each run 1"):
        compare_precisions(Waves, Sea, ["fp32"], trainer_kwargs={"devices": [0]}, executor=LocalDevices())
