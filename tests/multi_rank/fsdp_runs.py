"""Launch FSDP1 on several ranks, on CPU or CUDA, and compare their results with one device."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from multi_rank.fsdp_models import CASES, MODULES, Overflow, TwoParts
from support import assert_same, batches, quiet_trainer, scaled_fp32
from support.launch import launch_once

from lightning_amp import AmpPrecision, ScaleMonitor


class Runs:
    """The results of all ranks, from one launch."""

    def __init__(self, folder: Path, accelerator: str, world_size: int) -> None:
        self.folder, self.accelerator, self.world_size = folder, accelerator, world_size
        # sums have another order, and a GPU has other kernels for other shapes
        self.rounding = {"rtol": 0.0, "atol": 2e-6 if accelerator == "cpu" else 1e-4}
        plugin = scaled_fp32(init_scale=256.0, growth_interval=3)
        trainer = self.one_device(MODULES["automatic"], plugin, 3, Overflow((1,)), arguments=("fused adamw",))
        mine = folder / f"one_device-{os.getpid()}.ckpt"  # another test worker may write one at the same time
        trainer.save_checkpoint(mine)
        os.replace(mine, folder / "one_device.ckpt")
        script = Path(__file__).parent / "fsdp_script.py"
        self.ranks = launch_once(script, world_size, folder, accelerator, str(world_size))

    def one_device(
        self, make: Any, plugin: Any, count: int, *callbacks: L.Callback, arguments: Any = (), **kwargs: Any
    ) -> L.Trainer:
        ckpt_path = kwargs.pop("ckpt_path", None)
        torch.manual_seed(0)
        module = make(*arguments)
        trainer = quiet_trainer(accelerator=self.accelerator, plugins=[plugin], callbacks=list(callbacks), **kwargs)
        trainer.fit(module, batches(count, 8), ckpt_path=ckpt_path)
        return trainer

    # -- the checks ------------------------------------------------------------------------------------------------

    def equals_one_device_in_fp32(self, name: str) -> None:
        """One element of one rank's shard overflows: every rank skips the step, and nothing else differs."""
        case, plugin = CASES[name], AmpPrecision("fp32")
        trainer = self.one_device(case.module, plugin, 6, Overflow(case.overflows), **case.trainer)
        expected = parameters(trainer)
        rounded = case.reduce_dtype == torch.bfloat16
        tolerance = {"rtol": 0.0, "atol": 1e-3} if rounded else self.rounding
        for rank in self.ranks:
            assert_same(rank[name]["weights"], expected, **tolerance)
            assert rank[name]["steps"] == (plugin.num_steps, plugin.num_skipped)
            assert rank[name]["scale"] == (512.0 if case.precision == "fp16" else 0.0)
        if rounded and self.accelerator == "cpu":
            with pytest.raises(AssertionError, match="not close"):
                assert_same(self.ranks[0][name]["weights"], expected, **self.rounding)

    def computes_in(self, precision: str) -> None:
        half = {"fp16": "float16", "bf16": "bfloat16"}[precision]
        for rank in self.ranks:
            seen, fp32 = rank[precision], rank["fp32"]
            # batch, a layer, a layer of `fp32_modules`, all parameters, all buffers; evaluation in fp32
            assert seen["dtypes"]["train"] == ("float32", half, "float32", "float32", "float32")
            assert seen["dtypes"]["validate"] == ("float32",) * 5
            assert [reason for reason in seen["reasons"] if reason != "none"] == ["loss", "gradient"]
            assert seen["lr"] == pytest.approx(0.01 * 0.9**4)
            assert all(bool(value.isfinite().all()) for value in seen["weights"].values())
            assert seen["weights"]["net.1.num_batches_tracked"] == 4
            assert_same(seen["weights"], fp32["weights"], rtol=0.0, atol=0.01)
            assert seen["val_loss"] == pytest.approx(fp32["val_loss"], rel=0.01)

    def agree_without_shards(self) -> None:
        if self.world_size == 2:
            assert [rank["empty shards"]["numels"] for rank in self.ranks] == [[81, 1], [80, 0]]
        plugin, monitor = scaled_fp32(init_scale=256.0, growth_interval=2), ScaleMonitor()
        trainer = self.one_device(lambda: TwoParts(inf_at=(1, 3)), plugin, 8, monitor)
        expected = [(r.optimizer_idx, r.scale, r.next_scale, r.reason) for r in monitor.history]
        assert [reason for *_, reason in expected if reason != "none"] == ["loss"] * 4
        for rank in self.ranks:
            assert_same(rank["empty shards"]["weights"], parameters(trainer), **self.rounding)
            assert rank["empty shards"]["records"] == expected

    def use_the_users_scaler(self) -> None:
        for rank in self.ranks:
            scales = rank["scalers"]
            assert scales["dynamic"] == scales["torch"] == scales["sharded"] == [256.0, 128.0, 512.0, 2048.0]
            assert set(scales["static"]) == {64.0}

    def resume(self) -> None:
        for rank in self.ranks:
            checkpoints = rank["checkpoints"]
            weights, state = checkpoints["whole"]
            for kind in ("full", "sharded"):
                assert_same(checkpoints[kind][0], weights)
                assert checkpoints[kind][1] == state
            assert_same(checkpoints["one device"][0], weights, **self.rounding)
            assert checkpoints["one device"][1] == state

    def resume_on_one_device(self) -> None:
        path = self.folder / "full.ckpt"
        assert {"FSDPPrecision", "MixedPrecision"} <= torch.load(path, weights_only=True).keys()
        weights, state = self.ranks[0]["checkpoints"]["whole"]
        plugin = scaled_fp32(init_scale=256.0, growth_interval=3)
        kwargs: dict[str, Any] = {"arguments": ("fused adamw",), "max_epochs": 2, "ckpt_path": path}
        trainer = self.one_device(MODULES["automatic"], plugin, 3, Overflow((2,)), **kwargs)
        assert_same(parameters(trainer), weights, **self.rounding)
        assert plugin.state_dict() == state

    def name_the_line_for_half_parameters(self) -> None:
        for rank in self.ranks:
            automatic, by_hand = rank["half loaded"]
            assert "Write `self.net.float()` at the start of `configure_model`, before" in automatic
            assert "Write `self.net.float()` at the start of `configure_model`, before" in by_hand

    def may_gather_half_parameters(self) -> None:
        seen = self.ranks[0]["half parameters"]
        assert seen["seen"] == ("torch.float32", "torch.bfloat16")  # the batch, a weight
        assert {value.dtype for value in seen["weights"].values()} == {torch.float32}
        for argument in ("fp32_modules", "eval_precision", "precision"):
            assert "gathers parameters in torch.bfloat16, so that nothing can compute in fp32" in seen[argument]


CHECKS = (
    "agree_without_shards", "use_the_users_scaler", "resume", "resume_on_one_device", "may_gather_half_parameters",
    "name_the_line_for_half_parameters",
)  # fmt: skip
"""Run the checks that hold for every launch."""


def parameters(trainer: L.Trainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().cpu() for name, p in trainer.lightning_module.named_parameters()}
