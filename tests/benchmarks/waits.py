"""How often the host waits for the device in an optimizer step, beside what is promised.

python -m tests.benchmarks.waits [PART ...]     only optimizers whose name contains one of these; some minutes

It needs a GPU, where waits are counted by CUDA's warnings, or the pretended device:
PYTHONPATH=tests/pretended/site LIGHTNING_AMP_PRETEND=cuda python -m tests.benchmarks.waits
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from typing import Any

sys.path.append("tests")  # last on the path: `benchmarks` must be the repository's, not this folder

import pretended
import torch

HEADER = (
    f"{'optimizer':<18} {'':<7} {'loop':<15} {'clip':<6} {'callback':<17}"
    f" {'expected':>8} {'fp32':>8} {'bf16':>8} {'fp16':>8}   {'Lightning: fp32':>15} {'bf16':>8} {'fp16':>8}"
)


def main(parts: list[str]) -> int:
    if not pretended.KIND and not torch.cuda.is_available():
        print("Waits are counted on a GPU or on the pretended device; there is neither.")
        return 0
    os.environ["LIGHTNING_AMP_TEST_DEVICE"] = pretended.KIND or "cuda"
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")

    from support.waits import VARIANTS, grid

    where = f"pretended ({pretended.KIND})" if pretended.KIND else torch.cuda.get_device_name()
    print(f"Waits per optimizer step, clean and skipped, torch {torch.__version__}, device: {where}\n{HEADER}")
    variants = [v for v in VARIANTS if not parts or any(part.lower() in v[0].lower() for part in parts)]
    cases = list(grid(variants))
    num_wrong = 0
    for row in (cases[i : i + 3] for i in range(0, len(cases), 3)):  # the three precisions
        case = row[0]
        ours = [attempt(case, case.plugin()) for case in row]
        theirs = [attempt(case, case.stock_plugin()) for case in row] if case.callback == "none" else []
        wrong = any(found != str(case.expected) for found in ours)
        num_wrong += wrong
        print(
            f"{case.optimizer:<18} {'fused' if case.fused else '':<7} {case.loop:<15} {case.clip:<6}"
            f" {case.callback:<17} {case.expected!s:>8} {' '.join(f'{found:>8}' for found in ours)}"
            f"   {' '.join(f'{found:>{8 if i else 15}}' for i, found in enumerate(theirs))}"
            f"{'   <- differs' if wrong else ''}".rstrip(),
            flush=True,
        )
    print(f"{num_wrong} of {len(cases) // 3} rows differ from what is promised.")
    return int(num_wrong > 0)


def attempt(case: Any, plugin: Any) -> str:
    """Count the waits; Lightning's own plugin refuses some of these loops."""
    try:
        return str(case.waits(plugin))
    except Exception as error:
        return type(error).__name__[:8]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
