"""Arguments that are refused before anything runs."""

from __future__ import annotations

import math
import threading
from functools import partial
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.plugins import MixedPrecision
from support.approved import assert_refused
from zoo.compared import Sea, Waves

from lightning_amp import AmpPrecision, compare_precisions
from lightning_amp.compare import _compare


@pytest.fixture(autouse=True)
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_compare, "run_in_process", lambda *_: pytest.fail("something ran"))


class Unsendable(MixedPrecision):
    def __reduce__(self) -> Any:
        raise TypeError("I stay here")

    def __repr__(self) -> str:
        return "Unsendable()"


class Locked(L.Callback):  # cannot be pickled
    def __init__(self) -> None:
        self.lock = threading.Lock()


def needs(width: int) -> Waves:
    return Waves(width)


WRONG: list[dict[str, Any]] = [
    *({"make_module": wrong} for wrong in (needs, Waves(), "models.Waves", None, partial(needs, width=Locked()))),
    {"make_data": Sea()},
    *({"precisions": wrong} for wrong in (
        (), {}, "fp32", 16, None, {"fp32"}, ("fp32", "fp4"), ("fp32", "fp32"), ("fp32", AmpPrecision("bf16")), (True,),
        {"a": "fp32", 1: "bf16"}, {"a": "fp32", "control": "bf16"}, {"a": AmpPrecision}, {"a": 3.5},
        {"a": {"precision": "fp16", "fp32_module": ["x"]}}, {"a": {"precision": "bf16", "scaler": 8.0}},
        {"a": Unsendable("bf16-mixed", "cpu")},
    )),
    *({"trainer_kwargs": wrong} for wrong in (
        {"precision": "16-mixed"}, {"plugins": []}, {"max_epoch": 1}, {"xyz": 1}, {"fast_dev_run": True}, ["epochs"],
        {"callbacks": Locked()}, {"strategy": "ddp_spawn"}, {"strategy": "ddp_fork_find_unused_parameters_true"},
    )),
    *({"dirpath": wrong} for wrong in ("", 3, "nope://x")),
    *({"num_seeds": wrong} for wrong in (0, 2.0)),
    *({"seed": -1}, {"seed": 2**32 - 1, "num_seeds": 3}, {"control": "yes"}),
    *({"margins": wrong} for wrong in (
        0.1, {1: 0.1}, *({"val_loss": one} for one in (-0.1, math.nan, math.inf, True, ("up", 0.1), ("min", "x"))),
    )),
]  # fmt: skip


def test_refusals() -> None:
    assert_refused(
        "compare_precisions",
        lambda **wrong: compare_precisions(**{"make_module": Waves, "make_data": Sea} | wrong),
        WRONG,
    )


def test_on_several_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    with pytest.raises(RuntimeError, match="this one was started by torchrun"):
        compare_precisions(Waves, Sea)


def test_inside_of_an_arm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_AMP_ARM", "1")
    with pytest.raises(RuntimeError, match='if __name__ == "__main__":'):
        compare_precisions(Waves, Sea)


def test_without_scipy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "scipy", None)
    with pytest.raises(ModuleNotFoundError, match="pip install scipy"):
        compare_precisions(Waves, Sea, num_seeds=2)
