"""Train with FSDP1 and write each rank's results; `fsdp_runs.launch` starts one process per rank."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import FSDPStrategy
from multi_rank.fsdp_models import CASES, MODULES, Case, NamedToy, OnTheCPU, Overflow, TwoParts
from support import batches, flags_on_a_device, quiet_trainer
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from lightning_amp import DynamicLossScaler, FSDPAmpPrecision, ScaleMonitor

ACCELERATOR, WORLD_SIZE = sys.argv[2], int(sys.argv[3])


class WithoutAutocast(FSDPAmpPrecision):
    def autocast_context_manager(self) -> torch.autocast:
        return torch.autocast(self.device, enabled=False)


def trainer_for(plugin: Any, options: dict[str, Any] | None = None, **kwargs: Any) -> L.Trainer:
    return quiet_trainer(
        accelerator=ACCELERATOR,
        devices=WORLD_SIZE,
        strategy=(OnTheCPU if ACCELERATOR == "cpu" else FSDPStrategy)(**(options or {})),
        use_distributed_sampler=False,
        plugins=[plugin],
        **kwargs,
    )


def whole(trainer: L.Trainer) -> dict[str, torch.Tensor]:
    """Return unsharded parameters and buffers by their names on one device."""
    module = trainer.lightning_module
    with FSDP.summon_full_params(trainer.strategy.model):
        named = [*module.named_parameters(), *module.named_buffers()]
        return {name.replace("_fsdp_wrapped_module.", ""): value.detach().cpu().clone() for name, value in named}


def case(case: Case) -> dict[str, Any]:
    plugins: dict[str, Callable[[], Any]] = {
        "fp16": lambda: WithoutAutocast("fp16", scaler=DynamicLossScaler(1024.0), reduce_dtype=case.reduce_dtype),
        "bf16": lambda: WithoutAutocast("bf16", reduce_dtype=case.reduce_dtype),
        "fp32": lambda: FSDPAmpPrecision("fp32", reduce_dtype=case.reduce_dtype),
    }
    torch.manual_seed(0)
    plugin, module = plugins[case.precision](), case.module()
    trainer = trainer_for(plugin, case.strategy, callbacks=[Overflow(case.overflows, rank=1)], **case.trainer)
    with flags_on_a_device() if case.optimizer == "fused adamw" else contextlib.nullcontext():
        trainer.fit(module, case.data())
    scale = 0.0 if plugin.scaler is None else plugin.scaler.get_scale()
    return {"weights": whole(trainer), "steps": (plugin.num_steps, plugin.num_skipped), "scale": scale}


def autocast(precision: str) -> dict[str, Any]:
    """Train in real half precision, with a module in fp32, a schedule, BatchNorm and validation; record all dtypes."""
    torch.manual_seed(0)
    scaler = DynamicLossScaler(256.0) if precision == "fp16" else None
    plugin = FSDPAmpPrecision(precision, scaler=scaler, fp32_modules=["net.3"], eval_precision="fp32")
    module, monitor = NamedToy(nan_at=(2,), rank=1), ScaleMonitor()
    units = {"auto_wrap_policy": {nn.Linear}}
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Both mixed precision and an auto_wrap_policy")
        trainer = trainer_for(plugin, units, callbacks=[Overflow((4,), rank=0), monitor], gradient_clip_val=0.5)
        trainer.fit(module, batches(6, 8), batches(2, 8, seed=1))
    return {
        "weights": whole(trainer),
        "dtypes": module.dtypes,
        "reasons": [record.reason for record in monitor.history],
        "lr": trainer.optimizers[0].param_groups[0]["lr"],
        "val_loss": float(trainer.callback_metrics["val_loss"]),
    }


def empty_shards() -> dict[str, Any]:
    """Two optimizers; rank 1 holds no parameter of the second one, and only rank 1's loss is not finite."""
    torch.manual_seed(0)
    scaler = DynamicLossScaler(256.0, growth_interval=2)
    plugin = WithoutAutocast("fp16", scaler=scaler, fp32_modules=["net.0", "head"])  # by the names before sharding
    module, monitor = TwoParts(inf_at=(1, 3), rank=1), ScaleMonitor()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Called FSDP.clip_grad_norm_")
        trainer = trainer_for(plugin, callbacks=[monitor])
        trainer.fit(module, batches(8, 8))
    records = [(r.optimizer_idx, r.scale, r.next_scale, r.reason) for r in monitor.history]
    numels = [sum(p.numel() for p in o.param_groups[0]["params"]) for o in trainer.optimizers]
    return {"weights": whole(trainer), "records": records, "numels": numels}


def scalers() -> dict[str, Any]:
    """The user's own scaler scales, with the user's settings."""
    result: dict[str, Any] = {}
    for name, scaler in {
        "dynamic": DynamicLossScaler(256.0, growth_interval=2, growth_factor=4.0),
        "torch": torch.amp.GradScaler(ACCELERATOR, init_scale=256.0, growth_interval=2, growth_factor=4.0),
        "sharded": ShardedGradScaler(ACCELERATOR, init_scale=256.0, growth_interval=2, growth_factor=4.0),
        "static": 64.0,
    }.items():
        torch.manual_seed(0)
        plugin, monitor = WithoutAutocast("fp16", scaler=scaler), ScaleMonitor()
        trainer = trainer_for(plugin, callbacks=[Overflow((1,), rank=1), monitor])
        trainer.fit(MODULES["automatic"]("adamw"), batches(6, 8))
        result[name] = [r.next_scale for r in monitor.history]
    return result


def checkpoints(folder: Path) -> dict[str, Any]:
    """Train six batches at once, three and three, and three after three on one device."""

    def go(ckpt_path: Path | None, overflows: tuple[int, ...], kind: Any, epochs: int) -> tuple[Any, L.Trainer]:
        torch.manual_seed(0)
        plugin = WithoutAutocast("fp16", scaler=DynamicLossScaler(256.0, growth_interval=3))
        options = {"state_dict_type": kind, "auto_wrap_policy": {nn.Linear}}
        trainer = trainer_for(plugin, options, callbacks=[Overflow(overflows, rank=1)], max_epochs=epochs)
        trainer.fit(MODULES["automatic"]("fused adamw"), batches(3, 8), ckpt_path=ckpt_path)
        return plugin, trainer

    result: dict[str, Any] = {}
    plugin, trainer = go(None, (1, 5), "full", 2)
    result["whole"] = whole(trainer), plugin.state_dict()
    for kind in ("full", "sharded"):
        plugin, trainer = go(None, (1,), kind, 1)
        trainer.save_checkpoint(folder / f"{kind}.ckpt")
        trainer.strategy.barrier()
        plugin, trainer = go(folder / f"{kind}.ckpt", (2,), kind, 2)
        result[kind] = whole(trainer), plugin.state_dict()
    plugin, trainer = go(folder / "one_device.ckpt", (2,), "full", 2)
    result["one device"] = whole(trainer), plugin.state_dict()
    return result


def half_parameters() -> dict[str, Any]:
    """The strategy gathers parameters in bfloat16."""
    policy = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_root_forward_inputs=False)
    torch.manual_seed(0)
    module = MODULES["automatic"]("fused adamw")
    trainer = trainer_for(FSDPAmpPrecision("bf16"), {"mixed_precision": policy})
    trainer.fit(module, batches(6, 8))
    result: dict[str, Any] = {"weights": whole(trainer), "seen": module.seen}
    for name, plugin in {
        "fp32_modules": FSDPAmpPrecision("bf16", fp32_modules=["net.2"]),
        "eval_precision": FSDPAmpPrecision("bf16", eval_precision="fp32"),
        "precision": FSDPAmpPrecision("fp32"),
    }.items():
        try:
            trainer_for(plugin, {"mixed_precision": policy}).fit(MODULES["automatic"]("adamw"), batches(1, 8))
        except ValueError as error:
            result[name] = str(error)
    return result


def half_loaded() -> list[str]:
    """A module in bfloat16 is refused, whether the strategy or the user wraps it; with the line from the message it
    trains.
    """
    messages: list[str] = []
    for kind in ("automatic", "manual"):
        try:
            trainer_for(FSDPAmpPrecision("bf16")).fit(MODULES[kind]("adamw").to(torch.bfloat16), batches(1, 8))
        except ValueError as error:
            messages.append(str(error))

    class Written(MODULES["automatic"]):
        def __init__(self) -> None:
            super().__init__("adamw")
            self.net.to(torch.bfloat16)
            self.net.float()

    class WrittenByHand(MODULES["manual"]):
        def configure_model(self) -> None:
            self.net.float()
            super().configure_model()

    for module in (Written(), WrittenByHand("adamw").to(torch.bfloat16)):
        trainer = trainer_for(FSDPAmpPrecision("bf16"))
        trainer.fit(module, batches(2, 8))
        assert {value.dtype for value in whole(trainer).values()} == {torch.float32}
    return messages


def main() -> None:
    out = Path(sys.argv[1])
    report: dict[str, Any] = {name: case(c) for name, c in CASES.items()}
    report |= {precision: autocast(precision) for precision in ("fp16", "bf16", "fp32")}
    report["empty shards"] = empty_shards()
    report["scalers"] = scalers()
    report["checkpoints"] = checkpoints(out)
    report["half parameters"] = half_parameters()
    report["half loaded"] = half_loaded()
    torch.save(report, out / f"rank{torch.distributed.get_rank()}.pt")


if __name__ == "__main__":
    main()
    torch.distributed.destroy_process_group()
