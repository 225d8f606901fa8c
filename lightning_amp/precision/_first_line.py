"""Log one line at the start of a run, and one when a checkpoint was loaded: precision, loss scale and protections."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lightning_amp._text import counted, exact
from lightning_amp.casting import Choice, cpu_has
from lightning_amp.precision._forward import ForwardContexts
from lightning_amp.precision._settings import PluginArguments
from lightning_amp.scaling import DynamicLossScaler


def first_line(
    plugin: PluginArguments, forwards: Sequence[ForwardContexts], why: str, fp8: Iterable[str], *, resumes: bool = False
) -> str:
    """Return the line at the start of a fit, or of a loop of Fabric.

    Args:
        plugin: The plugin, which knows its precision and scaler.
        forwards: The contexts of the modules, all in one precision.
        why: The reason of `"auto"`; empty for a precision that the user named.
        fp8: Summaries of the layers in fp8.
        resumes: Whether a checkpoint is about to set the scale, so that nothing is known of it.

    """
    training, evaluation = forwards[0].training, forwards[0].evaluation
    parts = [*fp8, precision_on(training, forwards[0].device_type, why)]
    if plugin.scaler is not None:
        kind = "static" if plugin.scaler.min_scale == plugin.scaler.max_scale else "dynamic"
        scale = f"loss scale ({kind})" if resumes else f"loss scale {exact(plugin.scaler.get_scale())} ({kind})"
        parts.append(scale if plugin.scaler.is_enabled() else "no loss scale (the scaler is disabled)")
    elif plugin._given_scaler is not None:
        parts.append("`scaler` is left unused")
    if evaluation != training:
        parts.append(f"evaluation in {evaluation.name}")
    if num_fp32_modules := sum(len(forward.fp32_modules) for forward in forwards):
        parts.append(f"{counted(num_fp32_modules, 'module')} in fp32")
    return f"lightning_amp: {', '.join(parts)}; non-finite steps are {'skipped' if plugin._skips else 'taken'}."


def precision_on(choice: Choice, device_type: str, why: str) -> str:
    """Describe a precision on a device."""
    autocast = "bf16" if choice.name == "fp8" else choice.name
    emulated = " (emulated, which is slow)" if device_type == "cpu" and not cpu_has(autocast) else ""
    what = f"{autocast} autocast on {device_type}{emulated}" if choice.mixed else f"fp32 on {device_type}, no autocast"
    return f"precision 'auto' is {choice.name!r} here ({why}): {what}" if why else what


def resumed(state: Mapping[str, Any], precision: str, scaler: DynamicLossScaler | None) -> list[str]:
    """Return the line to log after a plugin has loaded `state`, if it has a loss scale or was in another precision."""
    last, saved = state.get("last_step"), state.get("scaler", state)
    words: list[str] = []
    if last and last[-1] not in ("", precision):
        words.append(f"the checkpoint was written in {last[-1]!r}, and training goes on in {precision!r}")
    if scaler is not None and scaler.is_enabled():
        unless = "" if saved and "scale" in saved else ", since the checkpoint has none"
        words.append(f"the loss scale is {exact(scaler.get_scale())}{unless}")
    return [f"lightning_amp: resumed: {'; '.join(words)}."] if words else []
