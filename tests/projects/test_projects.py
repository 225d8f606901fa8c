"""No difference to fp32 may be our fault: in `make projects` of any project, in `make test-all` of the quick ones."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest

from projects import Project, all_projects
from projects.judge import judge

FOLDER = os.environ.get("LIGHTNING_AMP_PROJECTS", "")
"""Where `make projects` collects the results for the page."""
PROJECTS = all_projects().values()


@pytest.mark.slow
@pytest.mark.parametrize(
    "project",
    [
        pytest.param(project, id=f"{project.family}-{project.name}", marks=pytest.mark.timeout(project.timeout_s))
        for project in PROJECTS
        if FOLDER or "quick" in project.tags
    ],
)
def test_project(project: Project) -> None:
    result = judge(project)
    if FOLDER:
        Path(FOLDER, f"{project.name}.pickle").write_bytes(pickle.dumps(result))
    if result.skipped:
        pytest.skip(result.skipped)
    assert not result.ours, "\n".join(map(str, result.ours))
    # in an arm no warning is an error; here only warnings are allowed that fp32 or Lightning's own plugin gives, too
    assert not [str(f) for f in result.findings if "a warning only with `AmpPrecision`" in f.text and not FOLDER]


def test_there_is_enough_to_look_at() -> None:
    assert len(PROJECTS) >= 40
    assert len([project for project in PROJECTS if "quick" in project.tags]) >= 10
