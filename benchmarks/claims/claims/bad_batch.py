"""Whether `GradScaler` makes a batch harmless that overflows."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.claims._claim import Claim, Outcome, Setting, decided, overall
from benchmarks.claims._sources import AMP_DOCS


def run(setting: Setting) -> Outcome:
    """Train one step on a batch with a value of a million, without and with batch normalisation."""
    plain, normed = _is_finite(setting), _is_finite(setting, nn.BatchNorm1d(16))
    figure = f"weights {_word(plain)}; BatchNorm statistics {_word(normed)}"
    return Outcome(overall([decided(plain), decided(normed)]), figure)


def _is_finite(setting: Setting, *norm: nn.Module) -> bool:
    """Return whether weights and buffers are finite after the step."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 16), *norm, nn.Linear(16, 1)).to(setting.device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(setting.device_type)
    batch = torch.randn(8, 16, device=setting.device)
    batch[0, 0] = 1e6
    with torch.autocast(setting.device_type, torch.float16):
        loss = net(batch).float().pow(2).mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return all(bool(value.isfinite().all()) for value in net.state_dict().values())


def _word(is_finite: bool) -> str:
    return "stay finite" if is_finite else "do not"


CLAIM = Claim(
    "`GradScaler` makes a bad batch harmless",
    AMP_DOCS,
    "One fp16 step on a batch with a value of 1,000,000: all weights and statistics are finite.",
    run,
)
