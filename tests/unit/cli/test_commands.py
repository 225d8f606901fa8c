"""The calls that the commands make, what they print, and their exit status. Most tests replace the function."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support.approved import assert_approved
from support.cli_classes import Net, Rows
from support.doctor_facts import machine
from support.synthetic import compared as report_of

import lightning_amp.advice
import lightning_amp.compare
import lightning_amp.tune
from lightning_amp.advice import DoctorReport
from lightning_amp.compare import CONTROL, PrecisionReport, Run
from lightning_amp.tune import BatchSizeResult, BatchSizes, Measurement, NothingHelps

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # from jsonargparse, about Lightning
    pytest.mark.usefixtures("in_tmp_path"),
]

BOTH = ["--model", "support.cli_classes.Net", "--model.width", "3", "--data", "support.cli_classes.Rows"]
SAME = [1.0, 1.1, 1.2]
WORSE = [3.0, 3.1, 3.2]

# -- compare -----------------------------------------------------------------------------------------------------------


class Compared:
    """A comparison that trains nothing."""

    def __init__(self, report: PrecisionReport, of_part: list[Run] | None = None) -> None:
        self.report, self.of_part, self.shares = report, of_part or [], list[tuple[int, int]]()

    def run(self) -> PrecisionReport:
        return self.report

    collect = run

    def run_part(self, *share: int) -> list[Run]:
        self.shares.append(share)  # type: ignore[arg-type]
        return self.of_part


FINE = report_of({"fp32": SAME, "bf16": SAME})


@pytest.fixture
def compared(stand_in: Any) -> Any:
    return stand_in("Comparison", Compared(FINE), owner=lightning_amp.compare)


def test_the_defaults(command: Any, compared: Any) -> None:
    assert command("compare", *BOTH) == (0, str(FINE), "")
    (call,) = compared.calls
    assert type(call.pop("make_module")()) is Net
    assert type(call.pop("make_data")()) is Rows
    assert call == {
        "precisions": ("fp32", "bf16", "fp16"),
        "trainer_kwargs": {},
        "seed": 0,
        "num_seeds": 1,
        "margins": {},
        "control": None,
        "dirpath": None,
        "executor": None,
    }


def test_everything(command: Any, compared: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lightning_amp.compare, "LocalDevices", dict, raising=False)
    options = ["--precisions", "fp32", "fp8", "--seeds", "3", "--seed", "5", "--control", "false", "--dirpath", "kept"]
    margins = ["--margins.val_acc", "0.001", "--margins.val/x=max:0.1", "--margins.y", "min:2"]
    options += ["--devices-at-once", "4", "--html", "x.html", "--json", "x.json"]
    assert command("compare", *options, *BOTH, "--trainer.max_epochs=2", *margins, "--model.lr", "0.5")[0] == 0
    (call,) = compared.calls
    assert call.pop("make_module")().hparams["lr"] == 0.5
    del call["make_data"]
    assert call == {
        "precisions": ("fp32", "fp8"),
        "trainer_kwargs": {"max_epochs": 2},
        "seed": 5,
        "num_seeds": 3,
        "margins": {"val_acc": 0.001, "val/x": ("max", 0.1), "y": ("min", 2.0)},
        "control": False,
        "dirpath": "kept",
        "executor": {"num": 4, "per_run": 1},
    }
    assert str(PrecisionReport.from_json("x.json")) == str(FINE)
    assert "<html" in Path("x.html").read_text()


@pytest.mark.parametrize(
    ("report", "status"),
    [
        (FINE, 0),
        (report_of({"fp32": SAME, "bf16": [0.5, 1.5, 2.5]}), 0),  # undecided
        (report_of({"fp32": SAME, "bf16": WORSE}), 1),
        (report_of({"fp32": SAME, "bf16": SAME, CONTROL: WORSE}), 0),  # a noisy reference is nothing to do
        (report_of({"fp32": SAME, "bf16": [1.0, None, 1.2]}), 1),
        (PrecisionReport(FINE.plan, list(FINE.arms["fp32"].runs)), 1),  # runs are missing
    ],
)
def test_the_exit_status(report: PrecisionReport, status: int, command: Any, compared: Any) -> None:
    compared.outcome = Compared(report)
    assert command("compare", *BOTH) == (status, str(report), "")
    assert command("compare", *BOTH, "--dirpath", "kept", "--collect") == (status, str(report), "")


WRONG = [
    *(["--precisions"], ["--precisions", "fp4"], ["--json", "."], ["--html", "."], ["--part", "1/3"], ["--collect"]),
    *(["--margins.a", wrong] for wrong in ("up:1", "max:x", '["max"]', "-1")),
    *(["--dirpath", "x", "--part", *wrong] for wrong in (["1/3", "--collect"], ["0/3"], ["4/3"], ["1/3x"])),
    ["--dirpath", "x", "--part", "1/3", "--html", "a.html"],
    *(["--devices-at-once", "0"], ["--seeds", "0"], ["--trainer.strategy", "ddp_spawn"], ["--trainer.precision=16"]),
]


def test_wrong_use_is_one_line_before_anything_runs(command: Any) -> None:
    """Arguments of Python do not appear in it."""
    texts = {}
    for arguments in WRONG:
        status, out, err = command("compare", *BOTH, *arguments)
        assert (status, out, err.count("\n")) == (2, "", 1)
        texts[" ".join(arguments)] = err
    assert_approved("refusals_lightning-amp_compare", texts)


@pytest.mark.parametrize("option", ["--seeds", "--control", "--devices-at-once"])
def test_a_value_of_another_type(option: str, command: Any) -> None:
    status, out, err = command("compare", *BOTH, option, "maybe")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"lightning-amp compare: {option}: Expected a ")


@pytest.mark.parametrize(("kind", "per_run"), [("cuda", 2), (None, 1)])
def test_runs_on_several_devices_at_once(
    kind: str | None, per_run: int, command: Any, compared: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each run gets as many accelerators as its Trainer asks for."""
    device = None if kind is None else torch.device(kind)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: device)
    monkeypatch.setattr(lightning_amp.compare, "LocalDevices", dict, raising=False)
    command("compare", *BOTH, "--trainer.devices", "2", "--trainer.strategy", "ddp", "--devices-at-once", "3")
    assert compared.calls[0]["executor"] == {"num": 3, "per_run": per_run}


@pytest.mark.parametrize(
    ("runs", "status", "out"),
    [
        ([Run("fp32", 0), Run("fp16", 0)], 0, "Part 2 of 3: 2 runs, 0 failed.\n"),
        (
            [Run("fp32", 0), Run("fp16", 1, error="out of\n memory")],
            1,
            "Part 2 of 3: 2 runs, 1 failed.\n\n- `fp16, seed 1`: out of memory\n",
        ),
        ([], 0, "Part 2 of 3: 0 runs, 0 failed.\n"),
    ],
)
def test_a_part(runs: list[Run], status: int, out: str, command: Any, compared: Any) -> None:
    """It prints no report, because the runs of the other parts may be missing."""
    compared.outcome = Compared(FINE, runs)
    assert command("compare", *BOTH, "--dirpath", "kept", "--part", "2/3") == (status, out, "")
    assert compared.outcome.shares == [(2, 3)]


# -- doctor ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("precision", "status"), [("bf16", 0), ("fp16", 1)])
def test_doctor_for_this_machine(precision: str, status: int, command: Any, stand_in: Any) -> None:
    report = DoctorReport(machine(), None, precision)
    asked = stand_in("doctor", report, owner=lightning_amp.advice)
    done = command("doctor", "--precision", "bf16", "--device", "cpu", "--json", "x.json")
    assert done == (status, report.to_markdown(), "")
    assert asked.calls == [{"precision": "bf16", "device": "cpu"}]
    assert Path("x.json").exists()


def test_doctor_for_a_module(command: Any, stand_in: Any) -> None:
    asked = stand_in("doctor", DoctorReport(machine()), owner=lightning_amp.advice)
    Path("config.yaml").write_text("seed_everything: 7\nmodel: {width: 4}\n")
    options = [*BOTH[:2], *BOTH[4:], "--config", "config.yaml", "--trainer.callbacks+=support.cli_classes.Counter"]
    assert command("doctor", *options)[0] == 0
    (call,) = asked.calls
    assert (call["make_module"]().hparams["width"], call["precision"]) == (4, "auto")
    assert type(call["trainer_kwargs"]["callbacks"][0]).__name__ == "Counter"
    assert torch.initial_seed() == 7


def test_wrong_use_of_doctor(command: Any) -> None:
    status, out, err = command("doctor", "--modell", "x")
    assert (status, out) == (2, "")
    assert err.startswith("lightning-amp doctor: unrecognized arguments: --modell x; did you mean --model?; `--help`")
    assert command("doctor", *BOTH[:4])[2].endswith("the following arguments are required: --data\n")


# -- batch-size --------------------------------------------------------------------------------------------------------

FITS = BatchSizeResult(1000, 3.96, 12_345.6, 0.0057, "It fits.", (Measurement(1000, 3.96, 12_345.6),))
FAILED = BatchSizeResult(0, math.nan, math.nan, None, "KeyError", (), "KeyError")


@pytest.mark.parametrize(("results", "status"), [({"fp32": FITS}, 0), ({"fp32": FITS, "bf16": FAILED}, 1)])
def test_batch_size(results: Any, status: int, command: Any, stand_in: Any) -> None:
    found = stand_in("find_batch_size", BatchSizes(results), owner=lightning_amp.tune)
    assert command("batch-size", *BOTH) == (status, found.outcome.to_markdown(), "")
    options = ["--precisions", "fp32", "fp8", "--memory-limit-gib", "4.5", "--json", "x.json"]
    assert command("batch-size", *options, *BOTH, "--trainer.accumulate_grad_batches=2")[0] == status
    first, second = found.calls
    assert (first["precisions"], first["memory_limit_gib"]) == (("fp32", "bf16"), None)
    assert (second["precisions"], second["memory_limit_gib"]) == (("fp32", "fp8"), 4.5)
    assert second["trainer_kwargs"] == {"accumulate_grad_batches": 2}
    assert json.loads(Path("x.json").read_text())["fp32"]["batch_size"] == 1000


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (ValueError("`memory_limit_gib` must be\n given: `memory_limit_gib=4`"), 2,
         "`--memory-limit-gib` must be given: `--memory-limit-gib 4`"),
        (RuntimeError("Training in fp32 failed"), 2, "Training in fp32 failed"),
        (PermissionError(13, "Permission denied", "kept"), 2, "[Errno 13] Permission denied: 'kept'"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("tests_are_ours")
def test_errors(error: BaseException, status: int, line: str, command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(lightning_amp.tune, "find_batch_size", raises)
    assert command("batch-size", *BOTH) == (status, "", f"lightning-amp batch-size: {line}\n")


# -- fp32-modules ------------------------------------------------------------------------------------------------------


class Rules(list[str]):
    """The part of the rules that were found that the command uses."""

    def __init__(self, *rules: str, message: str) -> None:
        super().__init__(rules)
        self.message, self.cost = message, 1.08


RULES = Rules("head", "blocks.*.norm", message="'head', 'blocks.*.norm' in fp32: fine.")
NOTHING = Rules(message="Nothing needs fp32.")


@pytest.mark.parametrize(
    ("outcome", "status", "text", "rules"),
    [
        (RULES, 1, "'head', 'blocks.*.norm' in fp32: fine.\n\n"
         '`AmpPrecision("fp16", fp32_modules=["head", "blocks.*.norm"])`\n', ["head", "blocks.*.norm"]),
        (NOTHING, 0, "Nothing needs fp32.\n", []),
        (NothingHelps("No precision can help."), 1, "No precision can help.\n", None),
    ],
)  # fmt: skip
def test_fp32_modules(outcome: Any, status: int, text: str, rules: Any, command: Any, stand_in: Any) -> None:
    searched = stand_in("find_fp32_modules", outcome, owner=lightning_amp.tune)
    assert command("fp32-modules", *BOTH, "--tolerance=1e-2", "--json", "x.json") == (status, text, "")
    (call,) = searched.calls
    assert (call["precision"], call["tolerance"]) == ("fp16", 0.01)
    assert json.loads(Path("x.json").read_text())["rules"] == rules


def test_wrong_use_of_fp32_modules(command: Any) -> None:
    assert command("fp32-modules", *BOTH)[2].endswith("the following arguments are required: --tolerance\n")
    err = command("fp32-modules", *BOTH, "--tolerance", "-1", "--trainer.accelerator", "cpu")[2]
    assert err.startswith("lightning-amp fp32-modules: `--tolerance` must be a finite number above 0")
