"""Versions with known traps."""

from __future__ import annotations

from lightning_amp.profiling._traps import _TABLE, known_traps


def concerns(device_type: str = "cpu", **versions: str) -> list[tuple[str, str]]:
    return [(trap.package, trap.concerns) for trap in known_traps(versions, device_type)]


def test_only_what_is_installed_is_told() -> None:
    assert concerns() == []
    assert concerns(torch="2.12.0+cpu") == []
    assert concerns(torch="2.13.0+cpu") == [("torch", "convolutions")]
    assert concerns(torch="2.13.1") == [("torch", "convolutions")]
    assert concerns("cuda", torch="2.13.0") == [("torch", "torch.compile")]
    assert concerns(torch="2.8.0") == [("torch", "torch.compile"), ("torch", "FSDP2")]
    assert concerns(lightning="2.6.1") == [("lightning", "")]
    assert concerns(lightning="2.6.6") == []


def test_a_nightly_build_counts_as_its_version() -> None:
    assert concerns(torch="2.13.0.dev20260512+cpu") == []  # before 2.13
    assert concerns(torch="2.13.0a0+git1234") == []


def test_each_has_a_source_and_says_what_to_do() -> None:
    for known in _TABLE:
        assert known.source.startswith(("https://github.com/", "docs/guide/"))
        assert len(known.text) > 30


def test_what_concerns_all_devices_concerns_any() -> None:
    assert [trap.package for trap in known_traps({"lightning": "2.6.0"}, "npu")] == ["lightning"]
    assert known_traps({"torch": "2.13.0"}, "npu") == ()
