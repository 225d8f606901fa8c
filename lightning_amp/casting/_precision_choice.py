"""Choose the precision: parse the user's spelling, list what a device can run, and pick one for `"auto"`."""

from __future__ import annotations

import difflib
import importlib.util
import platform
import warnings
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch

from lightning_amp._compat import _torch
from lightning_amp._text import literal
from lightning_amp.casting._float8 import has_fp8

Precision = Literal["auto", "bf16", "fp16", "fp8", "fp32"]
Canonical = Literal["16-mixed", "bf16-mixed", "32-true"]

_LEGAL: dict[Any, Precision] = {
    **{name: name for name in get_args(Precision)},
    **dict.fromkeys(("bf16-mixed", torch.bfloat16), "bf16"),
    **dict.fromkeys(("16-mixed", 16, torch.float16), "fp16"),
    **dict.fromkeys(("32-true", 32, torch.float32), "fp32"),
}
_SPELLINGS: dict[str, Precision] = {
    text: name for legal, name in _LEGAL.items() for text in (str(legal), str(legal).removeprefix("torch."))
}
"""Our name for each legal value as text: `"torch.float16"`, `"float16"` and `"16"`, too."""
_MEANT: dict[str, Precision] = {**_SPELLINGS, "half": "fp16", "float8_e4m3fn": "fp8", "64": "fp32", "float64": "fp32"}
"""Our name for what a user may have meant by an unknown spelling that is close to one of these."""


class Choice(NamedTuple):
    """A chosen precision: our name, Lightning's name, and the dtype in which autocast computes."""

    name: str
    canonical: Canonical
    dtype: torch.dtype

    @property
    def mixed(self) -> bool:
        """Return whether autocast is on."""
        return self.name != "fp32"

    @classmethod
    def of(cls, name: str) -> Choice:
        """Return the choice for one of our names other than `"auto"`."""
        return _CHOICES[name]

    @classmethod
    def pick(cls, device: torch.device) -> tuple[Choice, str]:
        """Pick the precision for `"auto"` on this device, and give the reason in one sentence.

        It depends on facts about the device only, so each process of a machine makes the same choice.
        """
        name, why = _best_on_cpu() if device.type == "cpu" else _best_on_accelerator(device)
        return cls.of(name), why

    def require(self, device: torch.device, argument: str = "precision", *, emulated: bool = False) -> None:
        """Raise a `ValueError` if the device cannot run this precision. The error names the precisions that it can run.

        `argument` is the argument that requested it. With `emulated`, an fp8 recipe needs no fp8 hardware.
        """
        names = runnable(device)
        if self.name not in names and not (emulated and "bf16" in names):
            first = "" if importlib.util.find_spec("torchao") else "install torchao, which is missing, and "
            emulate = f" To try fp8's accuracy without its speed, {first}pass an `fp8_recipe` with `emulate=True`."
            raise ValueError(
                f"This device ({_describe(device)}) cannot run {argument} {self.name!r}. It can run:"
                f" {', '.join(map(repr, names))}. lightning_amp never falls back in silence; choose one of these."
                f"{emulate if self.name == 'fp8' else ''}"
            )


_CHOICES = {
    "bf16": Choice("bf16", "bf16-mixed", torch.bfloat16),
    "fp16": Choice("fp16", "16-mixed", torch.float16),
    "fp8": Choice("fp8", "bf16-mixed", torch.bfloat16),
    "fp32": Choice("fp32", "32-true", torch.float32),
}


def our_name(spelling: str) -> str:
    """Return our name for a spelling such as Lightning's `"bf16-mixed"`; return an unknown spelling unchanged."""
    return _SPELLINGS.get(spelling, spelling)


def parse_precision(value: Any, argument: str = "precision") -> Precision:
    """Return our name for any spelling of a precision; raise a `ValueError` with the legal values if it is none.

    The error suggests the precision whose spelling is closest.
    """
    text = value if isinstance(value, str) else ""  # also a member of an `Enum` of strings
    if isinstance(value, (int, torch.dtype)) and not isinstance(value, bool):
        text = str(value)
    known = _SPELLINGS.get(text)
    if known is None:
        legal = [repr(name) for name in _LEGAL if (name, argument) != ("fp8", "eval_precision")]
        raise ValueError(
            f"`{argument}` must be one of {', '.join(legal)}; got {literal(value)}.{_meant(text.lower(), argument)}"
        )
    if known == "fp8" and argument == "eval_precision":
        raise ValueError(
            "`eval_precision='fp8'` is not supported: fp8 is for training, where its products are a third of the work."
            " Leave it out: with precision 'fp8', evaluation runs in 'bf16'."
        )
    return known


def _meant(text: str, argument: str) -> str:
    """Return a sentence with the precision that the user may have meant; empty if none is close."""
    if text in ("16-true", "bf16-true"):
        return (
            f" Half-precision weights are Lightning's `HalfPrecision`, `Trainer(precision={text!r})` without a plugin;"
            f" most small updates of such weights are rounded away. {our_name(text.replace('true', 'mixed'))!r} keeps"
            " float32 weights."
        )
    known = [spelling for spelling, name in _MEANT.items() if (name, argument) != ("fp8", "eval_precision")]
    closest = difflib.get_close_matches(text.removeprefix("torch.").removesuffix("-mixed"), known, 1)
    return f" Did you mean {_MEANT[closest[0]]!r}?" if closest else ""


def runnable(device: torch.device) -> list[str]:
    """Return our names of the precisions that this device runs; fp8 only if it has matrix units for it."""
    half = [name for name in ("bf16", "fp16") if _autocast_runs(device, _CHOICES[name].dtype)]
    return [*half, *(["fp8"] if "bf16" in half and has_fp8(device) else []), "fp32"]


def has_bf16_units(device: torch.device) -> bool:
    """Return whether this CUDA device has instructions for bfloat16 products.

    Torch's own check covers the current device only.
    """
    return torch.version.hip is not None or torch.cuda.get_device_capability(device)[0] >= 8


def cpu_has(name: str) -> list[str]:
    """Return the CPU's instructions for `"bf16"` or `"fp16"`, such as AMX or AVX512-BF16; empty if it emulates them."""
    return [feature for feature, value in _torch.cpu_capabilities().items() if name in feature and value]


def is_amd() -> bool:
    """Return whether AMD made this CPU; `False` if the vendor is unknown."""
    cpuinfo = Path("/proc/cpuinfo")
    vendor = cpuinfo.read_text(errors="replace") if cpuinfo.exists() else platform.processor()
    return "AuthenticAMD" in vendor


def _best_on_cpu() -> tuple[str, str]:
    found = cpu_has("bf16")
    if "avx512_bf16" in found and "amx_bf16" not in found and not is_amd():
        return "fp32", "this CPU has avx512_bf16 but no amx_bf16, and is not AMD's: it would train more slowly in bf16"
    if found:
        return "bf16", f"this CPU has bfloat16 instructions: {', '.join(found)}"
    return "fp32", "this CPU has no bfloat16 instructions"


def _best_on_accelerator(device: torch.device) -> tuple[str, str]:
    names, here = runnable(device), _describe(device)
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        if "bf16" in names and has_bf16_units(device):
            return "bf16", f"{here} computes in bfloat16 natively"
        if major >= 7 and "fp16" in names:
            return "fp16", f"{here} has float16 but no bfloat16 matrix units (sm_{major}{minor})"
        return "fp32", f"{here} has no half-precision matrix units (sm_{major}{minor})"
    if "bf16" in names:
        return "bf16", f"{here} runs bfloat16 autocast"
    return names[0], f"it is the lowest precision that {here} runs"


def _autocast_runs(device: torch.device, dtype: torch.dtype) -> bool:
    if not torch.amp.is_autocast_available(device.type):
        return False
    index = None if device.type == "cpu" else device.index
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        try:  # where the current device cannot, autocast warns and turns itself off, or it raises
            with torch.accelerator.device_index(index), torch.autocast(device.type, dtype=dtype):
                return torch.is_autocast_enabled(device.type)
        except RuntimeError:
            return False


def _describe(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
