"""The judgement can fail: plugins that are wrong on purpose get each verdict, and a process that dies is detected."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from support import warm
from torch import Tensor, nn

from lightning_amp import AmpPrecision, DynamicLossScaler
from projects import Project, Setup
from projects.arms import Arm, Outcome, Recorder, RecorderBeforeTheStep, run
from projects.families.tutorials import Classifier, vectors
from projects.judge import AUTOCASTS, NOTE, OURS, STOCKS, WRONG, Result, judge
from projects.table import page

ROOT = Path(__file__).parents[2]


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


def test_several_optimizers_are_counted_one_by_one() -> None:
    class Two(Small):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.scale = nn.Parameter(torch.ones(()))

        def training_step(self, batch: Any, batch_idx: int) -> None:
            loss = nn.functional.cross_entropy(self.net(batch[0]) * self.scale, batch[1])
            self.log("loss", loss)
            self.manual_backward(loss)
            for optimizer in self.optimizers():
                optimizer.step()
                optimizer.zero_grad()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.net.parameters(), lr=0.1), torch.optim.SGD([self.scale], lr=0.1)

    class SkipsTheSecond(AmpPrecision):
        def optimizer_step(self, optimizer: Any, model: Any, closure: Any, **kwargs: Any) -> Any:
            if optimizer is model.trainer.optimizers[1] and self.precision == "bf16-mixed":
                return None
            return super().optimizer_step(optimizer, model, closure, **kwargs)

    assert judged(lambda: Setup(Two(), vectors(24))).steps == 6
    result = judged(lambda: Setup(Two(), vectors(24)), plugin=SkipsTheSecond)
    assert "bf16: OURS: `AmpPrecision` skips steps in 3 of 3 batches, Lightning's own plugin in 0" in ours(result)


def test_callbacks_that_change_something() -> None:
    def change(arm: Arm, outcome: Outcome) -> None:
        if arm.callbacks and arm.precision == "bf16":
            outcome.weights["net.0.bias"][0] += 1e-7

    (text,) = ours(judged(callbacks=True, change=change))
    assert text == "bf16: OURS: callbacks change it: weights (net.0.bias)"


def test_predictions_in_half_precision() -> None:
    def halves(precision: str) -> Any:
        return AmpPrecision("fp32") if precision == "fp32" else MixedPrecision("bf16-mixed", "cpu")

    (text,) = ours(judged(plugin=halves))
    assert text == "bf16: OURS: predictions are ['torch.bfloat16'] instead of ['torch.float32']"


def test_what_autocast_cannot_do_is_autocasts() -> None:
    class Writes(Small):
        def forward(self, x: Tensor) -> Tensor:
            out = torch.zeros(len(x), 4)
            out[torch.arange(len(x))] = self.net(x)  # another dtype under autocast
            return out

    result = judged(lambda: Setup(Writes(), vectors(24)))
    assert not result.ours
    assert result.verdict("bf16") == AUTOCASTS
    assert "both plugins fail" in str(result.findings[0])


def test_a_refusal_in_words_where_both_stop_is_a_note() -> None:
    class Casts(Small):
        def forward(self, x: Tensor) -> Tensor:
            x = self.net(x)
            self.weight.data = self.weight.data.to(x.dtype)
            return x @ self.weight

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))

    result = judged(lambda: Setup(Casts(), vectors(24)), precisions=("fp16",))
    assert not result.ours
    assert any(f.whose == NOTE and "both plugins raise an error" in f.text for f in result.findings)


def test_losses_that_become_nan() -> None:
    def change(arm: Arm, outcome: Outcome) -> None:
        if arm.precision == "bf16" and arm.whose in whose:
            outcome.losses[-1] = float("nan")

    whose: tuple[str, ...] = ("ours",)
    assert "bf16: OURS: the losses are: inf or NaN instead of finite" in ours(judged(change=change))
    whose = ("ours", "stock")
    result = judged(change=change)
    assert not result.ours
    assert result.verdict("bf16") == AUTOCASTS


def test_what_a_module_does_to_itself_under_both_plugins_is_not_ours() -> None:
    def change(arm: Arm, outcome: Outcome) -> None:
        if arm.precision == "bf16" and arm.whose in whose:
            outcome.structure["module net.0"].add("attribute `more`")

    whose: tuple[str, ...] = ("ours", "stock")
    assert not judged(change=change).ours
    whose = ("ours",)
    assert any("left on the user's objects" in text for text in ours(judged(change=change)))


def test_what_only_the_stock_plugin_cannot_do_is_its_own() -> None:
    def lbfgs() -> Setup:
        return Setup(Small(lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=2)), vectors(24))

    result = judge(it(lbfgs, precisions=("fp16",), look="before"), callbacks=False)
    assert not result.ours
    assert result.verdict("fp16") == STOCKS


def test_where_the_stock_plugin_fails_its_other_precision_is_the_measure() -> None:
    def change(arm: Arm, outcome: Outcome) -> None:
        if arm.whose == "stock" and arm.precision == "fp16":
            outcome.error = "RuntimeError: no"
        if arm.whose == "ours" and arm.precision == "fp16":
            outcome.losses[0] *= factor

    factor = 1.0
    result = judged(precisions=("bf16", "fp16"), change=change)
    assert not result.ours
    assert result.verdict("fp16") == STOCKS
    factor = 1.1
    found = ours(judged(precisions=("bf16", "fp16"), change=change))
    assert len(found) == 2, found  # the first loss, and all of them
    assert found[0].startswith("fp16: OURS: the relative error of the first loss is 0.09")
    assert found[0].endswith("in bf16")


def test_observations() -> None:
    class Counts(Small):
        seen: list[str]

        def on_before_zero_grad(self, optimizer: Any) -> None:
            self.seen = [*getattr(self, "seen", []), str(self.net(torch.zeros(1, 16)).dtype)]

    def counts() -> Setup:
        return Setup(Counts(), vectors(8), observe=lambda trainer, module: {"seen": module.seen, "two": 2})

    def change(arm: Arm, outcome: Outcome) -> None:
        if arm.whose == "ours" and arm.precision == "bf16":
            outcome.observed["two"] = 3

    result = judged(counts, change=change)
    assert "bf16: OURS: observed two: 3 instead of 2" in ours(result)


def test_a_project_that_is_wrong_by_itself() -> None:
    class Broken(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            raise KeyError("labels")

    result = judged(lambda: Setup(Broken(), vectors(8)))
    assert [f.whose for f in result.findings] == [WRONG]
    assert result.ours  # a fault of ours


def test_a_missing_package_is_a_row() -> None:
    result = judge(it(small, needs=("no_such_package",)))
    assert result.skipped == "`no_such_package` is missing (No module named 'no_such_package')"
    assert "not run: `no_such_package` is missing" in page([result])


SCRIPT = """
import os, time
from projects import registry, __main__ as command
from projects.families.tutorials import Classifier, vectors
from projects.registry import Project, Setup, project
from zoo.registry import entries

others = set(entries(Project))
registry.all_projects = command.all_projects = lambda: {
    name: project for name, project in entries(Project).items() if name not in others
}

class Dies(Classifier):
    def on_train_end(self):
        if self.trainer.precision == "bf16-mixed":
            os._exit(3)

@project("bad", precisions=("bf16",))
def dies():
    "Dies."
    return Setup(Dies(), vectors(16))

@project("bad", timeout_s=2)
def hangs():
    "Hangs."
    time.sleep(60)

@project("good", precisions=("bf16",))
def fine():
    "Fine."
    return Setup(Classifier(), vectors(16))

if __name__ == "__main__":
    arguments = (["--out", "page.md"], ["--only", "fine"], ["--only", "nothing"])
    print([command.main(["--fast", *more]) for more in arguments])
"""


@pytest.mark.slow
def test_a_process_that_dies_or_hangs_is_a_row(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    paths = os.pathsep.join([str(ROOT / "tests"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = warm.run_script(script, env={**os.environ, "PYTHONPATH": paths}, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "dies (0 s): bf16: OURS: the process died with exit code 3 in the arm 'ours bf16'" in done.stdout
    assert "hangs (0 s): fp32: WRONG PROJECT: not finished after 2 s in the arm 'plain fp32'" in done.stdout
    assert "good: fine" in done.stdout
    counts = "3 projects, 3 run here: 1 wrong in themselves, 1 with something that is ours, 1 without a remark."
    assert counts in (tmp_path / "page.md").read_text()
    assert done.stdout.splitlines()[-1] == "[1, 0, 2]"  # the exit statuses


def test_the_recorder_is_not_noticed() -> None:
    """Unscale, clip and step are one pass only if nothing reads gradients in between."""
    between = {"on_before_backward", "on_after_backward", "on_before_optimizer_step", "on_before_zero_grad"}
    assert not between & vars(Recorder).keys()
    assert between & vars(RecorderBeforeTheStep).keys()
