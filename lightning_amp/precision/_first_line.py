"""Log one line at the start of a fit: the precision, the scale, and the active protections."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from lightning_amp import _messages
from lightning_amp._text import counted, exact
from lightning_amp.casting import Choice
from lightning_amp.precision._run import Run
from lightning_amp.scaling import DynamicLossScaler


def say_first_line(
    run: Run,
    scaler: torch.amp.GradScaler | None,
    why: str,
    given_scaler: torch.amp.GradScaler | None,
    fallback: str,
    skip_nonfinite: bool,
) -> None:
    """Log precision, device, scaler and protections. If nothing is trained, log only the choice of `"auto"`.

    Args:
        run: The run that begins.
        scaler: The scaler in use.
        why: The reason of `"auto"`; empty for a precision that the user named.
        given_scaler: The scaler that the user passed.
        fallback: Words about the precisions of `fallback`; empty if there are none.
        skip_nonfinite: Whether a step that is not finite is skipped without a scaler too.

    """
    forward, skips = run.forward, (scaler is not None and scaler.is_enabled()) or skip_nonfinite
    resumed = run.module.trainer.ckpt_path is not None  # a checkpoint is about to set the scale
    parts = [_precision_on(forward.training, forward.device_type, why, resumed)]
    if run.fp8 is not None and forward.in_fp8:
        parts.insert(0, run.fp8.summary)
    if not run.fitting:
        if why and forward.evaluation == forward.training:
            _messages.info(f"lightning_amp: {parts[0]}.")
        return
    if scaler is not None:
        parts.append(_scale(scaler, resumed))
    if given_scaler is not None and scaler is None and not (why and resumed):  # the checkpoint may need the scaler then
        parts.append("`scaler` is left unused")
    if fallback:
        parts.append(fallback)
    if forward.evaluation != forward.training:
        parts.append(f"evaluation in {forward.evaluation.name}")
    if num_fp32_modules := len(forward.fp32_modules):
        parts.append(f"{counted(num_fp32_modules, 'module')} in fp32")
    ending = f"non-finite steps are {'skipped' if skips else 'taken'}"
    if run.named_buffers and skips:
        ending += f", which also puts back {counted(len(run.named_buffers), 'buffer')}"
    _messages.info(f"lightning_amp: {', '.join(parts)}; {ending}.")


def first_line(
    choice: Choice,
    device_type: str,
    why: str,
    scaler: torch.amp.GradScaler | None,
    *,
    skips: bool,
    resumed: bool,
    fp8: Iterable[str],
) -> str:
    """Return precision, device and scaler in Fabric. For the arguments see :func:`say_first_line`.

    `fp8` has a summary for each module with layers in fp8.
    """
    parts = [*fp8, _precision_on(choice, device_type, why, resumed=False)]  # `why` knows the checkpoint
    if scaler is not None:
        parts.append(_scale(scaler, resumed))
    return f"lightning_amp: {', '.join(parts)}; non-finite steps are {'skipped' if skips else 'taken'}."


def say(sentences: Iterable[str]) -> None:
    """Log each sentence."""
    for sentence in sentences:
        _messages.info(sentence)


def _precision_on(choice: Choice, device_type: str, why: str, resumed: bool) -> str:
    autocast = "bf16" if choice.name == "fp8" else choice.name
    what = f"{autocast} autocast on {device_type}" if choice.mixed else f"fp32 on {device_type}, no autocast"
    unless = ", unless the checkpoint says otherwise" if resumed else ""
    return f"precision 'auto' is {choice.name!r} here ({why}){unless}: {what}" if why else what


def _scale(scaler: torch.amp.GradScaler, resumed: bool) -> str:
    kind = type(scaler).__name__
    if not scaler.is_enabled():
        return f"no loss scale ({kind}, disabled)"
    if isinstance(scaler, DynamicLossScaler):
        kind = "static" if scaler.min_scale == scaler.max_scale else "dynamic"
    return f"loss scale {'from the checkpoint' if resumed else exact(scaler.get_scale())} ({kind})"
