"""Views read from the original and keep attributes that are set on them; silent loggers write nothing."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
from support import Recorder

from lightning_amp import AmpPrecision
from lightning_amp.shadow._views import NOTHING, View, replaying


class Target:
    size = 3

    def __init__(self) -> None:
        self.name = "real"

    @property
    def title(self) -> str:
        return f"the {self.name} one"

    def method(self) -> str:
        return self.title


def test_a_view_reads_from_its_target_and_keeps_what_is_set() -> None:
    target = Target()
    view: Any = View(target, extra=1)
    view.name = "mine"
    target.late = "seen"  # type: ignore[attr-defined]
    assert (view.name, target.name, view.size, view.extra, view.late) == ("mine", "real", 3, 1, "seen")
    assert isinstance(view, Target)
    assert type(view) is View
    assert copy.deepcopy([view])[0] is view
    with pytest.raises(AttributeError, match="'Target' object has no attribute 'nothing'"):
        _ = view.nothing


def test_properties_are_those_of_the_view_and_methods_those_of_the_target() -> None:
    view: Any = View(Target(), name="other")
    assert (view.title, view.method()) == ("the other one", "the real one")


def test_a_silent_logger_looks_like_the_real_one_and_writes_nothing() -> None:
    logger = Recorder()
    silent: Any = View(logger, is_silent=True)
    assert isinstance(silent, Recorder)
    assert silent.name == logger.name
    silent.log_metrics({"a": 1.0}, step=0)
    silent.experiment.add_scalar("a", 1.0)
    silent.experiment.append("call")
    assert logger.rows == logger.calls == []
    assert copy.deepcopy(silent) is silent


def test_nothing_takes_everything() -> None:
    nothing: Any = NOTHING
    nothing.attribute = nothing["item"] = 1
    with nothing.start(run=3) as inside:
        assert inside is nothing.deeper()[0].still is nothing
    assert list(nothing) == []
    assert not nothing
    with pytest.raises(AttributeError):
        copy.copy(nothing).__array__  # noqa: B018


def test_a_replay_does_not_move_the_scale_of_derivatives() -> None:
    plugin = AmpPrecision("fp16", scaler=64.0)
    view = replaying(plugin, clip_gradients=None)
    assert view.scaled_grad.func == plugin.scaled_grad
    assert view.scaled_grad.keywords == {"learn": False}
    assert view.clip_gradients is None
    assert not hasattr(replaying(SimpleNamespace()), "scaled_grad")  # of another plugin
