"""Repeated measurements of one step inside a fit."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from zoo import fp32_cases as cases

from lightning_amp.tune import NothingHelps
from lightning_amp.tune.fp32_modules._bench import Bench
from lightning_amp.tune.fp32_modules._request import Request
from lightning_amp.tune.fp32_modules._short_fit import in_a_short_fit


def on(kind: Any, precision: str, work: Callable[[Bench], Any], **arguments: Any) -> Any:
    def make() -> Any:
        torch.manual_seed(0)
        return kind()

    request = Request(make, cases.Rows, {"precision": precision, **arguments}, 0.05, {"accelerator": "cpu"})
    return in_a_short_fit(request, [0, 4], work)


def test_errors_with_more_and_more_in_fp32() -> None:
    sets = [(), ("one",), ("one", "two"), ("inp", "one", "two", "between", "head")]
    none, one, both, all_ = on(cases.Two, "fp16", lambda bench: [bench.distance(rules) for rules in sets])
    assert (none.gradient, one.gradient) == (math.inf, math.inf)
    assert none.reason == one.reason == "the loss is not finite"
    assert none.metrics == {"val_loss": math.inf}
    assert 0 < both.gradient < 0.01
    assert both.reason == ""
    assert all_.gradient == 0  # the same bits as fp32
    assert all_.metrics == {"val_loss": 0}


def test_dropout_is_the_same_on_both_sides() -> None:
    class Dropping(cases.Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.body[3] = nn.Dropout(0.5)

    assert on(Dropping, "bf16", lambda bench: bench.distance()).gradient < 0.03


def test_the_scale_fits() -> None:
    """Without a scale, gradients of 1e-9 would be zero; at the usual scale, gradients of 1e9 would be infinite."""

    def make(factor: float) -> Any:
        class Scaled(cases.Mlp):
            def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
                return factor * super().training_step(batch, batch_idx)

            def configure_optimizers(self) -> Any:
                return torch.optim.SGD(self.parameters(), lr=0.0)

        return Scaled

    for factor in (1e-7, 1.0, 1e7):
        assert on(make(factor), "fp16", lambda bench: bench.distance()).gradient < 0.01


def test_gradients_that_overflow_at_every_scale() -> None:
    class Steep(cases.Case):
        """A gradient inside the module is a million times as large as the gradients of the weights."""

        def __init__(self) -> None:
            super().__init__()
            self.inp, self.head = nn.Linear(cases.SIZE, 16), nn.Linear(16, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.head((self.inp(x) * 1e-9) * 3e4 * 3e4)

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return 1e9 * super().training_step(batch, batch_idx)

    found = on(Steep, "fp16", lambda bench: bench.distance())
    assert (found.gradient, found.reason) == (math.inf, "gradients overflow at every loss scale")


def test_until_an_error_is_larger() -> None:
    found = on(cases.Two, "fp16", lambda bench: bench.distance(until=0.1))
    assert found.metrics == {}


def test_what_does_not_run_does_not_pass() -> None:
    class IndexPut(cases.Two):
        """Source and destination must have one dtype."""

        def forward(self, x: Tensor) -> Tensor:
            z = self.inp(x)
            out = torch.zeros_like(z)
            out[:2] = z[:2]
            rows = torch.arange(2, len(x))
            return self.head(out.index_put((rows,), self.between(z[2:]) / 3))

    fine, torn = on(IndexPut, "fp16", lambda bench: [bench.distance(), bench.distance(("between",))])
    assert fine.gradient < 0.01
    assert torn.gradient == math.inf
    assert torn.reason.startswith("RuntimeError: Index put requires")


def test_the_modules_in_order_of_suspicion() -> None:
    def rated(bench: Bench) -> Any:
        tree = bench.tree()
        return tree, bench.suspicion(tree)

    tree, suspicion = on(cases.Normalised, "bf16", rated)
    assert list(tree[""]) == ["inp", "centred", "head"]
    assert max(suspicion, key=lambda name: suspicion[name]) in ("centred", "centred.linear")
    tree, suspicion = on(cases.OnlyValidation, "fp16", rated)
    assert "check.linear" in tree
    tree, _ = on(cases.Two, "fp16", rated, fp32_modules=["one"])
    assert set(tree) == {"", "inp", "between", "two", "two.linear", "head"}


def test_statistics_of_the_real_module_stay_as_they_are() -> None:
    def states(bench: Bench) -> list[dict[str, Tensor]]:
        bench.distance()
        bench.distance(("body.0",))
        return [point.weights for point in bench.points]

    first, later = on(cases.Convolutional, "bf16", states)
    assert int(first["body.1.num_batches_tracked"]) == 0
    assert int(later["body.1.num_batches_tracked"]) == 4
    assert not torch.equal(first["head.weight"], later["head.weight"])


def test_the_modes_of_modules_are_those_of_the_step() -> None:
    """This holds in the middle of a validation, too."""
    seen: list[tuple[bool, bool]] = []

    class Frozen(cases.Mlp):
        def on_train_start(self) -> None:
            self.body.eval()

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            seen.append((self.training, self.body[3].training))
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Tensor, batch_idx: int) -> None: ...

    def measured(bench: Bench) -> int:
        before = len(seen)
        bench.distance(("body.0",))
        return len(seen) - before

    assert on(Frozen, "bf16", measured) >= 2
    assert set(seen) == {(True, False)}


def test_fp32_that_is_not_finite() -> None:
    with pytest.raises(NothingHelps, match="in fp32 the loss is not finite"):
        on(cases.NotFinite, "bf16", lambda bench: bench.distance())


def test_the_time_of_a_step() -> None:
    assert on(cases.Mlp, "bf16", lambda bench: bench.step_time_ratio(())) == pytest.approx(1, abs=0.5)
