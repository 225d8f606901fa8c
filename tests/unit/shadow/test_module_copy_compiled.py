"""`GradientMonitor` and `OverflowLocator` on modules that are compiled, scripted, or called through `torch.func`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from support import Toy, assert_same, batches, quiet_trainer, weights
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, jvp, vmap

from lightning_amp import AmpPrecision, GradientMonitor, OverflowLocator, ScaleMonitor
from lightning_amp.reports import GradientTable

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*torch.jit", "ignore:.*LeafSpec:FutureWarning", "ignore:.*skipping cudagraphs",
)  # fmt: skip
compiled: Any = functools.partial(torch.compile, backend="eager")


class Net(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(1, 1)
        self.encode: Callable[[Tensor], Tensor] = self.plain_encode
        self.act: Callable[[Tensor], Tensor] = nn.functional.tanh

    def plain_encode(self, batch: Tensor) -> Tensor:
        return self.net(batch)

    def forward(self, batch: Tensor) -> Tensor:
        return self.head(self.act(self.encode(batch)))

    def loss(self, batch: Tensor) -> Tensor:
        return nn.functional.mse_loss(self(batch).float(), batch.sum(1, keepdim=True))


class Functional(Net):
    """Its loss goes through a transform of `torch.func`, and nearly equals the loss of `Net`."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def loss(self, batch: Tensor) -> Tensor:
        target, parameters = batch.sum(1, keepdim=True), dict(self.named_parameters())

        def one(x: Tensor, y: Tensor) -> Tensor:
            return nn.functional.mse_loss(self.forward(x).float(), y)

        def of_parameters(parameters: dict[str, Tensor]) -> Tensor:
            return nn.functional.mse_loss(functional_call(self, parameters, (batch,)).float(), target)

        if self.kind == "functional_call":
            return of_parameters(parameters)
        if self.kind == "vmap":
            return vmap(one)(batch, target).mean()
        plain = super().loss(batch)
        if self.kind == "grad of inputs":
            return plain + 1e-3 * vmap(grad(lambda x: self.forward(x).float().sum()))(batch).float().square().mean()
        if self.kind == "jacrev":
            return plain + 1e-3 * vmap(jacrev(self.forward))(batch).float().square().mean()
        if self.kind == "jvp":
            return plain + 1e-3 * jvp(self.forward, (batch,), (torch.ones_like(batch),))[1].float().square().mean()
        step = grad(of_parameters)(parameters)
        return of_parameters({name: p - 1e-3 * step[name] for name, p in parameters.items()})


def wrapped(encode: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def inner(batch: Tensor, scale: float = 1) -> Tensor:
        return encode(batch * scale)

    return inner


def double(x: Tensor) -> Tensor:
    return torch.tanh(x)


COMPILED: dict[str, Callable[[Net], object]] = {
    "torch.compile(child)": lambda module: setattr(module, "net", compiled(module.net)),
    "torch.compile(grandchild)": lambda module: setattr(module.net, "0", compiled(module.net[0])),
    "child.compile()": lambda module: module.net.compile(backend="eager"),
    "torch.compile(method)": lambda module: setattr(module, "encode", compiled(module.plain_encode)),
    "torch.compile(module)": lambda module: None,
    "lambda": lambda module: setattr(module, "encode", lambda batch: module.net(batch * 1)),
    "function in a function": lambda module: setattr(
        module, "encode", functools.partial(wrapped(wrapped(module.plain_encode)), scale=1)
    ),
}
SCRIPTED: dict[str, Callable[[Net], object]] = {
    "torch.jit.script(child)": lambda module: setattr(module, "net", torch.jit.script(module.net)),
    "torch.jit.trace(child)": lambda module: setattr(module, "net", torch.jit.trace(module.net, torch.ones(4, 8))),
    "torch.jit.script(function)": lambda module: setattr(module, "act", torch.jit.script(double)),
}
FUNCTIONAL = ["functional_call", "vmap", "grad of inputs", "jacrev", "jvp", "inner step"]


def make(kind: str) -> Any:
    module = Functional(kind) if kind in FUNCTIONAL else Net()
    {**COMPILED, **SCRIPTED}.get(kind, lambda module: None)(module)
    return compiled(module) if kind == "torch.compile(module)" else module


def case(kind: str, *marks: Any) -> Any:
    return pytest.param(kind, marks=[*marks, *([pytest.mark.needs("forward AD")] if kind == "jvp" else [])])


def run(kind: str, precision: str, *callbacks: L.Callback, scale: float | None = None) -> L.Trainer:
    torch.manual_seed(0)
    module = make(kind)
    trainer = quiet_trainer(plugins=[AmpPrecision(precision, scaler=scale)], callbacks=list(callbacks))
    trainer.fit(module, batches())
    return trainer


@functools.cache
def gradients_of_a_plain_module() -> GradientTable:
    monitor = GradientMonitor(4)
    run("plain", "fp16", monitor)
    return monitor.table


@pytest.mark.parametrize(
    "kind", ["plain", *COMPILED, *(case(kind, pytest.mark.slow) for kind in [*SCRIPTED, *FUNCTIONAL])]
)
@pytest.mark.few(4)
def test_they_see_the_same_as_in_a_plain_module(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """Gradients are sampled at the default scale; skipped steps are located at a scale that is too high."""
    plain = gradients_of_a_plain_module()
    monitor, locator = GradientMonitor(4), OverflowLocator(max_reports=2)
    with caplog.at_level("INFO"):
        run(kind, "fp16", ScaleMonitor(), monitor)
        run(kind, "fp16", locator, scale=2.0**22)
    assert [row.name for row in monitor.table] == [row.name for row in plain]
    assert {row.name for row in monitor.table} == {"net.0", "net.2", "head", "(all)"}
    for seen, wanted in zip(monitor.table, plain, strict=True):
        assert seen.headroom_bits == pytest.approx(wanted.headroom_bits, abs=1.0 if "script" in kind else 0.1)
    assert all(row.cosine > 0.999 for row in monitor.table.last)
    assert locator.reports
    for report in locator.reports:
        assert report.cause == "backward"
        assert report.module in (None, "net.0", "net.2", "head")
        assert all(name.split(".")[0] in ("net", "head") for name in report.parameters)
    assert "_orig_mod" not in caplog.text
    assert "second time" not in caplog.text


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("kind", [*COMPILED, "torch.jit.trace(child)", *map(case, FUNCTIONAL)])
@pytest.mark.few(10)
def test_training_is_the_same_bits(kind: str, precision: str) -> None:
    torch._dynamo.reset()
    alone = weights(run(kind, precision))
    watched = run(kind, precision, ScaleMonitor(), GradientMonitor(3), OverflowLocator(max_reports=2))
    assert_same(weights(watched), alone)


def test_a_parameter_that_has_no_gradient_in_mixed_precision_is_lost() -> None:
    class Casts(Net):
        def forward(self, batch: Tensor) -> Tensor:
            hidden = self.encode(batch)
            return self.head(hidden if hidden.dtype == torch.float32 else hidden.detach())

    monitor = GradientMonitor()
    torch.manual_seed(0)
    trainer = quiet_trainer(plugins=[AmpPrecision("bf16")], callbacks=[monitor])
    trainer.fit(Casts(), batches(1))
    rows = {row.name: row for row in monitor.table}
    assert (rows["net.0"].sqnr_db, rows["net.0"].cosine) == (0, 0)
    assert rows["head"].sqnr_db > 30
