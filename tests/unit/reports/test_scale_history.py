from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_amp.reports import ScaleHistory
from lightning_amp.scaling import StepRecord


def run(overflows: dict[int, str], steps: int, first: int = 0, scale: float = 1024.0) -> list[StepRecord]:
    records: list[StepRecord] = []
    for index in range(first, first + steps):
        reason = overflows.get(index, "none")
        next_scale = scale / 2 if reason == "gradient" else scale
        records.append(StepRecord(index, 0, scale, next_scale, reason != "none", reason))  # type: ignore[arg-type]
        scale = next_scale
    return records


def test_keeps_only_what_changed() -> None:
    history = ScaleHistory()
    history.extend(run({3: "gradient", 5: "loss"}, 100))
    assert [r.index for r in history] == [0, 3, 5, 99]
    assert (history.num_attempted, history.num_skipped, history.num_steps) == (100, 2, 98)
    assert history.summary() == (
        "2 of 100 steps skipped, 2 in the first 20, 1 of them with a non-finite loss; scale 1024 -> 512"
    )


def test_a_million_steps_are_small() -> None:
    history = ScaleHistory()
    for block in range(100):
        first = block * 10_000
        history.extend([StepRecord(first + i, 0, 1.0, 1.0, i % 1000 == 0, "gradient") for i in range(10_000)])
    assert history.num_attempted == 1_000_000
    assert history.num_skipped == 1000
    assert len(pickle.dumps(history)) < 200_000
    assert len(pickle.dumps(history.state_dict())) < 200_000


def test_csv_round_trip(tmp_path: Path) -> None:
    history = ScaleHistory()
    history.extend(run({3: "gradient", 5: "loss"}, 50))
    history.to_csv(tmp_path / "new" / "history.csv")
    assert list(ScaleHistory.from_csv(tmp_path / "new" / "history.csv")) == list(history)
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["history.csv"]


HEADER = b"index,optimizer_idx,scale,next_scale,skipped,reason\n"


@pytest.mark.parametrize(
    ("text", "where"),
    [
        (b"", "its header must be"),
        (b"a,b\n1,2\n", "its header must be"),
        (HEADER + b"0,0,1", "line 2, is not a row"),
        (HEADER + b"0,0,1.0,1.0,0,none\n1,0,1.0,1.0,1,gradie", "line 3, is not a row"),
        (HEADER + b"0,0,nan,1.0,0,none\n", "line 2, is not a row"),
        (HEADER + b"0,0,1.0,-1.0,0,none\n", "line 2, is not a row"),
        (HEADER + b"5,0,1.0,1.0,0,none\n4,0,1.0,1.0,0,none\n", "line 3, is not a row"),
        (HEADER + b"0,0,1.0,1.0,0,none\n\xff\xfe\x00", "is not text|is not a row"),
    ],
)
def test_a_broken_csv_is_named(tmp_path: Path, text: bytes, where: str) -> None:
    path = tmp_path / "broken.csv"
    path.write_bytes(text)
    with pytest.raises(ValueError, match=rf"broken\.csv.*({where})"):
        ScaleHistory.from_csv(path)


def test_continues_from_a_checkpoint(tmp_path: Path) -> None:
    whole, head, tail = ScaleHistory(), ScaleHistory(), ScaleHistory()
    records = run({3: "gradient", 25: "gradient"}, 40)
    whole.extend(records)
    head.extend(records[:20])
    torch.save(head.state_dict(), tmp_path / "state.pt")
    tail.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    tail.extend(records[20:])
    assert list(tail) == list(whole)


def test_an_empty_history() -> None:
    history = ScaleHistory()
    assert (len(history), list(history), history.num_attempted, history.last) == (0, [], 0, None)
    assert history.summary() == "no optimizer step was recorded"
    assert repr(history) == "ScaleHistory(0 records: no optimizer step was recorded)"
    with pytest.raises(IndexError):
        history[0]


def test_index_and_repr() -> None:
    history = ScaleHistory()
    history.extend(run({3: "gradient", 5: "loss"}, 2000))
    records = list(history)
    assert [history[i] for i in range(-4, 4)] == [records[i] for i in range(-4, 4)]
    assert (history[1].index, history[-1].index, history[-1]) == (3, 1999, history.last)
    assert history[1:3] == records[1:3]
    assert history[::-1] == records[::-1]
    with pytest.raises(IndexError, match=r"history\[4\].*4 records"):
        history[4]
    assert repr(history) == f"ScaleHistory(4 records: {history.summary()})"
    one = ScaleHistory()
    one.extend(run({}, 1))
    assert repr(one).startswith("ScaleHistory(1 record: 0 of 1 steps skipped; scale 1024 ")


@pytest.mark.parametrize("steps", [0, 50])
def test_plot(tmp_path: Path, steps: int) -> None:
    history = ScaleHistory()
    history.extend(run({3: "gradient", 5: "loss"}, steps))
    figure = history.plot(tmp_path / "scale.png")
    assert (tmp_path / "scale.png").stat().st_size > 5000
    if steps:  # flat between the changes, and a fall where one was
        x, y = figure.axes[0].lines[0].get_data()
        assert [(a, b) for a, b in zip(x, y, strict=True)][:6] == [
            (0, 1024.0), (1, 1024.0), (1, 1024.0), (3, 1024.0), (4, 1024.0), (4, 512.0),
        ]  # fmt: skip
    labels = {line.get_label() for line in figure.axes[0].lines}
    assert ("skipped: gradients overflowed (1)" in labels) == bool(steps)


def test_plot_without_a_step_has_no_axes_of_nothing() -> None:
    axes: Any = ScaleHistory().plot().axes[0]
    assert [text.get_text() for text in axes.texts] == ["no optimizer step was taken"]
    assert list(axes.get_xticks()) == list(axes.get_yticks()) == []


@pytest.mark.parametrize("steps", [1, 500, 12_345])
def test_plot_of_a_constant_scale_has_powers_of_two_and_round_steps(steps: int) -> None:
    history = ScaleHistory()
    history.extend(StepRecord(i, 0, 2.0**16, 2.0**16, skipped=False, reason="none") for i in range(steps))
    axes: Any = history.plot().axes[0]
    axes.figure.canvas.draw()
    assert "2^{16}" in " ".join(label.get_text() for label in axes.get_yticklabels())
    ticks = [label.get_text() for label in axes.get_xticklabels()]
    unit = int(ticks[2].replace(",", "")) - int(ticks[1].replace(",", "")) if len(ticks) > 2 else 1
    assert str(unit).strip("0") in ("1", "2", "5")


def test_plot_of_thousands_of_skips_keeps_the_line_in_sight() -> None:
    def records() -> Iterator[StepRecord]:
        scale = 2.0**16
        for i in range(4000):
            new = scale / 2 if i % 2 else scale * 2
            yield StepRecord(i, 0, scale, new, skipped=bool(i % 2), reason="gradient" if i % 2 else "none")
            scale = new

    history = ScaleHistory()
    history.extend(records())
    figure: Any = history.plot()
    marks = [line for line in figure.axes[0].lines if line.get_marker() != "None"]
    assert [line.get_label() for line in marks] == ["skipped: gradients overflowed (2,000)"]
    assert marks[0].get_markersize() <= 2
    assert all(len(line) <= 90 for line in figure.axes[0].get_title().splitlines())
