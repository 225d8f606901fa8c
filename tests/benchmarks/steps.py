"""Time training steps against Lightning's own plugin: `python -m tests.benchmarks.steps`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import nn

from lightning_amp import AmpPrecision, DynamicLossScaler
from tests.benchmarks._models import GPT, ManyNorms, Timed, UnrolledLSTM, mlp
from tests.benchmarks._pairs import fit, pair, report, start


def ours(precision: str) -> AmpPrecision:
    return AmpPrecision(precision, scaler=DynamicLossScaler(1024.0) if precision == "fp16" else None)


def lightnings(precision: str) -> MixedPrecision:
    if precision == "bf16":
        return MixedPrecision("bf16-mixed", "cpu")
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0))


def compare(
    name: str,
    net: Callable[[], nn.Module],
    batch: torch.Tensor,
    a: Callable[[], Any],
    b: Callable[[], Any],
    *,
    fused: bool = False,
    target: str = "",
    **kwargs: Any,
) -> None:
    trainer = {k: kwargs.pop(k) for k in ("gradient_clip_val",) if k in kwargs}
    first, second = (lambda turns, p=p: fit(Timed(net(), fused=fused), p(), turns, batch, **trainer) for p in (a, b))
    ours, theirs = pair(first, second, **kwargs)
    theirs_again, ours_again = pair(second, first, **kwargs)  # building order matters by a per cent or two
    report(name, ours + ours_again, theirs + theirs_again, target=target)


def main() -> None:
    start("Training steps: AmpPrecision against Lightning's MixedPrecision")
    tiny, tokens, sequence = torch.randn(16, 32), torch.randn(8, 64, 384), torch.randn(16, 32, 256)
    for precision in ("bf16", "fp16"):
        a, b = functools.partial(ours, precision), functools.partial(lightnings, precision)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # a second thread makes a step of 1 ms noisier than the difference that is measured
        for fused in (False, True):
            label = f"{precision}, {'fused' if fused else 'plain'} AdamW"
            compare(f"tiny MLP, {label}, one thread", mlp, tiny, a, b, fused=fused, steps=100, blocks=25, warmup=100,
                    target=">= 0.99")  # fmt: skip
        torch.set_num_threads(threads)
        compare(
            f"GPT 10.7 M, {precision}, fused AdamW", GPT, tokens, a, b, fused=True, steps=3, blocks=21, target=">= 0.99"
        )
        compare(f"LSTM cell x 32, {precision}, plain AdamW", UnrolledLSTM, sequence, a, b)

    start("What the guards cost: with against without")
    with_guard, without = (functools.partial(AmpPrecision, "bf16", skip_nonfinite=s) for s in (True, False))
    compare("skip_nonfinite, GPT 10.7 M, bf16, fused AdamW", GPT, tokens, with_guard, without, fused=True, steps=3,
            blocks=21, target=">= 0.98")  # fmt: skip

    class Unprotected(AmpPrecision):
        def connect(self, *args: Any) -> Any:

            from lightning_amp._compat import _modules

            original, _modules.norm_modules = _modules.norm_modules, lambda module: []
            try:
                return super().connect(*args)
            finally:
                _modules.norm_modules = original

    rows = torch.randn(2048, 128)
    compare("buffer protection, 100 BatchNorms, bf16", ManyNorms, rows, functools.partial(AmpPrecision, "bf16"),
            functools.partial(Unprotected, "bf16"), fused=True, blocks=21, target=">= 0.99")  # fmt: skip


if __name__ == "__main__":
    main()
