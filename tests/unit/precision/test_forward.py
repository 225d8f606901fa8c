"""Row 26: batches of float64; and which precision a step runs in."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import FEATURES, Toy, batches, fit, quiet_trainer
from support.promises import Plugins, promise
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_amp import AmpPrecision


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@promise(26, stock="same dtype|dtype", raises=RuntimeError)
def test_float64_batches(plugins: Plugins, precision: str) -> None:
    data = DataLoader(torch.randn(8, FEATURES, dtype=torch.float64), batch_size=4)
    trainer = fit(Toy, getattr(plugins, precision)(), data)
    assert trainer.global_step == 2


@pytest.mark.parametrize("validating", [False, True])
def test_fp32_names_what_is_float64_in_a_batch(validating: bool) -> None:
    """Torch says "mat1 and mat2 must have the same dtype", and leaves the user to find out of what."""

    class Named(Toy):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x = batch["inputs"][0]
            return self.loss(x.float() if validating else x)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.loss(batch["inputs"][0])

    rows = [{"inputs": (torch.randn(FEATURES, dtype=torch.float64),), "index": torch.tensor(i)} for i in range(4)]
    loader = DataLoader(rows, batch_size=2)
    trainer = quiet_trainer(plugins=[AmpPrecision("fp32")], num_sanity_val_steps=0)
    with pytest.raises(RuntimeError, match=r"`batch\['inputs'\]\[0\]` is float64.*Make the dataset return float32"):
        trainer.fit(Named(), loader, loader)


def test_an_error_of_another_kind_stays_as_it_is() -> None:
    class Fails(Toy):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise RuntimeError("double trouble" if batch.dtype == torch.float32 else "something else")

    for dtype in (torch.float32, torch.float64):
        loader = DataLoader(torch.randn(4, FEATURES, dtype=dtype), batch_size=2)
        with pytest.raises(RuntimeError, match="^(double trouble|something else)$"):
            fit(Fails, AmpPrecision("fp32"), loader)


def test_float64_modules_keep_their_batches() -> None:
    seen: list[torch.dtype] = []

    class Double(Toy):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            seen.append(batch.dtype)
            return (self.net(batch).float() ** 2).mean()

    module = Double()
    module.net.double()
    fit(module, Plugins(True).bf16(), DataLoader(torch.randn(8, FEATURES, dtype=torch.float64), batch_size=4))
    assert seen == [torch.float64] * 2


def test_batches_are_not_copied_for_nothing() -> None:
    batch = next(iter(batches(1)))
    plugin = AmpPrecision("bf16")
    fit(Toy, plugin)
    seen: list[Any] = []

    class Looks(Toy):
        def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
            seen.append(self.trainer.precision_plugin.convert_input({"x": batch})["x"] is batch)
            return super().transfer_batch_to_device(batch, device, dataloader_idx)

    fit(Looks, plugin)
    assert seen == [True] * 8
    assert plugin.convert_input(batch) is batch


class TrainsInValidation(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.dtype] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.seen.append(self.net(batch).dtype)
        return self.loss(batch)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.trainer.strategy.training_step(batch, batch_idx)

    def val_dataloader(self) -> Any:
        return batches(1)


def test_a_training_step_in_validation_leaves_training_as_it_is() -> None:
    """The sanity check comes first."""
    module = TrainsInValidation()
    fit(module, AmpPrecision("bf16", eval_precision="fp32"), batches(2))
    assert module.seen == [torch.float32, torch.bfloat16, torch.bfloat16, torch.float32]
