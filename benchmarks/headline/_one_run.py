"""Do one run in this process: `python -m benchmarks.headline._one_run RUN_AS_JSON --out FILE`, for `__main__`."""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import statistics
import sys
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from typing_extensions import final, override

from benchmarks.headline._arms import ARMS, peak_flops
from benchmarks.headline._measure import TINY, Lengths, Measure
from benchmarks.headline._plan import Run
from benchmarks.headline._records import Outcome
from benchmarks.headline.models import MODELS, Workload
from lightning_amp.advice._machine import device_name
from lightning_amp.measure import MatmulFlops
from lightning_amp.shadow import in_one_line, is_out_of_memory

_MOST_STEPS = 200
"""More steps than any run takes; `Measure` ends it."""


@final
class Trained(L.LightningModule):
    """Trains a workload.

    Args:
        workload: The workload.
        optimizer: The name of the optimizer.

    """

    def __init__(self, workload: Workload, optimizer: str) -> None:
        super().__init__()
        self.net = workload.net
        self._loss, self._optimizer = workload.loss, optimizer

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self._loss(self.net, batch)

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self._optimizer == "SGD":
            return torch.optim.SGD(self.parameters(), lr=1e-3, momentum=0.9, fused=True)
        return torch.optim.AdamW(self.parameters(), lr=1e-5, fused=True)


def measure(run: Run, device_type: str, *, tiny: bool) -> Outcome:
    """Train, and return the measurements; running out of memory, or an operation that torch lacks, is a result."""
    try:
        return _measured(run, device_type, tiny)
    except Exception as error:
        if is_out_of_memory(error):
            return Outcome("does not fit", in_one_line(error))
        if isinstance(error, NotImplementedError) or "not implemented for 'Half'" in str(error):
            return Outcome("cannot", in_one_line(error))
        raise


def _measured(run: Run, device_type: str, tiny: bool) -> Outcome:
    arm, model = ARMS[run.arm], MODELS[run.model]
    device = torch.device("cpu") if device_type == "cpu" else torch.device("cuda", 0)
    arm.set_fp32()
    torch.manual_seed(0)
    with device:
        workload = model.make(run.size, tiny)
    flops = 3 * forward_flops(workload)
    if run.compiled:
        for block in workload.blocks:
            block.compile(backend="aot_eager" if tiny else "inductor")
    watch = Measure(device, run.batch, TINY if tiny else Lengths())
    trainer = L.Trainer(
        accelerator=device.type,
        devices=1,
        max_steps=_MOST_STEPS,
        benchmark=True,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[watch],
        **arm.trainer_kwargs(device.type, tiny=tiny),
    )
    loader: Any = DataLoader([workload.batch] * _MOST_STEPS, batch_size=None)  # type: ignore[arg-type]
    trainer.fit(Trained(workload, model.optimizer), loader)
    return _outcome(run, watch, workload, flops, None if tiny else peak_flops(device_name(device), arm))


def _outcome(run: Run, watch: Measure, workload: Workload, flops: int, peak: float | None) -> Outcome:
    if watch.num_skipped:
        return Outcome("not measured", f"{watch.num_skipped} of {watch.num_timed} timed steps were skipped")
    if not math.isfinite(watch.loss):
        return Outcome("not measured", "the loss is not finite")
    speeds = sorted(run.batch / seconds for seconds in watch.step_s)
    quarter = len(speeds) // 4
    median = statistics.median(speeds)
    return Outcome(
        "measured",
        samples_per_s=(median, speeds[quarter], speeds[-1 - quarter]),
        num_steps=len(speeds),
        memory=watch.memory,
        memory_of=watch.memory_of,
        flops=flops,
        mfu=None if peak is None else flops * median / run.batch / peak,
        waits=watch.waits,
        loss=watch.loss,
        num_parameters=sum(parameter.numel() for parameter in workload.net.parameters()),
        source=f"{workload.source}, torchao {version('torchao')}" if run.arm == "fp8" else workload.source,
    )


def forward_flops(workload: Workload) -> int:
    """Return the FLOPs of the products of one forward, with the half that a causal mask leaves out.

    A backward has twice as many. It is not counted itself: torch takes the backward of a convolution with groups for
    one without.
    """
    with MatmulFlops() as flops, torch.no_grad():
        workload.loss(workload.net, workload.batch)
    return sum(flops.by_dtype.values())


def main(arguments: list[str] | None = None) -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run")
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(arguments)
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    outcome = measure(Run(**json.loads(args.run)), args.device, tiny=args.tiny)
    args.out.write_text(json.dumps(outcome.as_dict()), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
