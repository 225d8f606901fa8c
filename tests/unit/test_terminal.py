from __future__ import annotations

import io
import logging
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from lightning_utilities.core import rank_zero as rank_zero_module
from tqdm import tqdm

from lightning_amp import _messages
from lightning_amp._terminal import own_lines


class Redirected(io.StringIO):
    """The object with which rich replaces `sys.stderr`."""

    def __init__(self, real: Any) -> None:
        super().__init__()
        self.rich_proxied_file = real


@pytest.fixture
def handler(monkeypatch: pytest.MonkeyPatch) -> Iterator[logging.StreamHandler[Any]]:
    """Add a handler that existed before the redirection, like Lightning's own, and remove all others."""
    handler = logging.StreamHandler(io.StringIO())
    logger: logging.Logger | None = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    monkeypatch.setattr(rank_zero_module, "log", logger)  # `import pytorch_lightning` adds its own
    monkeypatch.setattr(rank_zero_only, "rank", 0, raising=False)
    monkeypatch.setattr(logging.root.manager, "disable", logging.NOTSET)
    while logger is not None and logger.name != "lightning":
        monkeypatch.setattr(logger, "disabled", False)
        monkeypatch.setattr(logger, "propagate", logger.name != "lightning.pytorch")
        monkeypatch.setattr(logger, "level", logging.INFO)
        logger._cache.clear()  # type: ignore[attr-defined]
        logger = logger.parent
    logger = logging.getLogger("lightning.pytorch")
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


@pytest.mark.parametrize("fails", [False, True])
def test_a_log_is_led_to_who_redirects(
    handler: logging.StreamHandler[Any], fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = handler.stream
    monkeypatch.setattr(sys, "stderr", Redirected(real))
    _messages.info("a report")
    assert (sys.stderr.getvalue(), real.getvalue()) == ("a report\n", "")  # type: ignore[attr-defined]
    if fails:
        with pytest.raises(KeyError), own_lines():
            raise KeyError
    assert handler.stream is real


def test_other_streams_are_left_alone(handler: logging.StreamHandler[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Redirected(io.StringIO()))
    _messages.info("a report")
    assert handler.stream.getvalue() == "a report\n"


def test_a_bar_is_cleared_and_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(sys, "stderr", out)
    with tqdm(total=3, file=out, ascii=True, ncols=40, mininterval=0) as bar:
        bar.update()
        with own_lines():
            out.write("a report\n")
    before, after = out.getvalue().split("a report\n")
    assert before.endswith(" \r")  # erased
    assert "1/3" in after


@pytest.mark.parametrize("say", [_messages.warn, _messages.warn_on_this_rank])
def test_warnings_name_who_warns(say: Any) -> None:
    with pytest.warns(UserWarning, match="look here") as caught:
        say("look here")
    assert caught[0].filename == __file__
