"""The names of Lightning come from one file, and from the kind that the process has chosen."""

from __future__ import annotations

import ast
import os
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
from support import warm

import lightning_amp
from lightning_amp._compat import _names
from lightning_amp.cli._configs import use_kind

SCRIPT = """
import sys
kind, ckpt_path, saved = sys.argv[1:]
if kind == "pytorch_lightning":
    import pytorch_lightning as L
    from lightning_amp.pytorch_lightning import AmpPrecision, GradientMonitor, ScaleMonitor
else:
    import lightning as L
    from lightning_amp import AmpPrecision, GradientMonitor, ScaleMonitor
import torch

torch.manual_seed(0)

class Line(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.line = torch.nn.Linear(4, 1)
    def training_step(self, batch, batch_idx):
        return self.line(batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

plugin, monitor = AmpPrecision("fp16"), ScaleMonitor()
how = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
trainer = L.Trainer(plugins=[plugin], callbacks=[monitor, GradientMonitor()], max_epochs=2 if ckpt_path else 1, **how)
trainer.fit(Line(), torch.utils.data.DataLoader(torch.ones(6, 4)), ckpt_path=ckpt_path or None)
trainer.save_checkpoint(saved)
assert kind in {base.__module__.split(".")[0] for base in type(plugin).__mro__}
print(plugin.num_steps, monitor.history.num_attempted)
"""
KINDS = ["lightning", "pytorch_lightning"]
ENV = {**os.environ, "PYTHONPATH": str(Path(lightning_amp.__file__).parents[1])}


def equal_versions() -> bool:
    found = {tuple(d.version for d in metadata.distributions(name=name)) for name in ("lightning", "pytorch-lightning")}
    return len(found) == 1


@pytest.mark.slow
@pytest.mark.skipif(not equal_versions(), reason="needs pytorch_lightning in the version of lightning")
@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_of_one_kind_is_resumed_in_the_other(kind: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    printed: list[str] = []
    for number, name in enumerate([kind, *(other for other in KINDS if other != kind)]):
        saved, ckpt_path = tmp_path / f"{number}.ckpt", tmp_path / f"{number - 1}.ckpt" if number else ""
        done = warm.run_script(tmp_path / "script.py", name, str(ckpt_path), str(saved), cwd=Path.cwd(), env=ENV)
        assert done.returncode == 0, done.stdout + done.stderr
        printed.append(done.stdout.splitlines()[-1])
    assert printed == ["6 6", "12 12"]


def test_each_name_is_declared_twice() -> None:
    """For type checkers, which need imports, and for the import at run time."""
    tree = ast.parse(Path(_names.__file__).read_text(encoding="utf-8"))
    declared = {
        alias.asname or alias.name: (node.module, alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module.startswith("lightning.")
        for alias in node.names
    }
    assert declared == {name: (f"lightning.{module}", own) for name, (module, own) in _names._PLACES.items()}


def test_the_second_kind_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_names, "_chosen", "pytorch_lightning")
    with pytest.raises(ImportError, match="already uses `lightning_amp` with `pytorch_lightning`"):
        lightning_amp.__getattr__("AmpPrecision")
    assert lightning_amp.__getattr__("StepRecord").__name__ == "StepRecord"


@pytest.mark.parametrize("version", [None, "2.4.0"])
def test_a_missing_or_another_version_is_refused(version: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"lightning": "2.6.6", "pytorch-lightning": version}
    listed = lambda name: [SimpleNamespace(version=found[name])] if found[name] else []  # noqa: E731
    monkeypatch.setattr(metadata, "distributions", listed)
    monkeypatch.setattr(_names, "_chosen", None)
    with pytest.raises(ImportError, match=f"it is {version or 'not installed'}. Run `pip install pytorch-li.*==2.6.6`"):
        _names.use("pytorch_lightning")
    assert _names._chosen is None


@pytest.mark.skipif(not equal_versions(), reason="needs pytorch_lightning in the version of lightning")
@pytest.mark.parametrize("given", [["--model", "{}"], ["--model={}"], ['--config={{"model": {{"class_path": "{}"}}}}']])
@pytest.mark.parametrize("module", ["lightning.pytorch", "pytorch_lightning"])
def test_a_command_takes_the_kind_of_the_module(given: list[str], module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_names, "_chosen", None)
    use_kind([part.format(f"{module}.LightningModule") for part in given])
    assert _names._chosen == module.partition(".")[0]
