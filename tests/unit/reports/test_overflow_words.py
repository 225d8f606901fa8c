"""What is said of a skipped step."""

from __future__ import annotations

from support.skips import EXP, report

from lightning_amp.reports import Remedy
from lightning_amp.tracing import Operation


def test_a_whole_report() -> None:
    remedies = (Remedy("bf16", (), True), Remedy("fp32_modules", ("head",), False))
    assert str(report("forward", EXP, remedies=remedies, parameters=("head.weight",))) == (
        "step 0 was skipped: epoch 0, batch 3, loss scale 2**16\n"
        "  cause: the forward: the result of `exp` in `head` (Contrast), float16 [4, 4], is not finite; in fp32 it is"
        " finite, up to 199,000; the largest finite input is 12.2\n"
        '  line: losses.py:75 "log_z = torch.exp(sim).sum(-1)"\n'
        "  non-finite gradients: `head.weight`\n"
        "  try: 'bf16', whose range is that of fp32 (tried: works); or subtract the maximum before the exponential"
        " (`torch.logsumexp`, `log_softmax`). Lowering the loss scale cannot help"
    )


def test_what_stands_out_is_said_beside_what_fp32_makes_of_it() -> None:
    zero = Operation("div", dtype="float16", shape=(3,), kind="zero", index=(1,), count=2, largest_in_fp32=4.0)
    assert (
        "is not finite: a divisor is 0, the first at [1], which it is not in fp32; in fp32 it is finite, up to 4"
        in str(report("loss", zero))
    )
    either = Operation("softmax", dtype="float32", shape=(2, 3), kind="masked", index=(1,), count=1)
    assert "is not finite, nor is it in fp32: a row is masked entirely, all of it minus infinity at [1]" in str(
        report("loss", either, "not finite")
    )


def test_a_gradient_that_is_cast_back() -> None:
    cast = Operation("float", dtype="float16", shape=(4, 1), in_backward=True)
    assert "the gradient, which that line casts back to float16 [4, 1], is not finite" in str(report("backward", cast))
