"""Which operations autocast keeps in fp32."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.claims._claim import Claim, Outcome, Setting, decided, overall
from benchmarks.claims._sources import AMP_DOCS

_OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda x: x.softmax(1),
    "log_softmax": lambda x: x.log_softmax(1),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[1:]),
    "exp": torch.exp,
    "pow": lambda x: x**2,
    "sum": lambda x: x.sum(),
    "nll_loss": lambda x: F.nll_loss(x, torch.zeros(len(x), dtype=torch.long, device=x.device)),
    "mse_loss": lambda x: F.mse_loss(x, x),
}


def run(setting: Setting) -> Outcome:
    """Run each operation on bf16 values on the CPU, and look it up in the list for GPUs that torch installs."""
    x = torch.rand(4, 4).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        on_cpu = [name for name, operation in _OPERATIONS.items() if operation(x).dtype == torch.float32]
    on_gpu = _measured_on_gpu(x) if setting.device_type == "cuda" else _listed_for_gpus()
    total = len(_OPERATIONS)
    figure = f"CPU {len(on_cpu)} of {total} ({', '.join(on_cpu)}), CUDA {len(on_gpu)} of {total}"
    return Outcome(overall(decided(len(found) == total) for found in (on_cpu, on_gpu)), figure)


def _measured_on_gpu(x: Tensor) -> list[str]:
    with torch.autocast("cuda", torch.bfloat16):
        return [name for name, operation in _OPERATIONS.items() if operation(x.cuda()).dtype == torch.float32]


def _listed_for_gpus() -> list[str]:
    header = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
    parts = re.findall(r"#define AT_FORALL_FP32\w*\(_\)(.*?)\n\n", header.read_text("utf-8"), re.DOTALL)
    listed = set(re.findall(r"_\((\w+)", " ".join(parts)))
    return [name for name in _OPERATIONS if name in listed]


CLAIM = Claim(
    "Softmax, norms and losses stay in fp32",
    AMP_DOCS,
    f"{', '.join(_OPERATIONS)} of bf16 values: run on the CPU, looked up in torch's list for CUDA.",
    run,
)
