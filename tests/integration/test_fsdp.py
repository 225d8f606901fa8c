"""Row 29: FSDP1 in two real gloo processes is one device, but for rounding; then the parts that need no processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from fsdp_models import CASES, MODULES, NamedToy, Overflow, TwoParts
from helpers import assert_same, batches, quiet_trainer, scaled_fp32
from lightning.pytorch.plugins import FSDPPrecision, MixedPrecision

from lightning_amp import AmpPrecision, DynamicLossScaler, FSDPAmpPrecision, ScaleMonitor

HERE = Path(__file__).parent
WHAT_ROUNDS = {"rtol": 0.0, "atol": 1e-6}  # sums in another order


def one_device(module: L.LightningModule, plugin: Any, data: Any, *callbacks: L.Callback, **kwargs: Any) -> L.Trainer:
    trainer = quiet_trainer(accelerator="cpu", plugins=[plugin], callbacks=list(callbacks), **kwargs)
    trainer.fit(module, data)
    return trainer


def parameters(module: L.LightningModule) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in module.named_parameters()}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What both ranks saw, from one launch for all tests."""
    out = tmp_path_factory.mktemp("fsdp")
    torch.manual_seed(0)
    plugin = scaled_fp32(init_scale=256.0, growth_interval=3)
    trainer = one_device(MODULES["automatic"]("fused adamw"), plugin, batches(3, 8), Overflow((1,)))
    trainer.save_checkpoint(out / "one_device.ckpt")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent), str(HERE.parents[1])])}
    command = [sys.executable, str(HERE / "fsdp_script.py"), str(out)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [{**torch.load(out / f"rank{rank}.pt", weights_only=False), "folder": out} for rank in (0, 1)]


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_are_one_device_in_fp32(name: str, ranks: list[dict[str, Any]]) -> None:
    """One element of one rank's shard overflows: the step is skipped everywhere, and nothing else differs."""
    case = CASES[name]
    torch.manual_seed(0)
    module, plugin = case.module(), AmpPrecision("fp32")
    one_device(module, plugin, case.data(), Overflow(case.overflows), **case.trainer)
    expected = parameters(module)
    tolerance = {"rtol": 0.0, "atol": 1e-3} if case.reduce_dtype == torch.bfloat16 else WHAT_ROUNDS
    for rank in ranks:
        assert_same(rank[name]["weights"], expected, **tolerance)
        assert rank[name]["steps"] == (plugin.num_steps, plugin.num_skipped)
        assert rank[name]["scale"] == (512.0 if case.precision == "fp16" else 0.0)
    if case.reduce_dtype == torch.bfloat16:
        with pytest.raises(AssertionError, match="not close"):
            assert_same(ranks[0][name]["weights"], expected, **WHAT_ROUNDS)


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_what_computes_in_what(precision: str, ranks: list[dict[str, Any]]) -> None:
    half = {"fp16": "float16", "bf16": "bfloat16"}[precision]
    for rank in ranks:
        seen = rank[precision]
        # batch, a layer, a layer of `fp32_modules`, all parameters, all buffers; evaluation in fp32
        assert seen["dtypes"]["train"] == ("float32", half, "float32", "float32", "float32")
        assert seen["dtypes"]["validate"] == ("float32",) * 5
        assert [reason for reason in seen["reasons"] if reason != "none"] == ["loss", "gradient"]
        assert seen["lr"] == pytest.approx(0.01 * 0.9**4)
        assert all(bool(value.isfinite().all()) for value in seen["weights"].values())
        assert seen["weights"]["net.1.num_batches_tracked"] == 4
    torch.manual_seed(0)
    module = NamedToy(nan_at=(2,))
    trainer = quiet_trainer(
        accelerator="cpu", plugins=[AmpPrecision("fp32")], callbacks=[Overflow((4,))], gradient_clip_val=0.5
    )
    trainer.fit(module, batches(6, 8), batches(2, 8, seed=1))
    close = {"rtol": 0.0, "atol": 0.05}  # half precision, and BatchNorm sees the half of each batch
    for name, value in parameters(module).items():
        torch.testing.assert_close(ranks[0][precision]["weights"][name], value, **close)


def test_a_rank_without_a_shard_agrees(ranks: list[dict[str, Any]]) -> None:
    assert [rank["empty shards"]["numels"] for rank in ranks] == [[81, 1], [80, 0]]
    torch.manual_seed(0)
    module, monitor = TwoParts(inf_at=(3,)), ScaleMonitor()
    one_device(module, scaled_fp32(init_scale=256.0, growth_interval=2), batches(6, 8), monitor)
    expected = [(r.optimizer_idx, r.scale, r.next_scale, r.reason) for r in monitor.history]
    assert [reason for *_, reason in expected if reason != "none"] == ["loss", "loss"]
    for rank in ranks:
        assert_same(rank["empty shards"]["weights"], parameters(module), **WHAT_ROUNDS)
        assert rank["empty shards"]["records"] == expected


def test_the_users_scaler_is_used(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        scales = rank["scalers"]
        assert scales["dynamic"] == scales["torch"] == scales["sharded"] == [256.0, 128.0, 512.0, 2048.0]
        assert set(scales["static"]) == {64.0}


def test_checkpoints(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        checkpoints = rank["checkpoints"]
        weights, state = checkpoints["whole"]
        for kind in ("full", "sharded"):
            assert_same(checkpoints[kind][0], weights)
            assert checkpoints[kind][1] == state
        assert_same(checkpoints["one device"][0], weights, **WHAT_ROUNDS)
        assert checkpoints["one device"][1] == state
    # and back to one device: a full checkpoint is an ordinary one
    path = ranks[0]["folder"] / "full.ckpt"
    assert {"FSDPPrecision", "MixedPrecision"} <= torch.load(path, weights_only=True).keys()
    plugin = scaled_fp32(init_scale=256.0, growth_interval=3)
    trainer = quiet_trainer(accelerator="cpu", plugins=[plugin], callbacks=[Overflow((2,))], max_epochs=2)
    trainer.fit(MODULES["automatic"]("fused adamw"), batches(3, 8), ckpt_path=path)
    assert_same(parameters(trainer.lightning_module), ranks[0]["checkpoints"]["whole"][0], **WHAT_ROUNDS)
    assert plugin.state_dict() == ranks[0]["checkpoints"]["whole"][1]


def test_the_strategy_may_gather_half_parameters(ranks: list[dict[str, Any]]) -> None:
    seen = ranks[0]["half parameters"]
    assert seen["seen"][1] == "torch.bfloat16"
    assert {value.dtype for value in seen["weights"].values()} == {torch.float32}
    for argument in ("fp32_modules", "eval_precision", "precision"):
        assert f"which `{argument}` asks for" in seen[argument]


# -- without processes -------------------------------------------------------------------------------------------------


def test_nothing_of_lightnings_own_plugin_is_left() -> None:
    own = {name: value for name, value in vars(FSDPPrecision).items() if callable(value) or isinstance(value, property)}
    assert {"forward_context", "convert_input", "mixed_precision_config"} <= own.keys()
    inherited = [name for name, value in own.items() if getattr(FSDPAmpPrecision, name) is value]
    assert inherited == []
    plugin = FSDPAmpPrecision("fp16")
    assert isinstance(plugin, MixedPrecision)
    for context in (plugin.tensor_init_context(), plugin.module_init_context()):
        with context:
            assert torch.get_default_dtype() == torch.float32
    half = torch.ones(2, dtype=torch.float16)
    assert plugin.convert_output(half) is half


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32", "auto"])
def test_only_the_reduction_has_a_dtype(precision: str, dtype: torch.dtype) -> None:
    config = FSDPAmpPrecision(precision, reduce_dtype=dtype).mixed_precision_config
    assert (config.param_dtype, config.reduce_dtype, config.buffer_dtype) == (None, dtype, None)
    assert FSDPAmpPrecision(precision).mixed_precision_config.reduce_dtype == torch.float32
    stock = FSDPPrecision("bf16-mixed").mixed_precision_config
    assert {stock.param_dtype, stock.reduce_dtype, stock.buffer_dtype} == {torch.bfloat16}


@pytest.mark.parametrize("value", [torch.float64, "bf16", None, 16])
def test_another_reduction(value: Any) -> None:
    with pytest.raises(ValueError, match=r"`reduce_dtype` must be one of `torch.float32`, `torch.float16`, `torch.bfl"):
        FSDPAmpPrecision("fp16", reduce_dtype=value)


def test_a_scaler_of_ones_own() -> None:
    scaler = DynamicLossScaler(128.0)
    assert FSDPAmpPrecision("fp16", scaler=scaler).scaler is scaler
    with pytest.raises(ValueError, match="does not use a scaler"):
        FSDPPrecision("16-mixed", scaler=torch.amp.GradScaler("cpu"))


def test_lightnings_own_reads_ours_and_ours_reads_it() -> None:
    plugin = FSDPAmpPrecision("fp16", scaler=DynamicLossScaler(128.0))
    checkpoint: dict[str, Any] = {"FSDPAmpPrecision": plugin.state_dict()}
    plugin.on_save_checkpoint(checkpoint)
    theirs = torch.amp.GradScaler("cpu")
    theirs.load_state_dict(checkpoint["FSDPPrecision"])
    assert theirs.get_scale() == 128.0
    for key in ("FSDPPrecision", "MixedPrecision", "AmpPrecision", "native_amp_scaling_state"):
        again = FSDPAmpPrecision("fp16")
        again.on_load_checkpoint({key: checkpoint["FSDPPrecision"]})
        assert again.scaler.get_scale() == 128.0
    other = AmpPrecision("fp16")
    other.on_load_checkpoint({"FSDPAmpPrecision": checkpoint["FSDPAmpPrecision"]})
    assert other.scaler.get_scale() == 128.0
