"""Which module or operation is the first that is wrong."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_amp.shadow._evaluation_blame import (
    Blame,
    blamed_module,
    half_precision_state,
    more_modules,
    origin_in_fp32,
    worst_db,
)
from lightning_amp.shadow._output_comparison import OutputComparison


class Offset(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1000


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.offset, self.fc = Offset(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.offset(x) - 1000)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp, self.block = nn.Linear(4, 4), Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.inp(x))


def compared(net: nn.Module, x: Tensor, dtype: torch.dtype = torch.bfloat16) -> OutputComparison:
    outputs = OutputComparison(inputs=True)
    with outputs.recording(net):
        net(x)
    with outputs.comparing(net), torch.autocast("cpu", dtype):
        net(x)
    return outputs


def test_the_innermost_comes_first() -> None:
    found = blamed_module(compared(Net(), torch.randn(64, 4)), nonfinite=False)
    assert (found.cause, found.module, found.module_class) == ("module", "block.offset", "Offset")
    assert found.only_varying
    assert found.input_db > 40
    assert found.output_db < 5
    healthy = blamed_module(compared(nn.Sequential(nn.Linear(4, 4), nn.GELU()), torch.randn(64, 4)), nonfinite=False)
    assert healthy == Blame()


def test_the_step_is_no_module() -> None:
    assert blamed_module(compared(Offset(), torch.randn(64, 4)), nonfinite=False) == Blame()


def test_only_what_is_not_finite() -> None:
    assert blamed_module(compared(Net(), torch.randn(64, 4)), nonfinite=True) == Blame()
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    net[0].weight.data.mul_(1e6)
    found = blamed_module(compared(net, torch.ones(8, 4), torch.float16), nonfinite=True)
    assert (found.module, found.in_fp32_too) == ("0", False)


def test_origins_in_fp32() -> None:
    net, x = Net(), torch.randn(8, 4)
    net.block.fc.bias.data[0] = torch.nan
    found = origin_in_fp32(compared(net, x), {"x": x}, net)
    assert (found.cause, found.names, found.module) == ("weights", ("block.fc.bias",), "block.fc")
    net, x = Net(), torch.randn(8, 4)
    x[0, 0] = torch.inf
    found = origin_in_fp32(compared(net, x), {"x": x}, net)
    assert (found.cause, found.names, found.module) == ("batch", ("1 in `batch['x']`",), "inp")
    found = origin_in_fp32(compared(Net(), torch.randn(8, 4)), {}, net)
    assert (found.cause, found.in_fp32_too) == ("operation", True)


def test_more_modules() -> None:
    outputs = compared(Net(), torch.randn(64, 4))
    assert more_modules(["inp"], Blame("module", module="block.fc"), outputs) == ["inp", "block.fc"]
    assert more_modules(["block.fc"], Blame("module", module="block.fc"), outputs) == ["block"]
    assert more_modules(["block"], Blame("module", module="block"), outputs) == ["block", "inp"]
    assert more_modules(["inp"], Blame("module", module="inp"), outputs) is None
    assert more_modules(["inp"], Blame(), outputs) is None


def test_nothing_to_compare_is_exact() -> None:
    assert worst_db(None) == torch.inf


def test_state() -> None:
    net = nn.BatchNorm1d(2)
    net.seen = torch.ones((), dtype=torch.bfloat16)  # type: ignore[assignment]
    state = half_precision_state(nn.Sequential(net))
    assert {"0.running_mean", "0.running_var", "0.seen"} == set(state)
