from __future__ import annotations

import io
import sys
from typing import Any

import pytest
from tqdm import tqdm

from lightning_amp import _messages
from lightning_amp._terminal import own_lines


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
