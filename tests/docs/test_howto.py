"""Each page of `docs/howto` is one script that runs alone, as copied, in a new folder and a new process.

The page about many devices has several scripts, and commands of job arrays.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed.run
from support import warm
from support.fp8 import needs_torchao

HOWTO = Path(__file__).parents[2] / "docs" / "howto"
PAGES = sorted(path.stem for path in HOWTO.glob("*.md") if path.stem != "index")
SCRIPT = re.compile(r"^```python\n# (?P<name>\w+\.py)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
CONFIG = re.compile(r"`(?P<name>\w+\.yaml)`:\n\n```yaml\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
SHELL = re.compile(r"^```bash\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HOWTO.parents[1])}
MANY_DEVICES = "compare_many_devices"
PRINTS = {
    "clip_fused": "steps applied",
    "two_optimizers": "steps applied",
    "keep_layer_fp32": "body gives torch.bfloat16 and head gives torch.float32",
    "input_gradients": "fp16: gradient norm 0.456",
    "fft_complex": "fp16 6 steps applied, 2 skipped",
    "unscale_fp16_gradients": "MixedPrecision raises: Attempting to unscale FP16 gradients.",
    "bf16_weights": "loaded as torch.bfloat16",
    "evaluate_fp32": "val_mae",
    "loggers": "'amp/loss_scale'",
    "yaml": "",
    "huggingface": "the adapter is in the folder",
    "resume_16_mixed": "continued at loss scale 1024",
    "fsdp2": "2 ranks",
    "fabric": "steps applied",
    "own_loop": "steps applied",
    "train_fp8": "blocks.0.up: fp8",
    "notebook": "steps skipped",
    "pytorch_lightning": "16 steps applied",
}
NEEDS = {
    "huggingface": [
        pytest.mark.skipif(
            any(importlib.util.find_spec(name) is None for name in ("transformers", "peft")),
            reason="needs transformers and peft",
        )
    ],
    "bf16_weights": [pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")],
    "yaml": [pytest.mark.skipif(importlib.util.find_spec("jsonargparse") is None, reason="needs jsonargparse")],
    "train_fp8": [needs_torchao],
    "pytorch_lightning": [
        pytest.mark.skipif(importlib.util.find_spec("pytorch_lightning") is None, reason="needs pytorch_lightning")
    ],
}
WRITES = {
    "fabric": ["checkpoint.ckpt"],
    "own_loop": ["checkpoint.pt"],
    "loggers": ["logs/scale/scale_history.csv", "logs/scale.png", "logs/metrics.png", "logs/gradients.png"],
    "huggingface": ["adapter/adapter_config.json"],
}


def files_of(page: str) -> dict[str, str]:
    """The script of a page, and the configuration that it reads."""
    text = (HOWTO / f"{page}.md").read_text(encoding="utf-8")
    return {match["name"]: match["code"] for match in (*CONFIG.finditer(text), *SCRIPT.finditer(text))}


def scripts_of(page: str) -> list[str]:
    return [name for name in files_of(page) if name.endswith(".py")]


def commands_of(page: str) -> list[list[str]]:
    """The commands that the page shows for its script; without one, `python SCRIPT`."""
    script = scripts_of(page)[0]
    lines = "".join(SHELL.findall((HOWTO / f"{page}.md").read_text(encoding="utf-8"))).splitlines()
    return [shlex.split(line) for line in lines if script in line] or [["python", script]]


@pytest.mark.slow
@pytest.mark.parametrize("page", [pytest.param(page, marks=NEEDS.get(page, [])) for page in PRINTS])
def test_the_script_runs_as_copied(page: str, tmp_path: Path) -> None:
    for name, text in files_of(page).items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    for program, *arguments in commands_of(page):
        if program == "torchrun":
            command = [torch.distributed.run.__file__, "--standalone", arguments[0], *warm.as_ranks(), *arguments[1:]]
        else:
            command = arguments
        done = warm.run_script(*command, cwd=tmp_path, env=ONE_THREAD)
        assert done.returncode == 0, done.stdout + done.stderr
        assert PRINTS[page] in done.stdout, done.stdout
    assert [name for name in WRITES.get(page, []) if not (tmp_path / name).is_file()] == []


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_one_whole_script(page: str) -> None:
    text = (HOWTO / f"{page}.md").read_text(encoding="utf-8")
    num_scripts = 3 if page == MANY_DEVICES else 1
    assert len(re.findall(r"^```python$", text, re.MULTILINE)) == num_scripts
    assert len(scripts_of(page)) == num_scripts
    assert text.startswith("# ")
    assert re.search(r"^```\{index\} \S", text, re.MULTILINE), "search words of readers"


def test_every_page_has_an_expectation() -> None:
    assert {*PRINTS, MANY_DEVICES} == set(PAGES)


# -- comparisons on many devices ---------------------------------------------------------------------------------------

MANY_DEVICES_SHELL = [
    block
    for block in SHELL.findall((HOWTO / f"{MANY_DEVICES}.md").read_text(encoding="utf-8"))
    if not block.startswith("pip ")
]


def with_scripts(folder: Path) -> Path:
    """Fill a folder with the scripts of the page, with fewer runs, and a command `lightning-amp`."""
    for name, text in files_of(MANY_DEVICES).items():
        fewer = text.replace("num_seeds=3", "num_seeds=1").replace('"max_epochs": 2', '"max_epochs": 1')
        (folder / name).write_text(fewer, encoding="utf-8")
    command = folder / "bin" / "lightning-amp"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m lightning_amp "$@"\n', encoding="utf-8")
    command.chmod(0o755)
    return folder


def in_shell(text: str, folder: Path, **environment: str) -> str:
    fewer = text.replace("--seeds 3", "--seeds 1").replace("max_epochs 2", "max_epochs 1")
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    env = {**ONE_THREAD, "PATH": path, **environment}
    command = ["bash", "-c", fewer]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def bits_of(folder: Path) -> dict[str, list[list[float]]]:
    """The steps, the training losses and the metrics of each run that is kept, without the times."""
    bits: dict[str, list[list[float]]] = {}
    for path in (folder / "comparison").glob("*-seed*.json"):
        run = json.loads(path.read_text(encoding="utf-8"))["run"]
        bits[path.stem] = [[step, value] for step, _, value in (*run["loss"], *run["curves"]["val_loss"])]
    return bits


@pytest.fixture(scope="module")
def bits_in_order(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[list[float]]]:
    """The bits of the same comparison without an executor."""
    folder = with_scripts(tmp_path_factory.mktemp("in_order"))
    script = 'from compare import compare\n\nif __name__ == "__main__":\n    compare(None)\n'
    (folder / "in_order.py").write_text(script, encoding="utf-8")
    done = warm.run_script("in_order.py", cwd=folder, env=ONE_THREAD)
    assert done.returncode == 0, done.stdout + done.stderr
    bits = bits_of(folder)
    assert sorted(bits) == ["bf16-seed0", "fp32-seed0"]
    return bits


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "package"),
    [("compare.py", "torch"), ("compare_slurm.py", "submitit"), ("compare_dask.py", "distributed")],
)
def test_an_executor_gives_the_bits_of_runs_in_order(
    script: str, package: str, tmp_path: Path, bits_in_order: dict[str, list[list[float]]]
) -> None:
    pytest.importorskip(package)
    done = warm.run_script(script, cwd=with_scripts(tmp_path), env=ONE_THREAD)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "`Regression` on `Squares`" in done.stdout
    assert bits_of(tmp_path) == bits_in_order


@pytest.mark.slow
def test_the_command_trains_on_several_devices(tmp_path: Path, bits_in_order: dict[str, list[list[float]]]) -> None:
    pytest.importorskip("jsonargparse")
    assert "| bf16 |" in in_shell(MANY_DEVICES_SHELL[0], with_scripts(tmp_path))
    assert bits_of(tmp_path) == bits_in_order


@pytest.mark.slow
def test_a_job_array_and_its_collection(tmp_path: Path, bits_in_order: dict[str, list[list[float]]]) -> None:
    pytest.importorskip("jsonargparse")
    _, job, collect = MANY_DEVICES_SHELL
    with_scripts(tmp_path)
    for number in "21":  # in any order
        printed = in_shell(job.replace("/9", "/2"), tmp_path, SLURM_ARRAY_TASK_ID=number)
        assert f"Part {number} of 2: 1 run, 0 failed." in printed
    assert "missing" not in in_shell(collect, tmp_path)
    assert (tmp_path / "report.html").is_file()
    assert bits_of(tmp_path) == bits_in_order


def test_the_page_about_many_devices_has_three_commands() -> None:
    options = ("--devices-at-once", "--part", "--collect")
    found = [[option for option in options if option in block] for block in MANY_DEVICES_SHELL]
    assert found == [[option] for option in options]
