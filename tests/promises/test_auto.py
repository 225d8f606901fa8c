"""`"auto"` on a CPU: it measures where the CPU has bfloat16 instructions, prints one line, and chooses once for the
run.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import Toy, assert_same, batches, fit, quiet_trainer
from torch import Tensor, nn

from lightning_amp import AmpPrecision
from lightning_amp.casting import Choice, _cpu_speed

PICKED = {"bf16-fast": "bf16", "bf16-slow": "fp32", "fp16-native": "bf16", "none": "fp32"}
OnMachine = Callable[[str], None]

pytestmark = [pytest.mark.cpu, pytest.mark.filterwarnings("ignore:You defined a `validation_step` but")]


class Seen(Toy):
    """Record the dtype in which each kind of step computes."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(net=nn.Sequential(*layers, nn.Linear(8, 1)))
        self.dtypes: dict[str, torch.dtype] = {}

    def note(self, step: str, batch: Tensor) -> Tensor:
        self.dtypes[step] = self.net(batch).dtype
        return self.loss(batch)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.note("fit", batch)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.note("validate", batch)

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.note("test", batch)

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.note("predict", batch)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [message for message in caplog.messages if message.startswith("lightning_amp:")]
    caplog.clear()
    return found


@pytest.fixture
def fast(on_machine: OnMachine) -> None:
    on_machine("bf16-fast")


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the list of later measurements, in order, for the machine that the test then runs on."""
    kinds: list[str] = []
    real = _cpu_speed.measure_cpu_speed

    def measure(precision: Any, kind: Any, **kwargs: Any) -> Any:
        kinds.append(kind)
        return real(precision, kind, **kwargs)

    monkeypatch.setattr(_cpu_speed, "measure_cpu_speed", measure)
    _cpu_speed.cpu_speed.cache_clear()
    return kinds


@pytest.mark.parametrize("run", ["fit", "validate", "test", "predict"])
def test_each_kind_of_run_computes_in_it_and_says_why(
    run: str, machine: str, measured: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    plugin, module = AmpPrecision(eval_precision="auto"), Seen()
    getattr(quiet_trainer(plugins=[plugin]), run)(module, batches(2))
    choice = Choice.of(PICKED[machine])
    assert plugin.dtype == choice.dtype
    assert module.dtypes[run] == choice.dtype
    (line,) = lines(caplog)
    assert line.startswith(f"lightning_amp: precision 'auto' is '{choice.name}' here (")
    ratio = {"bf16-fast": "10.0x as fast", "bf16-slow": "1.79x as slow", "fp16-native": "8.0x as fast"}
    assert (f"bf16 products run {ratio[machine]} as fp32 (" in line) if machine in ratio else ("run" not in line)
    assert measured == (["products"] if machine in ratio else [])


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_a_precision_that_was_asked_for_is_never_measured(
    precision: str, machine: str, measured: list[str], recwarn: pytest.WarningsRecorder
) -> None:
    plugin, module = AmpPrecision(precision), Seen(nn.Unflatten(1, (1, 8)), nn.Conv1d(1, 1, 3, padding=1), nn.Flatten())
    trainer = quiet_trainer(plugins=[plugin])
    trainer.fit(module, batches(2), batches(1))
    trainer.validate(module, batches(1), verbose=False)
    assert set(module.dtypes.values()) == {Choice.of(precision).dtype}
    assert measured == []
    assert not [str(w.message) for w in recwarn if "lightning_amp" in str(w.message)]


def test_evaluation_alone_may_be_auto(on_machine: OnMachine) -> None:
    for name in ("bf16-slow", "bf16-fast"):
        on_machine(name)
        module = Seen()
        quiet_trainer(plugins=[AmpPrecision("fp16", eval_precision="auto")]).fit(module, batches(1), batches(1))
        assert module.dtypes == {"fit": torch.float16, "validate": Choice.of(PICKED[name]).dtype}


def test_convolutions_are_measured_for_a_module_that_has_one_and_each_kind_once(
    fast: None, measured: list[str]
) -> None:
    for layers, expected in (
        ((), ["products"]),
        ((nn.Unflatten(1, (1, 8)), nn.Conv1d(1, 1, 3, padding=1), nn.Flatten()), ["products", "convolutions"]),
        ((), ["products", "convolutions"]),
    ):
        fit(lambda layers=layers: Seen(*layers), AmpPrecision())  # type: ignore[misc]
        assert measured == expected


def test_nothing_is_measured_before_a_trainer_attaches(fast: None, measured: list[str]) -> None:
    plugin = AmpPrecision(eval_precision="auto")
    trainer = quiet_trainer(plugins=[plugin])
    assert (plugin.precision, trainer.precision, measured) == ("bf16-mixed", "bf16-mixed", [])


def test_the_real_probe_changes_no_bit_of_the_run(on_machine: OnMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    on_machine("real")
    monkeypatch.setattr("lightning_amp._compat._torch.cpu_capabilities", lambda: {"avx512_bf16": True})
    plugin = AmpPrecision()
    found = fit(Toy, plugin)
    assert_same(found, fit(Toy, AmpPrecision("fp32" if plugin.precision == "32-true" else "bf16")))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda plugin: pickle.loads(pickle.dumps(plugin))])
def test_a_copy_picks_for_itself(copied: Callable[[Any], Any], on_machine: OnMachine) -> None:
    on_machine("bf16-slow")
    plugin = AmpPrecision()
    for _ in range(2):  # before and after it was attached
        module = Seen()
        quiet_trainer(plugins=[copied(plugin)]).fit(module, batches(1))
        assert module.dtypes == {"fit": torch.float32}
        quiet_trainer(plugins=[plugin]).fit(Seen(), batches(1))


def test_a_compiled_module_computes_in_it(on_machine: OnMachine) -> None:
    for name in ("bf16-fast", "bf16-slow"):
        on_machine(name)
        module = Seen()
        module.net.compile(backend="aot_eager")
        quiet_trainer(plugins=[AmpPrecision()]).fit(module, batches(2))
        assert module.dtypes["fit"] == Choice.of(PICKED[name]).dtype


def test_a_resumed_run_and_what_follows_it_stay_in_the_precision_of_the_checkpoint(
    on_machine: OnMachine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "slow.ckpt"
    on_machine("bf16-fast")
    fit(Seen, AmpPrecision()).save_checkpoint(path)
    on_machine("bf16-slow")
    caplog.set_level("INFO")
    lines(caplog)
    plugin, module = AmpPrecision(eval_precision="auto"), Seen()
    trainer = quiet_trainer(plugins=[plugin], max_epochs=2)
    trainer.fit(module, batches(2), batches(1), ckpt_path=path)
    assert module.dtypes == {"fit": torch.bfloat16, "validate": torch.bfloat16}
    said = lines(caplog)
    assert len(said) == 2
    assert "the run of the checkpoint is in 'bf16'; it goes on in 'bf16', although 'auto' is 'fp32' here" in said[1]
    trainer.validate(module, batches(1), verbose=False)
    assert module.dtypes["validate"] == torch.bfloat16
    trainer.save_checkpoint(tmp_path / "again.ckpt")
    entry = torch.load(tmp_path / "again.ckpt", weights_only=True)["AmpPrecision"]
    assert (entry["precision"], entry["began_in"]) == ("bf16", "bf16")
    for again in (plugin, copy.deepcopy(plugin)):  # another Trainer that resumes nothing
        quiet_trainer(plugins=[again]).fit(module, batches(1))
        assert module.dtypes["fit"] == torch.float32
