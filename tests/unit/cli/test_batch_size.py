"""`lightning-amp batch-size`: the call of `find_batch_size`, and the exit status. Most tests replace the function."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
from support.cli_classes import Net, Rows

from lightning_amp.tune import BatchSizeResult, BatchSizes, Measurement

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # from jsonargparse, about Lightning
    pytest.mark.usefixtures("in_tmp_path"),
]

BOTH = ["--model", "support.cli_classes.Net", "--model.width", "3", "--data", "support.cli_classes.Rows"]
FINE = BatchSizeResult(1000, 3.96, 12_345.6, 0.0057, "It fits.", (Measurement(1000, 3.96, 12_345.6),))
FAILED = BatchSizeResult(0, math.nan, math.nan, None, "KeyError", (), "KeyError")


@pytest.fixture
def found(stand_in: Any) -> Any:
    return stand_in("find_batch_size", BatchSizes({"fp32": FINE}), other_process=True)


def test_the_defaults(command: Any, found: Any) -> None:
    assert command(*BOTH) == (0, str(found.outcome), "")
    (call,) = found.calls
    assert type(call.pop("make_module")()) is Net
    assert type(call.pop("make_data")()) is Rows
    assert call == {"precisions": ("fp32", "bf16"), "memory_limit_gib": None, "trainer_kwargs": {}}


def test_everything(command: Any, found: Any) -> None:
    options = ["--precisions", "fp32", "fp8", "--memory-limit-gib", "4.5", "--json", "x.json"]
    assert command(*options, *BOTH, "--trainer.accumulate_grad_batches=2")[0] == 0
    (call,) = found.calls
    assert (call["precisions"], call["memory_limit_gib"]) == (("fp32", "fp8"), 4.5)
    assert call["trainer_kwargs"] == {"accumulate_grad_batches": 2}
    assert json.loads(Path("x.json").read_text())["fp32"]["batch_size"] == 1000


def test_a_yaml(command: Any, found: Any) -> None:
    Path("config.yaml").write_text(
        "trainer: {precision: 16-mixed}\n"
        "model: {class_path: support.cli_classes.Net, init_args: {width: 4}}\n"
        "data: {class_path: support.cli_classes.Rows}\n"
    )
    status, _, err = command("--config", "config.yaml")
    assert status == 0
    assert err == (
        "lightning-amp batch-size: of --config config.yaml, trainer.precision is ignored: the precision is an option of"
        " this command\n"
    )
    assert found.calls[0]["make_module"]().hparams["width"] == 4


@pytest.mark.parametrize(
    ("outcome", "status"), [({"fp32": FINE}, 0), ({"fp32": FINE, "bf16": FAILED}, 1), ({"fp32": FAILED}, 1)]
)
def test_the_exit_status(outcome: Any, status: int, command: Any, found: Any) -> None:
    found.outcome = BatchSizes(outcome)
    assert command(*BOTH) == (status, str(found.outcome), "")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([*BOTH, "--memory-limit-gib", "much"], "argument --memory-limit-gib: invalid float value: 'much'"),
        ([*BOTH, "--precisions"], "argument --precisions: expected at least one argument"),
    ],
)
def test_wrong_use_is_one_line_before_anything_runs(arguments: list[str], line: str, command: Any, found: Any) -> None:
    status, out, err = command(*arguments)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.removeprefix("lightning-amp batch-size: ").lstrip("uU").startswith(line)
    assert found.calls == []


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (ValueError("`memory_limit_gib` must be\n given"), 2, "`memory_limit_gib` must be given"),
        (RuntimeError("Training in fp32 failed"), 2, "Training in fp32 failed"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (KeyError("broken"), 70, "this is an error of lightning-amp itself: KeyError: 'broken'."),
    ],
)
def test_errors(error: BaseException, status: int, line: str, command: Any, found: Any) -> None:
    found.outcome = error
    done, out, err = command(*BOTH)
    assert (done, out, err.count("\n")) == (status, "", 1)
    assert err.startswith(f"lightning-amp batch-size: {line}")


def test_on_a_terminal_it_is_laid_out(command: Any, found: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    _, out, _ = command(*BOTH)
    assert out.splitlines() == [
        "precision  batch size  peak memory  samples/s  learning rate to try",
        "fp32       1,000       3.96 GiB     12,300     0.0057",
        "",
        "fp32: It fits.",
    ]


@pytest.mark.slow
def test_a_process_of_its_own_says_what_is_missing(command: Any) -> None:
    """`Rows` has no `batch_size`."""
    status, out, err = command(*BOTH, "--memory-limit-gib", "1", "--trainer.accelerator", "cpu")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "must have a `batch_size`" in err
    assert "there is none." in err
