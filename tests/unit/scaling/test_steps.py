"""Any sequence of backward, unscale, clip, zero and step of two optimizers equals the same loop without a scale."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support import DEVICE
from torch import Tensor, nn

from lightning_amp.scaling import DynamicLossScaler, OptimizerSteps, RecordLog, StepPlan

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.125, momentum=0.5),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01),
    "fused AdamW": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "fused Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.125, fused=True),
}
SCALERS: dict[str, Callable[[], torch.amp.GradScaler | None]] = {
    "none": lambda: None,
    "dynamic": lambda: DynamicLossScaler(2.0**10, growth_interval=2),
    "hysteresis": lambda: DynamicLossScaler(2.0, growth_interval=1, hysteresis=2, min_scale=0.25),
    "static": lambda: DynamicLossScaler.static(256.0),
    "torch's": lambda: DynamicLossScaler.taking(torch.amp.GradScaler(DEVICE, init_scale=4.0, growth_interval=2)),
}


class Loop:
    """A loop with two optimizers; with `scaler=False` in plain torch, with a rule of its own.

    No optimizer steps with a non-finite gradient, or after `unscale_` has found one while any of its gradients is still
    there. Scales are powers of two, so that both loops are equal bit for bit.
    """

    def __init__(self, kinds: tuple[str, str], shared: bool, scaler: Any = False, listed: bool = True) -> None:
        generator = torch.Generator().manual_seed(0)
        dtypes = (torch.float32, torch.float32, torch.float32, torch.float64)
        values = [torch.randn(3, dtype=dtype, generator=generator) for dtype in dtypes]
        self.params = [nn.Parameter(value.to(DEVICE)) for value in values]
        a, b = self.params[:2], self.params[1 if shared else 2 :]
        self.optimizers = [OPTIMIZERS[kind](params) for kind, params in zip(kinds, (a, b), strict=True)]
        self.log = RecordLog(10_000)
        self.steps = None if scaler is False else OptimizerSteps(scaler, True, self.log, self.optimizers * listed)
        self.batch = 0
        self.found = [False, False]

    def gradients(self, i: int) -> list[Tensor]:
        return [p.grad for group in self.optimizers[i].param_groups for p in group["params"] if p.grad is not None]

    def backward(self, of: str) -> None:
        self.batch += 1
        self.found = [found and any(map(torch.any, self.gradients(i))) for i, found in enumerate(self.found)]
        x = torch.linspace(-1, 1, 3, device=DEVICE) * self.batch
        a, shared, b, b64 = self.params
        losses = {"A": ((a * x + shared).tanh() ** 2).sum(), "B": (b * b64.float() + shared * x).sin().sum()}
        loss = losses["A"] + losses["B"] if of == "both" else losses[of]
        if self.steps is None:
            loss.backward()
            return
        scaled = self.steps.scale_loss(loss)
        with self.steps.scaled_backward():
            scaled.backward()

    def overflow(self, of: str, param: int) -> None:
        self.backward(of)
        if self.params[param].grad is not None:
            self.params[param].grad[0] = torch.nan  # pyright: ignore[reportOptionalSubscript]

    def unscale(self, i: int) -> None:
        if self.steps is not None:
            self.steps.unscale_(self.optimizers[i])
        elif not all(gradient.isfinite().all() for gradient in self.gradients(i)):
            self.found[i] = True

    def clip(self, i: int) -> None:
        self.unscale(i)
        for param in (p for group in self.optimizers[i].param_groups for p in group["params"]):
            if param.grad is not None:
                param.grad.clamp_(-0.25, 0.25)

    def step(self, i: int) -> None:
        optimizer = self.optimizers[i]
        if self.steps is not None:
            self.steps.step(optimizer, lambda: None, lambda: None, StepPlan(fold=True, in_closure=False))
        elif not self.found[i] and all(gradient.isfinite().all() for gradient in self.gradients(i)):
            optimizer.step()
        self.found[i] = False

    def zero(self, i: int) -> None:
        self.optimizers[i].zero_grad()

    def end(self) -> None:
        if self.steps is not None:
            self.steps.end_round()

    def run(self, operations: list[tuple[Any, ...]]) -> list[Tensor | None]:
        for name, *arguments in operations:
            getattr(self, name)(*arguments)
        self.end()
        self.log.flush()
        for i in (0, 1):
            self.unscale(i)
        values = [p.detach() for p in self.params] + [p.grad for p in self.params]
        return [v if v is None or v.isfinite().all() else torch.full_like(v, torch.nan) for v in values]


OF, PARAM, WHICH = st.sampled_from(["A", "B", "both"]), st.integers(0, 3), st.integers(0, 1)
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("backward"), OF),
        st.tuples(st.just("overflow"), OF, PARAM),
        *(st.tuples(st.just(name), WHICH) for name in ("unscale", "clip", "step", "zero")),
        st.tuples(st.just("end")),
    ),
    max_size=24,
)


@pytest.mark.usefixtures("where_flags_live")
@settings(max_examples=150, deadline=None)
@given(
    operations=OPERATIONS,
    kinds=st.tuples(st.sampled_from(list(OPTIMIZERS)), st.sampled_from(list(OPTIMIZERS))),
    shared=st.booleans(),
    scaler=st.sampled_from(list(SCALERS)),
    listed=st.booleans(),
)
# the other optimizer has unscaled the only gradients of an optimizer, and found them bad
@example([("overflow", "A", 1), ("step", 0), ("step", 1)], ("AdamW", "fused AdamW"), True, "dynamic", True)
# a skipped folded step leaves shared gradients scaled
@example([("overflow", "both", 2), ("step", 1), ("step", 0)], ("SGD", "fused AdamW"), True, "dynamic", True)
# gradients that both optimizers share are carried to a new scale once
@example(
    [("overflow", "both", 0), ("step", 0), ("backward", "B"), ("end",), ("backward", "B")],
    ("AdamW",) * 2,
    True,
    "dynamic",
    True,
)
# without a list: another one has unscaled the gradients before the first step; a folded step has left them scaled
@example([("backward", "both"), ("step", 1), ("step", 0)], ("SGD", "SGD"), True, "dynamic", False)
@example([("overflow", "A", 0), ("step", 0)], ("fused AdamW", "SGD"), False, "dynamic", False)
def test_any_order_equals_plain_torch(
    operations: list[tuple[Any, ...]], kinds: tuple[str, str], shared: bool, scaler: str, listed: bool
) -> None:
    try:
        found = Loop(kinds, shared, SCALERS[scaler](), listed).run(operations)
    except RuntimeError as error:
        if listed or "Pass all optimizers" not in str(error):
            raise
    else:
        wanted = Loop(kinds, shared).run(operations)
        torch.testing.assert_close(found, wanted, rtol=0.0, atol=0.0, equal_nan=True)
