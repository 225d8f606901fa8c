"""The judgement can fail: plugins that are wrong on purpose get each verdict."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_amp import AmpPrecision, DynamicLossScaler
from projects import Project, Setup
from projects.arms import Arm, Outcome, Recorder, RecorderBeforeTheStep, run
from projects.families.tutorials import Classifier, vectors
from projects.judge import OURS, STOCKS, Result, judge
from projects.table import page


class Small(Classifier):
    def __init__(self, optimizer: Any = None) -> None:
        super().__init__(optimizer or (lambda p: torch.optim.SGD(p, lr=0.05)))
        self.net = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 4))


def small() -> Setup:
    return Setup(Small(), vectors(24), vectors(8), predict=vectors(8))


def it(make: Callable[[], Setup], **settings: Any) -> Project:
    return Project(name="it", family="tests", make=make, what="what it is", **settings)


def judged(
    make: Callable[[], Setup] = small,
    plugin: Callable[[str], Any] | None = None,
    precisions: tuple[str, ...] = ("bf16",),
    callbacks: bool = False,
    change: Callable[[Arm, Outcome], None] = lambda arm, outcome: None,
) -> Result:
    """Run with another plugin in the place of ours, or with another outcome."""

    def run_it(project: Project, arm: Arm) -> Outcome:
        wrong = plugin(arm.precision) if plugin is not None and arm.whose == "ours" else None
        outcome = run(project, arm, plugin=wrong)
        change(arm, outcome)
        return outcome

    return judge(it(make, precisions=precisions), callbacks, run_it)


def ours(result: Result) -> list[str]:
    return [str(f) for f in result.findings if f.whose == OURS]


def test_nothing_is_found_where_nothing_is_wrong() -> None:
    result = judged(precisions=("bf16", "fp16"), callbacks=True)
    assert not result.findings, result.findings
    assert result.same_bits_as_stock == {"bf16": True, "fp16": True}
    for errors in result.errors.values():
        assert 0 < errors["ours"].gradient == errors["stock"].gradient < 0.02
        assert 0 < errors["ours"].losses == errors["stock"].losses < 0.02
        assert errors["ours"].applied == result.steps == 3
    assert result.stock_predicts_half
    assert not result.ours_predicts_half


class Doubled(AmpPrecision):
    def pre_backward(self, tensor: Tensor, module: Any) -> Tensor:
        return super().pre_backward(tensor * (2 if self.precision == "bf16-mixed" else 1), module)


def test_gradients_that_are_wrong() -> None:
    result = judged(plugin=Doubled)
    assert any("error of the first step's gradient is 1," in text for text in ours(result)), result.findings
    assert result.verdict("bf16") == OURS
    assert result.verdict("fp32") == "ok"


class NotQuiteFp32(AmpPrecision):
    def pre_backward(self, tensor: Tensor, module: Any) -> Tensor:
        return super().pre_backward(tensor * (1 + 2**-22), module)


def test_fp32_is_exact() -> None:
    (text,) = ours(judged(plugin=NotQuiteFp32, precisions=()))
    assert "fp32: OURS: is not plain fp32: weights (net.0.weight" in text


class LeavesAHook(AmpPrecision):
    def convert_module(self, module: nn.Module) -> nn.Module:
        module.net[0].register_forward_hook(lambda *args: None)
        module.net[2].forward = module.net[2].forward
        return super().convert_module(module)


def test_what_is_left_on_the_users_objects() -> None:
    (text,) = ours(judged(plugin=LeavesAHook))
    assert text == (
        "fp32, bf16: OURS: left on the user's objects: module net.0 has 1 _forward_hooks;"
        " module net.2 has attribute `forward`"
    )


class Crashes(AmpPrecision):
    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        if self.precision == "bf16-mixed":
            raise RuntimeError("it is full")
        return super().optimizer_step(*args, **kwargs)


def test_a_crash_is_ours_where_the_stock_plugin_runs() -> None:
    result = judged(plugin=Crashes)
    assert ours(result) == ["bf16: OURS: fails: RuntimeError: it is full (Lightning's own plugin: runs)"]
    assert "fails" in page([result])


def test_skipped_steps() -> None:
    def wasteful(precision: str) -> Any:
        scaler = DynamicLossScaler(init_scale=2.0**24, backoff_factor=0.99) if precision == "fp16" else None
        return AmpPrecision(precision, scaler=scaler)

    assert any("skips steps in 3 of 3" in text for text in ours(judged(plugin=wasteful, precisions=("fp16",))))


def test_callbacks_that_change_something() -> None:
    def change(arm: Arm, outcome: Outcome) -> None:
        if arm.callbacks and arm.precision == "bf16":
            outcome.weights["net.0.bias"][0] += 1e-7

    (text,) = ours(judged(callbacks=True, change=change))
    assert text == "bf16: OURS: callbacks change it: weights (net.0.bias)"


def test_what_only_the_stock_plugin_cannot_do_is_its_own() -> None:
    def lbfgs() -> Setup:
        return Setup(Small(lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=2)), vectors(24))

    result = judge(it(lbfgs, precisions=("fp16",), look="before"), callbacks=False)
    assert not result.ours
    assert result.verdict("fp16") == STOCKS


def test_a_missing_package_is_a_row() -> None:
    result = judge(it(small, needs=("no_such_package",)))
    assert result.skipped == "`no_such_package` is missing (No module named 'no_such_package')"
    assert "not run: `no_such_package` is missing" in page([result])


def test_the_recorder_is_not_noticed() -> None:
    """Unscale, clip and step are one pass only if nothing reads gradients in between."""
    between = {"on_before_backward", "on_after_backward", "on_before_optimizer_step", "on_before_zero_grad"}
    assert not between & vars(Recorder).keys()
    assert between & vars(RecorderBeforeTheStep).keys()
