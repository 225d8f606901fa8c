"""The audit of the pinned versions fails for a known vulnerability, and for no other answer of PyPI or failure to
answer.
"""

from __future__ import annotations

import json
from typing import Any

from check_pins import judge

FOUND = {"id": "PYSEC-2099-1", "fix_versions": ["3.1.7"], "aliases": ["CVE-2099-1"], "description": "Bad."}
BAD: dict[str, Any] = {"name": "jinja2", "version": "3.1.6", "vulns": [FOUND]}
GOOD: dict[str, Any] = {"name": "tqdm", "version": "4.70.1", "vulns": []}
UNKNOWN: dict[str, Any] = {"name": "torch", "skip_reason": "Dependency not found on PyPI: torch (2.13.0)"}


def report(*pins: dict[str, Any]) -> str:
    return json.dumps({"dependencies": pins, "fixes": []})


def test_a_known_vulnerability_fails_and_says_what_to_do() -> None:
    text, failed = judge(report(BAD, GOOD), "", {})
    assert failed
    assert "jinja2 3.1.6: CVE-2099-1, PYSEC-2099-1, fixed in 3.1.7" in text
    assert "constraints.txt" in text


def test_one_that_is_ignored_does_not() -> None:
    for name in ("PYSEC-2099-1", "CVE-2099-1"):
        assert judge(report(BAD, GOOD), "", {name: "a reason"}) == (
            "2 pins audited, 1 known vulnerabilities ignored.",
            False,
        )


def test_no_answer_at_all_is_said_and_does_not_fail() -> None:
    down = "Traceback ...\nrequests.exceptions.ProxyError: HTTPSConnectionPool(host='pypi.org', port=443)"
    for printed, complaints in ((report(UNKNOWN), ""), ("", down)):
        text, failed = judge(printed, complaints, {})
        assert not failed
        assert "The pins were NOT audited" in text


def test_a_mistake_of_ours_fails() -> None:
    text, failed = judge("", "ERROR: requirement Jinja2 is not pinned to an exact version", {})
    assert failed
    assert "not pinned" in text
