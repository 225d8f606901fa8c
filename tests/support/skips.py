"""Make a report of a skipped step."""

from __future__ import annotations

from typing import Any

from lightning_amp.findings import StepRecord
from lightning_amp.reports import OverflowReport
from lightning_amp.tracing import Diagnosis, Operation

EXP = Operation(
    "exp", "/home/me/losses.py", 75, "log_z = torch.exp(sim).sum(-1)", "head", "Contrast", dtype="float16",
    shape=(4, 4), largest_input=12.2, largest_in_fp32=199_000.0, followed_by="sum",
)  # fmt: skip


def report(cause: Any, operation: Operation | None = None, in_fp32: Any = "finite", **changes: Any) -> OverflowReport:
    found = Diagnosis(
        cause, module="head", module_class="Contrast", where="output", dtype="float16", shape=(4, 4),
        in_fp32=in_fp32, operation=operation,
    )  # fmt: skip
    arguments: dict[str, Any] = {
        "record": StepRecord(0, 0, 2.0**16, 2.0**16, skipped=True, reason="loss", precision="fp16"),
        "rank": 0, "world_size": 1, "epoch": 0, "batch_idx": 3, "window": (3, 3), "num_replayed": 1,
        "cause": cause, "diagnosis": found, "parameters": (), "precision": "16-mixed",
    }  # fmt: skip
    return OverflowReport(**{**arguments, **changes})
