"""`doctor` checks its arguments, leaves the user's objects alone, and reports what cannot run."""

from __future__ import annotations

import random
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from support import Toy, batches

from lightning_amp import AmpPrecision, DynamicLossScaler, doctor

pytestmark = pytest.mark.usefixtures("quick")


class Data(L.LightningDataModule):
    def __init__(self, count: int = 8) -> None:
        super().__init__()
        self.count = count

    def train_dataloader(self) -> Any:
        return batches(self.count)


def examined(make_module: Any = Toy, make_data: Any = Data, **arguments: Any) -> Any:
    return doctor(
        make_module, make_data, **{"precision": "bf16", "trainer_kwargs": {"accelerator": "cpu"}, **arguments}
    )


def test_the_machine_alone() -> None:
    report = doctor(device="cpu")
    assert report.step is None
    assert [finding.code for finding in report.findings] == ["nothing-to-do"]


def test_module_and_random_state_are_as_before() -> None:
    module, data = Toy(), Data()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    torch_state, python_state = torch.get_rng_state(), random.getstate()
    report = examined(lambda: module, lambda: data)
    assert report.step.num_parameters == sum(p.numel() for p in module.parameters())
    torch.testing.assert_close(dict(module.state_dict()), before, rtol=0, atol=0)
    assert all(p.grad is None for p in module.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in module.modules())
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert random.getstate() == python_state
    assert set(vars(data)) == set(vars(Data()))


def test_every_step_is_trained_its_parts_add_up_and_nothing_is_printed(
    capsys: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    step = examined().step
    assert capsys.readouterr() == ("", "")
    assert len(recwarn) == 0
    assert step.num_timed >= 3
    assert {"data", "forward", "backward", "optimizer"} <= set(step.parts)
    assert all(seconds > 0 for seconds in step.parts.values())
    assert step.recorded.flops.keys() <= {"bfloat16", "float32"}
    assert step.batch_size == 4
    assert [v.label for v in step.variants][:2] == ["as it is", "fp32"]
    assert all(v.step_s and not v.error for v in step.variants)


@pytest.mark.parametrize(
    ("precision", "name"),
    [
        ("fp32", "fp32"),
        ({"precision": "fp16", "scaler": DynamicLossScaler(init_scale=2.0**10)}, "fp16"),
        (AmpPrecision("bf16"), "bf16"),
        (MixedPrecision("bf16-mixed", "cpu"), "bf16"),
    ],
)
def test_anything_that_is_an_arm(precision: Any, name: str) -> None:
    step = examined(precision=precision).step
    assert step.precision == name
    dtype = {"fp32": "float32", "fp16": "float16"}.get(name, "bfloat16")
    assert step.recorded.flops.keys() == {dtype}


def test_a_short_epoch_and_schedules_that_ask_for_its_length_and_wait_for_validation() -> None:
    class Scheduled(Toy):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", self.loss(batch))

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), 0.1)
            total = int(self.trainer.estimated_stepping_batches)
            cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=total)
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            return [optimizer], [cycle, {"scheduler": plateau, "monitor": "val_loss"}]

    class Both(Data):
        def val_dataloader(self) -> Any:
            return batches(2)

    assert examined(Scheduled, lambda: Both(2)).step.num_timed >= 3


def test_exceptions_of_the_users_code_are_raised() -> None:
    class Raises(Toy):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        examined(Raises)


def test_a_loader_without_batches() -> None:
    with pytest.raises(ValueError, match="The training loader gave no batch"):
        examined(Toy, lambda: Data(0))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"precision": "fp7"}, "`precision` must be one of"),
        ({"precision": "fp8"}, "cannot run precision 'fp8'"),
        ({"device": "gpu7"}, "`device` must be a device of this machine, such as 'cpu' or 'cuda:0', got 'gpu7'"),
        ({"trainer_kwargs": {"precision": "bf16"}}, "`trainer_kwargs` must not have 'precision'"),
        ({"make_module": Toy()}, "got an object of Toy. Pass the class itself"),
        ({"make_module": None}, "`make_data` must be passed together with `make_module`"),
    ],
)
def test_arguments_that_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        examined(**arguments)


def test_the_last_device_is_examined_and_the_current_one_stays(device: torch.device) -> None:
    where, before = device, 0
    if device.type != "cpu":
        where, before = torch.device(device.type, 1), torch.accelerator.current_device_index()
    seen: list[torch.device] = []

    class Sees(Toy):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.append(batch.device)
            return super().training_step(batch, batch_idx)

        def train_dataloader(self) -> Any:
            return batches(4)

    kwargs = {"accelerator": device.type, "devices": [1] if where != device else 1}
    for asked in ({"device": str(where)}, {"trainer_kwargs": kwargs}):
        report = doctor(Sees, precision="bf16", **asked)
        assert report.step is not None
        assert report.step.parts["forward"] > 0
        assert set(seen) == {where}
        assert device.type == "cpu" or torch.accelerator.current_device_index() == before
