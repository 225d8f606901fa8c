"""The quick part of `make projects`: no difference to fp32 may be our fault."""

from __future__ import annotations

import pytest
from zoo.registry import cases

from projects import Project, all_projects
from projects.judge import judge

PROJECTS = all_projects().values()
QUICK = cases(Project, "quick")


@pytest.mark.slow
@pytest.mark.parametrize("project", QUICK)
def test_project(project: Project) -> None:
    result = judge(project)
    if result.skipped:
        pytest.skip(result.skipped)
    assert not result.ours, "\n".join(map(str, result.ours))
    # in an arm no warning is an error; here only warnings are allowed that fp32 or Lightning's own plugin gives, too
    assert not [str(f) for f in result.findings if "a warning only with `AmpPrecision`" in f.text]


def test_there_is_enough_to_look_at() -> None:
    assert len(PROJECTS) >= 40
    assert len(QUICK) >= 10
