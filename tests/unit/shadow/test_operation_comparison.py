"""Operations of a step, in one precision beside those in another, with the user's line."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_amp.numerics import fidelity
from lightning_amp.shadow._operation_comparison import OperationComparison
from lightning_amp.shadow._output_comparison import OutputComparison


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        angles = (self.fc(x) + 1000).relu()
        return angles.cos()


def both(net: nn.Module, x: Tensor) -> tuple[OperationComparison, OperationComparison]:
    names = OutputComparison()
    fp32 = OperationComparison(names, "nobody.py")
    with names.naming(net), fp32:
        net(x)
    amp = OperationComparison(names, "nobody.py", fp32)
    with names.naming(net), amp, torch.autocast("cpu", torch.bfloat16):
        net(x)
    return fp32, amp


def test_each_operation_has_its_line_and_its_sources() -> None:
    fp32, amp = both(Net(), torch.randn(16, 4))
    assert [call.name for call in amp.calls] == [call.name for call in fp32.calls] == ["linear", "add", "relu", "cos"]
    assert [call.module for call in amp.calls] == ["fc", None, None, None]
    cos = amp.calls[-1]
    assert cos.place is not None
    assert cos.place.code == "return angles.cos()"
    assert [source.name for source in cos.sources] == ["relu"]
    assert cos.reference is fp32.calls[-1]
    assert cos.sums is not None
    assert float(fidelity(cos.sums[:3])[0]) < 10
    assert amp.calls[0].takes_exact


def test_where_something_is_not_finite() -> None:
    class Bad(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = torch.log(x.relu() * 0)
            return (y * 0 == y).float()

    fp32, _ = both(Bad(), torch.randn(4, 4))
    assert [(call.name, bool(call.is_bad), bool(call.takes_bad)) for call in fp32.calls] == [
        ("relu", False, False), ("mul", False, False), ("log", True, False), ("mul", True, False),
        ("__eq__", False, True), ("float", False, False),
    ]  # fmt: skip
    assert fp32.calls[4].is_blameless
