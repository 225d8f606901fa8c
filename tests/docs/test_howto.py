"""Each page of `docs/howto` is one script that runs alone, as copied, in a new folder and a new process."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
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
PRINTS = {
    "clip_fused": "steps applied",
    "two_optimizers": "steps applied",
    "keep_layer_fp32": "body gives torch.bfloat16 and head gives torch.float32",
    "evaluate_fp32": "val_mae",
    "loggers": "'amp/loss_scale'",
    "yaml": "",
    "huggingface": "the adapter is in the folder",
    "resume_16_mixed": "continued at loss scale 1024",
    "fsdp2": "2 ranks",
    "train_fp8": "blocks.0.up: fp8",
    "notebook": "steps skipped",
}
NEEDS = {
    "huggingface": [
        pytest.mark.skipif(
            any(importlib.util.find_spec(name) is None for name in ("transformers", "peft")),
            reason="needs transformers and peft",
        )
    ],
    "yaml": [pytest.mark.skipif(importlib.util.find_spec("jsonargparse") is None, reason="needs jsonargparse")],
    "train_fp8": [needs_torchao],
}
WRITES = {
    "loggers": ["logs/scale/scale_history.csv", "logs/scale.png", "logs/metrics.png", "logs/gradients.png"],
    "huggingface": ["adapter/adapter_config.json"],
}


def files_of(page: str) -> dict[str, str]:
    """The script of a page, and the configuration that it reads."""
    text = (HOWTO / f"{page}.md").read_text(encoding="utf-8")
    return {match["name"]: match["code"] for match in (*CONFIG.finditer(text), *SCRIPT.finditer(text))}


def commands_of(page: str) -> list[list[str]]:
    """The commands that the page shows for its script; without one, `python SCRIPT`."""
    script = next(name for name in files_of(page) if name.endswith(".py"))
    lines = "".join(SHELL.findall((HOWTO / f"{page}.md").read_text(encoding="utf-8"))).splitlines()
    return [shlex.split(line) for line in lines if script in line] or [["python", script]]


@pytest.mark.slow
@pytest.mark.parametrize("page", [pytest.param(page, marks=NEEDS.get(page, [])) for page in PAGES])
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
    assert len(re.findall(r"^```python$", text, re.MULTILINE)) == 1
    assert sum(name.endswith(".py") for name in files_of(page)) == 1
    assert text.startswith("# ")
    assert re.search(r"^```\{index\} \S", text, re.MULTILINE), "search words of readers"


def test_every_page_has_an_expectation() -> None:
    assert set(PRINTS) == set(PAGES)
