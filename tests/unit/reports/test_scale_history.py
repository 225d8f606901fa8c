from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from support.tables import scale_records

from lightning_amp.findings import StepRecord
from lightning_amp.reports import ScaleHistory


def test_keeps_only_what_changed() -> None:
    history = ScaleHistory()
    history.extend(scale_records({3: "gradient", 5: "loss"}, 100))
    assert [r.index for r in history] == [0, 3, 5, 99]
    assert (history.num_attempted, history.num_skipped, history.num_steps) == (100, 2, 98)
    assert history.summary() == (
        "2 of 100 steps skipped, 2 in the first 20, 1 of them with a non-finite loss; scale 1024 -> 512"
    )


def test_many_steps_are_small() -> None:
    """Only changes are kept, which takes a fifth of a byte per step."""
    history = ScaleHistory()
    for block in range(10):
        first = block * 10_000
        history.extend([StepRecord(first + i, 0, 1.0, 1.0, i % 1000 == 0, "gradient") for i in range(10_000)])
    assert history.num_attempted == 100_000
    assert history.num_skipped == 100
    assert len(pickle.dumps(history)) < 20_000
    assert len(pickle.dumps(history.state_dict())) < 20_000


HEADER = b"index,optimizer_idx,scale,next_scale,skipped,reason,precision\n"


@pytest.mark.parametrize(
    ("text", "where"),
    [
        (b"", "the header must be"),
        (b"a,b\n1,2\n", "the header must be"),
        (HEADER + b"0,0,1", "line 2, is not a row"),
        (HEADER + b"0,0,1.0,1.0,0,none,fp16\n1,0,1.0,1.0,1,gradie", "line 3, is not a row"),
        (HEADER + b"0,0,nan,1.0,0,none,fp16\n", "line 2, is not a row"),
        (HEADER + b"0,0,1.0,1.0,0,none,fp16\n\xff\xfe\x00", "is not a row"),
    ],
)
def test_a_broken_csv_is_named(tmp_path: Path, text: bytes, where: str) -> None:
    path = tmp_path / "broken.csv"
    path.write_bytes(text)
    with pytest.raises(ValueError, match=rf"broken\.csv.*({where})"):
        ScaleHistory.from_csv(path)


def test_an_empty_history() -> None:
    history = ScaleHistory()
    assert (len(history), list(history), history.num_attempted, history.last) == (0, [], 0, None)
    assert history.summary() == "no optimizer step was recorded"
    with pytest.raises(IndexError):
        history[0]


def test_precisions_come_back_from_a_file_and_a_checkpoint(tmp_path: Path) -> None:
    """The run was resumed in another precision."""
    history, again = ScaleHistory(), ScaleHistory()
    history.extend(StepRecord(i, 0, 8.0, 8.0, False, "none", "fp16") for i in range(6))
    history.extend(StepRecord(i, 0, 1.0, 1.0, False, "none", "bf16") for i in range(6, 16))
    assert [(r.index, r.precision) for r in history] == [(0, "fp16"), (5, "fp16"), (6, "bf16"), (15, "bf16")]
    assert history.summary() == "0 of 16 steps skipped; scale 8 -> 8"  # bf16 has none
    history.to_csv(tmp_path / "history.csv")
    assert (tmp_path / "history.csv").read_text().splitlines()[0].endswith(",reason,precision")
    assert list(ScaleHistory.from_csv(tmp_path / "history.csv")) == list(history)
    again.load_state_dict(history.state_dict())
    assert list(again) == list(history)
    (tmp_path / "history.csv").write_text((tmp_path / "history.csv").read_text().replace("bf16", "bf17"))
    with pytest.raises(ValueError, match="line 4, is not a row"):
        ScaleHistory.from_csv(tmp_path / "history.csv")
    state = history.state_dict()
    state["records"][0][-1] = "bf17"
    with pytest.raises(ValueError, match=r"ScaleHistory.records` must be the fields of a step"):
        again.load_state_dict(state)
