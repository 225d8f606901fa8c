"""Choose the precision: parse the user's spelling, list what a device can run, and pick one for `"auto"`."""

from __future__ import annotations

import warnings
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import nn

from lightning_amp._compat import _modules, _torch
from lightning_amp.casting._cpu_speed import ProbeKind, cpu_speed
from lightning_amp.casting._float8_recipes import has_fp8, refuse_later_formats
from lightning_amp.measure import SpeedComparison

Precision = Literal["auto", "bf16", "fp16", "fp8", "fp32"]
Canonical = Literal["16-mixed", "bf16-mixed", "32-true"]

_ALSO: dict[Precision, tuple[Any, ...]] = {
    "bf16": ("bf16-mixed", "bfloat16", "torch.bfloat16", torch.bfloat16),
    "fp16": ("16-mixed", "16", 16, "float16", "torch.float16", torch.float16),
    "fp32": ("32-true", "32", 32, "float32", "torch.float32", torch.float32),
}
_SPELLINGS: dict[Any, Precision] = {
    **{name: name for name in get_args(Precision)},
    **{spelling: name for name, spellings in _ALSO.items() for spelling in spellings},
}
_DTYPES: dict[str, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.bfloat16,
    "fp32": torch.float32,
}
_CANONICAL: dict[str, Canonical] = {"bf16": "bf16-mixed", "fp16": "16-mixed", "fp8": "bf16-mixed", "fp32": "32-true"}


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
        return cls(name, _CANONICAL[name], _DTYPES[name])

    @classmethod
    def by_instructions(cls, device: torch.device) -> tuple[Choice, str]:
        """Return the best precision for which this device has instructions, and the reason in one sentence."""
        names = runnable(device)
        here = _describe(device)
        if device.type == "cuda":
            major, minor = torch.cuda.get_device_capability(device)
            if "bf16" in names and has_bf16_units(device):
                return cls.of("bf16"), f"{here} computes in bfloat16 natively"
            if major >= 7 and "fp16" in names:
                return cls.of("fp16"), f"{here} has float16 but no bfloat16 matrix units (sm_{major}{minor})"
            return cls.of("fp32"), f"{here} has no half-precision matrix units (sm_{major}{minor})"
        if device.type == "cpu":
            if cpu_has("bf16"):
                return cls.of("bf16"), "this CPU has bfloat16 instructions"
            return cls.of("fp32"), "this CPU has no bfloat16 instructions"
        if "bf16" in names:
            return cls.of("bf16"), f"{here} runs bfloat16 autocast"
        return cls.of(names[0]), f"it is the lowest precision that {here} runs"

    @classmethod
    def pick(cls, device: torch.device, module: nn.Module | None = None) -> tuple[Choice, str]:
        """Pick the precision for `"auto"` for this module on this device, and give the reason in one sentence.

        A CPU with bfloat16 instructions is measured once per process, because some run bf16 slower than fp32. A CPU
        without them gets fp32 unmeasured, because torch converts each value there before and after it computes in fp32.
        """
        choice, why = cls.by_instructions(device)
        if device.type != "cpu" or choice.name != "bf16":
            return choice, why
        kinds: list[ProbeKind] = ["products"]
        if module is not None and _modules.has_convolutions(module):
            kinds.append("convolutions")
        speeds: dict[ProbeKind, SpeedComparison] = {
            kind: speed for kind in kinds if (speed := cpu_speed("bf16", kind)) is not None
        }
        slower = [_say_speed(kind, speed) for kind, speed in speeds.items() if speed.claim == "slower"]
        if slower:
            return cls.of("fp32"), "; ".join(slower)
        return choice, "; ".join([why, *(_say_speed(kind, speed) for kind, speed in speeds.items())])

    def require(self, device: torch.device, argument: str = "precision", *, emulated: bool = False) -> None:
        """Raise a `ValueError` if the device cannot run this precision. The error names the precisions that it can run.

        `argument` is the argument that requested it. With `emulated`, an fp8 recipe needs no fp8 hardware.
        """
        names = runnable(device)
        if self.name not in names and not (emulated and "bf16" in names):
            raise ValueError(
                f"This device ({_describe(device)}) cannot run {argument} {self.name!r}. It can run:"
                f" {', '.join(repr(n) for n in names)}. lightning_amp never falls back in silence; choose one of these."
                f"{_EMULATE if self.name == 'fp8' else ''}"
            )


def our_name(spelling: str) -> str:
    """Return our name for a spelling such as Lightning's `"bf16-mixed"`; return an unknown spelling unchanged."""
    return _SPELLINGS.get(spelling, spelling)


def parse_precision(value: Any, argument: str = "precision") -> Precision:
    """Return our name for any spelling of a precision; raise a `ValueError` with the legal spellings if it is none."""
    try:
        known = None if isinstance(value, bool) else _SPELLINGS.get(value)
    except TypeError:  # unhashable
        known = None
    if known is None:
        refuse_later_formats(argument, value)
        raise ValueError(f"`{argument}` must be one of {_legal(argument)}; got {value!r}.")
    if known == "fp8" and argument == "eval_precision":
        raise ValueError(
            "`eval_precision='fp8'` is not supported: fp8 is for training, where its products are a third of the work."
            " Leave it out: with precision 'fp8', evaluation runs in 'bf16'."
        )
    return known


_EMULATE = (
    " To try its accuracy on this device, without its speed:"
    " `fp8_recipe=dataclasses.replace(torchao.float8.Float8LinearConfig.from_recipe_name('rowwise_with_gw_hp'),"
    " emulate=True)`."
)


def _legal(argument: str) -> str:
    names = ", ".join(repr(n) for n in get_args(Precision) if (n, argument) != ("fp8", "eval_precision"))
    also = [f"{name}: {', '.join(map(repr, spellings))}" for name, spellings in _ALSO.items()]
    return f"{names} ({'; '.join(also).replace(':', ' is also', 1)})"


def runnable(device: torch.device) -> list[str]:
    """Return our names of the precisions that this device runs; fp8 only if it has matrix units for it."""
    half = [name for name in ("bf16", "fp16") if _autocast_runs(device, _DTYPES[name])]
    return [*half, *(["fp8"] if "bf16" in half and has_fp8(device) else []), "fp32"]


def has_bf16_units(device: torch.device) -> bool:
    """Return whether this CUDA device has instructions for bfloat16 products.

    Torch's own check covers the current device only.
    """
    return torch.version.hip is not None or torch.cuda.get_device_capability(device)[0] >= 8


def cpu_has(name: str) -> list[str]:
    """Return the CPU's instructions for `"bf16"` or `"fp16"`, such as AMX or AVX512-BF16; empty if it emulates them."""
    return [feature for feature, value in _torch.cpu_capabilities().items() if name in feature and value]


def _say_speed(kind: ProbeKind, speed: SpeedComparison) -> str:
    """Describe how fast bf16 was in the probe, such as `bf16 products run 2.1x as fast as fp32 (1.9 to 2.3) here`."""
    if speed.differs:
        return f"bf16 {kind} run {speed.in_words('fp32')} here"
    if speed.num_repetitions < 3:
        return f"too busy to measure bf16 {kind}"
    return f"bf16 {kind} compared with fp32 here: {speed}"


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
