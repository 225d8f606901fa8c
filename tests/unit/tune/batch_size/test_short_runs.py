"""The Trainer, the measurement and the error of one short training."""

from __future__ import annotations

import math
import pickle
import sysconfig
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from lightning.pytorch import Callback
from lightning.pytorch.loggers.logger import DummyLogger
from zoo.compared import Sea, Waves

from lightning_amp.compare import Run, Spec
from lightning_amp.tune.batch_size import _short_runs
from lightning_amp.tune.batch_size._learning_rate import UsedRate
from lightning_amp.tune.batch_size._probe import Facts, Probe
from lightning_amp.tune.batch_size._short_runs import ShortRuns, failure, is_out_of_memory, measurement, short_trainer


def test_the_trainer_neither_validates_nor_writes() -> None:
    probe, own = Probe("x"), Callback()
    users = {
        "accelerator": "cpu", "accumulate_grad_batches": 2, "max_epochs": 3, "max_steps": 20_000, "logger": True,
        "profiler": "pytorch", "val_check_interval": 7, "limit_train_batches": 0.1, "limit_val_batches": 9,
        "enable_checkpointing": False, "overfit_batches": 3, "callbacks": own,
    }  # fmt: skip
    made = short_trainer(users, probe)
    assert isinstance(made.pop("logger"), DummyLogger)
    assert made == {
        "accelerator": "cpu", "accumulate_grad_batches": 2, "callbacks": [own, probe], "enable_progress_bar": True,
        "limit_val_batches": 0, "max_epochs": 1000, "max_steps": 20_000, "num_sanity_val_steps": 0,
    }  # fmt: skip
    assert users["callbacks"] is own
    assert short_trainer({"limit_train_batches": 5}, probe)["limit_train_batches"] == 5
    assert short_trainer({"callbacks": [own]}, probe)["callbacks"] == [own, probe]
    pickle.dumps(short_trainer({}, probe))


def test_each_run_has_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    specs: list[Spec] = []

    def run(spec: Spec, on_progress: Any) -> Run:
        specs.append(pickle.loads(cloudpickle.dumps(spec)))
        Path(spec.folder, "facts.json").write_text('{"own_size": 3, "loader_sizes": [3], "rates": [["SGD", 1]]}')
        return Run(spec.label, spec.seed)

    monkeypatch.setattr(_short_runs, "run_in_process", run)
    runs = ShortRuns(Waves, Sea, {"accelerator": "cpu"}, tmp_path, lambda share, text: None)
    for _ in range(2):
        found, facts = runs.run(Spec("bf16", {"precision": "bf16"}), 7)
        assert facts == Facts(own_size=3, loader_sizes=(3,), rates=(UsedRate("SGD", 1),))
        assert found.label == "bf16"
    assert len({spec.folder for spec in specs}) == 2
    made: Any = specs[0]
    assert isinstance(made.make_module(), Waves)
    assert isinstance(made.make_data(), Sea)
    assert not specs[0].moved


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        ("OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", True),
        ("RuntimeError: CUDA error: out of memory", True),
        ("RuntimeError: [enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate memory", True),
        ("RuntimeError: cuDNN error: CUDNN_STATUS_ALLOC_FAILED", True),
        ("MemoryError: ", True),
        ("its process was killed by SIGKILL; on Linux that is often the kernel, out of memory", True),
        ("its process was killed by SIGSEGV", False),
        ("KeyError: 'x'", False),
        (None, False),
    ],
)
def test_out_of_memory(error: str | None, expected: bool) -> None:
    assert is_out_of_memory(Run("x", 0, error=error)) is expected


def test_speed() -> None:
    run = Run("x", 0, peak_memory_bytes=2**29, samples_per_s=(9.0, 10.0, 50.0), step_s=(2.0, 4.0, 4.0))
    assert measurement(run, Facts(batch_rows=8), 8) == (8, 0.5, 10.0)
    assert measurement(run, Facts(batch_rows=5, world_size=2), 8) == (8, 0.5, 4.0)  # rows are not the first dimension
    nothing = measurement(Run("x", 0, peak_memory_bytes=2**29), Facts(batch_rows=8), 8)
    assert math.isnan(nothing.samples_per_s)
    assert measurement(Run("x", 0, error="no"), Facts(), 8).peak_gib == math.inf


LIBRARY = f"{sysconfig.get_path('stdlib')}/runpy.py"
LOG = f"""\
Traceback (most recent call last):
  File "{_short_runs.__file__}", line 91, in run_arm
    trainer.fit(module, datamodule=data)
  File "/home/me/net.py", line 7, in training_step
    return self.helper(batch)
  File "/home/me/my helpers.py", line 12, in helper
    torch.cat(x)
  File "{LIBRARY}", line 3, in run
  File "/x/site-packages/torch/functional.py", line 3, in cat
ValueError: two
lines.
"""


def test_an_error_names_the_last_line_of_the_user() -> None:
    found = failure(Run("x", 0, error="ValueError: two\nlines.", log=LOG))
    assert found == "ValueError: two lines (/home/me/my helpers.py, line 12, in helper)"


def test_an_error_that_is_not_from_the_users_file() -> None:
    assert failure(Run("x", 0, error="its process was killed", log="")) == "its process was killed"


def test_a_module_that_a_single_device_cannot_shard_is_told_from_other_failures() -> None:
    frame = '  File "/home/me/models.py", line 14, in configure_model\n    {}\nTypeError: ...\n'
    sharding, other = (frame.format(line) for line in ("fully_shard(net, mesh=self.device_mesh['a'])", "self.net[0]"))
    assert "pass your strategy in `trainer_kwargs`" in failure(Run("x", 0, error="TypeError: ...", log=sharding))
    assert "strategy" not in failure(Run("x", 0, error="TypeError: ...", log=other))
