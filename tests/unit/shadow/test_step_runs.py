"""A trial that cannot be run does not work, and leaves nothing behind."""

from __future__ import annotations

import pytest
import torch
from support import fit
from torch import Tensor
from zoo.faults import Net, mse, plain_data

from lightning_amp import AmpPrecision, OverflowLocator


class OnlyHalf(torch.autograd.Function):
    """A kernel that takes half precision alone."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        if x.dtype == torch.float32:
            raise RuntimeError("only half")
        return x / 0

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:  # type: ignore[no-untyped-def, override]
        return gradient * torch.inf


def test_a_step_that_does_not_run_in_fp32_is_looked_at_as_it_was() -> None:
    def loss(module: Net, batch: Tensor) -> Tensor:
        return OnlyHalf.apply(module.encoder(batch)).float().mean()  # type: ignore[attr-defined]

    locator = OverflowLocator(max_reports=1)
    fit(lambda: Net(loss), AmpPrecision("bf16"), plain_data(), callbacks=[locator])
    (report,) = locator.reports
    assert report.diagnosis.in_fp32 == ""
    assert report.note == "it could not be run in fp32 (RuntimeError: only half)"
    assert not any(remedy.worked for remedy in report.remedies)


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_trials_leave_the_run_as_it_is(precision: str) -> None:
    def loss(module: Net, batch: Tensor) -> Tensor:
        return mse(module, batch) + torch.log(batch[0, 0].clamp(max=0).abs() * 0) * module.head.bias.sum()

    ends = []
    for callbacks in ([], [OverflowLocator()]):
        torch.manual_seed(0)
        trainer = fit(lambda: Net(loss), AmpPrecision(precision), plain_data(), callbacks=callbacks)
        ends.append((trainer.lightning_module.state_dict(), torch.get_rng_state()))
    torch.testing.assert_close(ends[0], ends[1], rtol=0, atol=0)
