"""The quick part of `make projects`: nothing that differs from fp32 is ours."""

from __future__ import annotations

import pytest

from projects import all_projects
from projects.judge import judge

QUICK = sorted(p.name for p in all_projects().values() if p.quick)


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_project(name: str) -> None:
    result = judge(all_projects()[name])
    if result.skipped:
        pytest.skip(result.skipped)
    assert not result.ours, "\n".join(map(str, result.ours))
    # in an arm no warning is an error; here only those are allowed that fp32 or Lightning's own plugin gives as well
    assert not [str(f) for f in result.findings if "a warning of its own" in f.text]


def test_there_is_enough_to_look_at() -> None:
    projects = all_projects().values()
    assert len(projects) >= 60
    assert sum(p.family == "optimizers" for p in projects) + sum(p.family == "schedules" for p in projects) >= 20
    assert len(QUICK) >= 12
