"""What is public: the names of `lightning_amp`, and that importing them is light."""

from __future__ import annotations

import ast
import subprocess
import sys

from support.source import ROOT

import lightning_amp


def test_every_public_name_works_and_nothing_else_is_public() -> None:
    contract = {
        "AmpPrecision", "FSDPAmpPrecision", "DynamicLossScaler", "StepRecord", "ScaleMonitor", "MetricComparison",
        "OverflowLocator", "GradientMonitor", "compare_precisions", "PrecisionReport", "__version__",
    }  # fmt: skip
    public = set(lightning_amp.__all__)
    assert public <= contract
    folders = {p.stem for p in ROOT.iterdir() if not p.name.startswith("_")}
    assert all(getattr(lightning_amp, name).__doc__ for name in public)
    assert {n for n in dir(lightning_amp) if not n.startswith("_")} - folders == public - {"__version__"}
    assert {n for n in vars(lightning_amp) if not n.startswith("_")} - folders == public - {"__version__"}
    assert not hasattr(lightning_amp, "fp4")


def test_what_is_imported_when_it_is_asked_for_is_there_before() -> None:
    code = "import lightning_amp as a, sys; assert 'lightning_amp.comparison' not in sys.modules; print(dir(a))"
    names = ast.literal_eval(
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    )
    assert set(lightning_amp.__all__) <= set(names)


def test_the_citation_has_this_version() -> None:
    citation = (ROOT.parent / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {lightning_amp.__version__}\n" in citation


def test_import_is_light() -> None:
    """No plotting, no CLI, no distributed start-up on import; the cost in time is measured by tests/benchmarks."""
    heavy = ("matplotlib", "jsonargparse", "rich", "sklearn", "transformers", "torchao", "torch._dynamo.eval_frame")
    heavy = (*heavy, "scipy", "jinja2", "lightning_amp.comparison", "lightning_amp.cli")
    before = "import sys, lightning.pytorch; before = set(sys.modules)"
    code = f"{before}; import lightning_amp; print(sorted(set(sys.modules) - before))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    new = ast.literal_eval(out.strip().splitlines()[-1])
    assert [m for m in new if m.startswith(heavy)] == []
