"""`lightning_amp` exports exactly its public names, and importing it is cheap."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import lightning_amp

REPOSITORY = Path(__file__).parents[2]


def printed_by(code: str) -> str:
    """Run code in a process that does not unload torch and Lightning at its end (1.5 s); return its output."""
    whole = f"{code}\nimport os\nsys.stdout.flush()\nos._exit(0)"
    return subprocess.run([sys.executable, "-c", whole], capture_output=True, text=True, check=True).stdout


def test_every_public_name_works_and_nothing_else_is_public() -> None:
    contract = {
        "AmpPrecision", "FSDPAmpPrecision", "DynamicLossScaler", "StepRecord", "ScaleMonitor", "MetricComparison",
        "OverflowLocator", "GradientMonitor", "compare_precisions", "PrecisionReport", "find_batch_size",
        "find_fp32_modules", "doctor", "LocalDevices", "FabricAmpPrecision", "__version__",
    }  # fmt: skip
    public = set(lightning_amp.__all__)
    assert public <= contract
    assert all(getattr(lightning_amp, name).__doc__ for name in public)
    folders = {p.name for p in (REPOSITORY / "lightning_amp").iterdir() if p.is_dir() and not p.name.startswith("_")}
    for names in (dir(lightning_amp), vars(lightning_amp)):
        assert {n for n in names if not n.startswith("_")} - folders == public - {"__version__"}
    assert all(getattr(lightning_amp, folder).__doc__ for folder in folders)
    assert not hasattr(lightning_amp, "Trainer")
    for name, folder in (("ScaledSteps", "scaling"), ("fp32_region", "precision"), ("scaled_grad", "precision")):
        with pytest.raises(ImportError, match=f"write `from lightning_amp.{folder} import {name}`"):
            exec(f"from lightning_amp import {name}")


def test_the_citation_has_this_version() -> None:
    citation = (REPOSITORY / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {lightning_amp.__version__}\n" in citation


@pytest.mark.slow
def test_a_public_name_and_a_room_are_imported_when_they_are_asked_for() -> None:
    """`lightning-amp scale` and others only read files, so they must not import Lightning."""
    code = (
        "import sys, lightning_amp; print('torch' in sys.modules)\n"
        "import lightning_amp.reports; print('lightning.pytorch' in sys.modules)\n"
        "print(lightning_amp.StepRecord.__name__, 'lightning.pytorch' in sys.modules)\n"
        "print(lightning_amp.precision.scaled_grad.__name__, lightning_amp.AmpPrecision.__name__)"
    )
    assert printed_by(code).splitlines() == ["False", "False", "StepRecord False", "scaled_grad AmpPrecision"]


@pytest.mark.slow
def test_import_is_light() -> None:
    """Importing every public name loads no plotting, CLI or distributed package."""
    heavy = ("matplotlib", "jsonargparse", "rich", "sklearn", "transformers", "torchao", "torch._dynamo.eval_frame")
    heavy = (*heavy, "scipy", "jinja2", "lightning_amp.compare", "lightning_amp.tune")
    heavy = (*heavy, "lightning_amp.advice", "lightning_amp.cli")
    whole = {"LocalDevices", "PrecisionReport", "compare_precisions", "doctor", "find_batch_size", "find_fp32_modules"}
    training = ", ".join(set(lightning_amp.__all__) - whole)
    before = "import sys, lightning.pytorch; before = set(sys.modules)"
    code = f"{before}; from lightning_amp import {training}; print(sorted(set(sys.modules) - before))"
    new = ast.literal_eval(printed_by(code).strip().splitlines()[-1])
    assert [m for m in new if m.startswith(heavy)] == []
