"""`version-trap`: an installed version has a fault. One entry each: what goes wrong, what to do, and the source."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from packaging.specifiers import SpecifierSet
from typing_extensions import final

from lightning_amp.advice._machine import Concern, Machine, Trap
from lightning_amp.advice._record import Step
from lightning_amp.advice.findings._finding import Finding


@final
class _Known(NamedTuple):
    package: str
    versions: str
    devices: tuple[str, ...]
    """Types; empty: all."""
    text: str
    source: str
    concerns: Concern = ""


_TABLE = (
    _Known(
        "torch",
        "<2.9",
        (),
        "`torch.compile` runs the backward under autocast, so that gradients of regions in fp32 are rounded to half"
        " precision; torch 2.9 has a switch against it, which this package sets",
        "https://github.com/pytorch/pytorch/issues/153044",
        "torch.compile",
    ),
    _Known(
        "torch",
        ">=2.12",
        ("cuda",),
        "autocast computes `rms_norm` in fp32 even if its input and weight are bf16, and compiled modules then keep"
        " separate casts around it; where weights are bf16, compute it inside `torch.autocast(enabled=False)`",
        "https://github.com/pytorch/pytorch/issues/188955",
        "torch.compile",
    ),
    _Known(
        "torch",
        ">=2.13,<2.14",
        ("cpu",),
        "some convolutions in bf16 (large kernels with dilation, groups in channels_last) are 4 to 16 times as slow on"
        " CPUs as in torch 2.12; if yours are, keep them in `fp32_modules`",
        "https://github.com/pytorch/pytorch/issues/183815",
        "convolutions",
    ),
    _Known(
        "torch",
        "<2.9",
        ("cpu",),
        "FSDP2 on CPUs (gloo) adds gradients up where it should average them;"
        " `module.set_force_sum_reduction_for_comms(True)` after `fully_shard` mends it",
        "docs/guide/versions.md, measured",
        "FSDP2",
    ),
    _Known(
        "lightning",
        "<2.6.6",
        (),
        "`load_from_checkpoint` runs code that a checkpoint names, `weights_only=True` or not (CVE-2026-58659); load"
        " other people's checkpoints with 2.6.6",
        "docs/guide/versions.md",
    ),
    _Known(
        "torchao",
        "<0.18",
        (),
        "this is too old for fp8, which needs torchao 0.18",
        "docs/guide/fp8.md",
        "fp8",
    ),
)


def known_traps(versions: Mapping[str, str], device_type: str) -> tuple[Trap, ...]:
    """Return the traps of the installed versions (by package) on a type of device."""
    return tuple(
        Trap(known.package, versions[known.package], known.text, known.source, known.concerns)
        for known in _TABLE
        if known.package in versions
        and (not known.devices or device_type in known.devices)
        and SpecifierSet(known.versions, prereleases=True).contains(versions[known.package].split("+")[0])
    )


def version_trap(machine: Machine, step: Step | None) -> Iterator[Finding]:
    """Yield each trap; beside a step only the traps that concern it."""
    for trap in machine.traps:
        if step is not None and trap.concerns == "convolutions" and not step.recorded.convolution_flops:
            continue
        if step is not None and trap.concerns not in ("", "convolutions"):
            continue
        text = f"{trap.package} {trap.version}: {trap.text}."
        yield Finding("note", "version-trap", text, f"Read {trap.source}, and see whether it concerns you.")
