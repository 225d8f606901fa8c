"""Arguments that are refused before anything runs."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from lightning.pytorch.callbacks import LambdaCallback
from zoo.compared import Sea, Waves

from lightning_amp import compare_precisions
from lightning_amp.compare import _compare


@pytest.fixture(autouse=True)
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_compare, "run_in_process", lambda *_: pytest.fail("something ran"))


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"trainer_kwargs": {"precision": "16-mixed"}}, "`trainer_kwargs` must not have 'precision', which is what is"),
        ({"trainer_kwargs": {"plugins": []}}, "`trainer_kwargs` must not have 'plugins'"),
        ({"trainer_kwargs": {"max_epoch": 1}}, "got 'max_epoch'. Did you mean 'max_epochs'?"),
        ({"trainer_kwargs": {"xyz": 1}}, "got 'xyz'. It knows "),
        ({"trainer_kwargs": {"fast_dev_run": True}}, "must not have 'fast_dev_run'"),
        ({"trainer_kwargs": ["max_epochs"]}, "a mapping of the Trainer's arguments"),
        (
            {"trainer_kwargs": {"callbacks": LambdaCallback(setup=threading.Lock())}},
            "cannot be sent to another process",
        ),
        ({"trainer_kwargs": {"strategy": "ddp_spawn"}}, "whose ranks keep the results of an arm to themselves"),
        ({"trainer_kwargs": {"strategy": "ddp_fork_find_unused_parameters_true"}}, "use 'ddp'"),
        ({"dirpath": ""}, "`dirpath` must be a folder, its URL, or `None`"),
        ({"dirpath": 3}, "`dirpath` must be a folder"),
        ({"num_seeds": 0}, "`num_seeds` must be an integer of 1 or more, got 0"),
        ({"num_seeds": 2.0}, "`num_seeds` must be"),
        ({"seed": -1}, "`seed` must be an integer of 0 or more"),
        ({"seed": 2**32 - 1, "num_seeds": 3}, "`seed` must be below"),
        ({"control": "yes"}, "`control` must be `True`, `False`, or `None`"),
        ({"margins": 0.1}, "`margins` must be a mapping"),
        ({"margins": {"val_loss": -0.1}}, "finite number of 0 or more"),
        ({"margins": {"val_loss": float("nan")}}, "finite number of 0 or more"),
        ({"margins": {"val_loss": float("inf")}}, "finite number of 0 or more"),
        ({"margins": {"val_loss": True}}, "finite number of 0 or more"),
        ({"margins": {"val_loss": ("up", 0.1)}}, "finite number of 0 or more"),
        ({"margins": {"val_loss": ("min", "x")}}, "finite number of 0 or more"),
        ({"margins": {1: 0.1}}, "`margins` must be a mapping from metrics"),
        ({"dirpath": "nope://x"}, "`dirpath` must be a path or a URL of fsspec"),
    ],
)
def test_refusals(kwargs: Any, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        compare_precisions(Waves, Sea, **kwargs)
    assert message in str(caught.value)


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
