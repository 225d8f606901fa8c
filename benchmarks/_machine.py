"""The machine and the versions of a measurement; a rehearsal may not write into `docs/results`."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

import torch
from typing_extensions import final

import lightning_amp
from lightning_amp.advice._machine import device_name

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results"


@final
class Machine(NamedTuple):
    """The device and the versions of a record. Records of different machines are never compared.

    Attributes:
        device: The name of the device for people.
        versions: The versions that matter, such as `torch 2.11.0`.
        tiny: Whether it is a rehearsal (`--tiny`), whose figures mean nothing.

    """

    device: str
    versions: tuple[str, ...]
    tiny: bool = False


def machine_here(device: torch.device, *, tiny: bool) -> Machine:
    """Return the device of this machine and the versions that affect speed."""
    versions = [f"Python {platform.python_version()}", f"torch {torch.__version__}"]
    versions += [
        f"{name} {found}" for name in ("lightning", "transformers", "torchvision") if (found := installed(name))
    ]
    return Machine(device_name(device), (*versions, f"lightning_amp {lightning_amp.__version__}"), tiny)


def installed(name: str) -> str:
    """Return the version of a distribution; empty if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def why_not_there(out: Path, *, tiny: bool) -> str:
    """Return why results may not be written to a path; empty if they may."""
    if not tiny or not out.resolve().is_relative_to(RESULTS):
        return ""
    return (
        f"`--tiny` is a rehearsal, and {RESULTS.relative_to(ROOT)} is for figures that mean something; got --out {out}."
        " Next step: leave `--out` out, or name another folder."
    )
