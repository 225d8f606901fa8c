"""Run by `test_ddp.py` in two gloo processes: trouble on one rank only; writes down what each rank saw."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
from helpers import Toy, batches, quiet_trainer
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR

from lightning_amp import AmpPrecision, DynamicLossScaler


class Trouble(Toy):
    """Rank 1 has a NaN loss at batch 1, an inf loss with finite gradients at 2; rank 0 overflows at batch 4."""

    def __init__(self, fused: bool, manual: bool) -> None:
        net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 1))
        super().__init__(
            lambda params: torch.optim.AdamW(params, lr=0.01, fused=fused), net, lambda o: ExponentialLR(o, 0.9)
        )
        self.automatic_optimization = not manual

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = self.loss(batch)
        if self.global_rank == 1 and batch_idx == 1:
            loss = loss * float("nan")
        if self.global_rank == 1 and batch_idx == 2:
            loss = loss + float("inf")
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.lr_schedulers().step()
        return None

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        factor = torch.ones((), requires_grad=False)
        if self.global_rank == 0 and self.trainer.fit_loop.epoch_loop.batch_idx == 4:
            factor = factor * float("inf")
        super().backward(loss * factor, *args, **kwargs)


class Write(L.Callback):
    def __init__(self) -> None:
        self.records: list[Any] = []

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        trainer.precision_plugin.records.listeners.append(self.records.extend)


def main() -> None:
    precision, fused, manual, out = sys.argv[1], sys.argv[2] == "fused", sys.argv[3] == "manual", Path(sys.argv[4])
    torch.manual_seed(0)
    plugin = AmpPrecision(precision, scaler=DynamicLossScaler(1024.0) if precision == "fp16" else None)
    write = Write()
    trainer = quiet_trainer(strategy="ddp", devices=2, plugins=[plugin], callbacks=[write])
    module = Trouble(fused, manual)
    trainer.fit(module, batches(16))
    report = {
        "reasons": [r.reason for r in write.records],
        "scales": [r.next_scale for r in write.records],
        "lr": trainer.optimizers[0].param_groups[0]["lr"],
        "weights": float(sum(p.double().sum() for p in module.parameters())),
        "finite": all(bool(b.isfinite().all()) for b in module.state_dict().values()),
        "steps": plugin.num_steps,
    }
    (out / f"rank{trainer.global_rank}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
    # gloo's threads must be gone before the interpreter is: otherwise it aborts now and then ("terminate called")
    torch.distributed.destroy_process_group()
