"""Compare the speed of two functions in one process, both in turns."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from benchmarks.claims._claim import Setting, Verdict
from benchmarks.claims._models import Example
from lightning_amp.measure import SpeedComparison, paired_log_ratio

_ROUNDS, _PAIRS = 7, 5


def compared(setting: Setting, contestant: Callable[[], object], reference: Callable[[], object]) -> SpeedComparison:
    """Return the speed of the contestant: in each round the median over pairs, then the interval over rounds."""
    rounds: list[float] = []
    for run in (contestant, reference):  # the first call chooses kernels and allocates memory
        _timed(run, setting)
    for _ in range(2 if setting.tiny else _ROUNDS):
        seconds = [
            (_timed(contestant, setting), _timed(reference, setting))
            if k % 2
            else (_timed(reference, setting), _timed(contestant, setting))[::-1]
            for k in range(_PAIRS)
        ]
        rounds.append(paired_log_ratio([a for a, _ in seconds], [b for _, b in seconds]))
    return SpeedComparison.of(rounds)


def at_least(speed: SpeedComparison, ratio: float) -> Verdict:
    """Judge the claim that the contestant is at least so many times as fast."""
    if speed.low is None or speed.high is None:
        return "undecided"
    return "reproduced" if speed.low >= ratio else "not reproduced" if speed.high < ratio else "undecided"


def written(speed: SpeedComparison) -> str:
    """Write the ratio and its interval: `1.30x (1.21x to 1.40x)`."""
    return f"{speed.ratio:.2f}x ({speed.interval})"


def step(example: Example, dtype: torch.dtype | None) -> Callable[[], object]:
    """Return a function that trains for one step, under autocast if `dtype` is given."""
    optimizer = torch.optim.AdamW(example.net.parameters(), lr=1e-4)
    device_type = example.batch.device.type

    def train() -> None:
        with torch.autocast(device_type, dtype or torch.bfloat16, enabled=dtype is not None):
            loss = example.loss(example.net, example.batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return train


def _timed(run: Callable[[], object], setting: Setting) -> float:
    begin = time.perf_counter()
    run()
    if setting.device_type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin
