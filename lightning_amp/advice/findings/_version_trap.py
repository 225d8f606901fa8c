"""`version-trap`: an installed version has a fault. Each entry of the table has the symptom and the remedy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from packaging.specifiers import SpecifierSet

from lightning_amp.advice._machine import Machine, Trap
from lightning_amp.advice._record import Step
from lightning_amp.advice.findings._finding import Finding

_TRAPS: dict[str, tuple[Trap, ...]] = {
    "": (
        Trap(
            "torch",
            "<2.9",
            "`torch.compile` runs the backward under autocast, so that gradients of regions in fp32 are rounded to half"
            " precision; torch 2.9 has a switch against it, which this package sets",
            "https://github.com/pytorch/pytorch/issues/153044",
            "torch.compile",
        ),
        Trap(
            "lightning",
            "<2.6.6",
            "`load_from_checkpoint` runs code that a checkpoint names, `weights_only=True` or not (CVE-2026-58659);"
            " load other people's checkpoints with 2.6.6",
            "docs/guide/versions.md",
        ),
        Trap(
            "torchao",
            "<0.18",
            "this is too old for fp8, which needs torchao 0.18",
            "docs/guide/fp8.md",
            "fp8",
        ),
    ),
    "cuda": (
        Trap(
            "torch",
            ">=2.12",
            "autocast computes `rms_norm` in fp32 even if its input and weight are bf16, and compiled modules then keep"
            " separate casts around it; where weights are bf16, compute it inside `torch.autocast(enabled=False)`",
            "https://github.com/pytorch/pytorch/issues/188955",
            "torch.compile",
        ),
    ),
    "cpu": (
        Trap(
            "torch",
            ">=2.13,<2.14",
            "some convolutions in bf16 (large kernels with dilation, groups in channels_last) are 4 to 16 times as slow"
            " on CPUs as in torch 2.12. If yours are, keep them in `fp32_modules`",
            "https://github.com/pytorch/pytorch/issues/183815",
            "convolutions",
        ),
        Trap(
            "torch",
            "<2.9",
            "FSDP2 on CPUs (gloo) adds gradients up where it should average them;"
            " `module.set_force_sum_reduction_for_comms(True)` after `fully_shard` fixes it",
            "docs/guide/versions.md, measured",
            "FSDP2",
        ),
    ),
}
"""Faults by type of device; the empty type stands for all devices.

Here `version` is a version specifier, such as `<2.9`.
"""


def known_traps(versions: Mapping[str, str], device_type: str) -> tuple[Trap, ...]:
    """Return the faults of the installed versions, given by package, on a type of device."""
    return tuple(
        replace(trap, version=versions[trap.package])
        for trap in (*_TRAPS[""], *_TRAPS.get(device_type, ()))
        if trap.package in versions
        and SpecifierSet(trap.version, prereleases=True).contains(versions[trap.package].split("+")[0])
    )


def version_trap(machine: Machine, step: Step | None) -> Iterator[Finding]:
    """Yield each fault; with a step, only the faults that concern the step."""
    for trap in machine.traps:
        has_convolutions = step is not None and step.recorded.convolution_flops
        if step is None or not trap.concerns or (trap.concerns == "convolutions" and has_convolutions):
            text = f"{trap.package} {trap.version}: {trap.text}."
            yield Finding("note", "version-trap", text, f"Read {trap.source}, and see whether it concerns you.")
