"""Metrics inside autocast compute as outside of it, and nothing stays on them."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchmetrics.functional.regression import pearson_corrcoef
from torchmetrics.regression import R2Score

from lightning_amp.casting._fp32_metrics import _walk, metrics_in_fp32
from lightning_amp.precision import fp32_region


def regression(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    target = 100 + torch.randn(64)
    return (target + 0.6 * torch.randn(64)).to(dtype), target.to(dtype)


class Holder(nn.Module):
    def __init__(self, metric: Any) -> None:
        super().__init__()
        self.metric = metric


class InPlainContainers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.metrics: list[Any] = [R2Score(), {"inner": (R2Score(),)}]
        self.by_name = {"val": R2Score(), "text": "no metric"}
        self.child = nn.ModuleDict({"registered": R2Score()})
        self.hidden = [Holder(R2Score())]
        self.hidden.append(self)  # type: ignore[arg-type]  # a cycle
        self.collected = [torch.zeros(1)] * 2000


def test_metrics_in_plain_containers() -> None:
    module = InPlainContainers()
    metrics = list({id(m): m for m in _walk(module, set())}.values())
    assert len(metrics) == len({id(m) for m in metrics}) == 5
    batch = regression(torch.float16)
    with torch.autocast("cpu", torch.bfloat16), metrics_in_fp32(module, "cpu"):
        values = [metric(*batch) for metric in metrics]
    expected = R2Score()(batch[0].float(), batch[1].float())
    torch.testing.assert_close(values, [expected] * 5, rtol=0, atol=0)


def test_copies_and_pickles_in_the_middle_of_a_step() -> None:
    metric, batch = R2Score(), regression(torch.float32)
    with metrics_in_fp32(Holder(metric), "cpu"):
        metric.update(*batch)
        copies = [metric.clone(), copy.deepcopy(metric), pickle.loads(pickle.dumps(metric))]
    for other in copies:
        assert type(vars(other)["update"]) is type(vars(metric)["update"])
        other.update(*batch)
        assert other.update_count == 2
    assert metric.update_count == 1


@pytest.mark.parametrize("way", ["function", "decorator", "called decorator"])
def test_region_for_functional_metrics(way: str) -> None:
    preds, target = regression(torch.float16)

    @fp32_region
    def decorated(preds: Tensor, target: Tensor) -> Tensor:
        return pearson_corrcoef(preds, target)

    @fp32_region()
    def called(preds: Tensor, target: Tensor) -> Tensor:
        return pearson_corrcoef(preds, target)

    function = {"function": fp32_region(pearson_corrcoef), "decorator": decorated, "called decorator": called}[way]
    with torch.autocast("cpu", torch.bfloat16):
        value = function(preds, target=target)
        assert not torch.equal(pearson_corrcoef(preds, target).float(), value)
    torch.testing.assert_close(value, pearson_corrcoef(preds.float(), target.float()), rtol=0, atol=0)


def test_region_as_a_context_is_reentrant_and_undone() -> None:
    weight = torch.randn(4, 4)
    region = fp32_region()
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(KeyError, match="x"), region:
            with region:
                assert (weight @ weight).dtype == torch.float32
            assert (weight @ weight).dtype == torch.float32
            raise KeyError("x")
        assert (weight @ weight).dtype == torch.bfloat16
    with region:
        assert not torch.is_autocast_enabled("cpu")
