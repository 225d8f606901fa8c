"""Check the arguments of a plugin, and derive from them its precision and loss scaler on a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import nn
from typing_extensions import final

from lightning_amp._arguments import require
from lightning_amp._compat import _torch
from lightning_amp.casting import Choice, Precision, checked_recipe, emulates, parse_precision
from lightning_amp.scaling import DynamicLossScaler

_SCALES = {
    "bf16": "It has the range of fp32, so nothing underflows",
    "fp8": "It scales each tensor, or each row, by itself",
}


@final
class Settings:
    """The checked arguments of `AmpPrecision`. `fp8_recipe` is the default recipe if none was passed to `"fp8"`."""

    def __init__(self, precision: Any, eval_precision: Any, scaler: Any, fp8_recipe: Any = None) -> None:
        self.requested: Precision = parse_precision(precision)
        self._eval_requested: Precision | None = None
        if eval_precision is not None:
            self._eval_requested = parse_precision(eval_precision, "eval_precision")
        if fp8_recipe is not None and self.requested != "fp8":
            raise ValueError(
                f"`fp8_recipe` is for precision 'fp8', got `precision={precision!r}`. Write `AmpPrecision('fp8',"
                " fp8_recipe=...)`, or leave it out."
            )
        self.fp8_recipe: Any = checked_recipe(fp8_recipe) if self.requested == "fp8" else None
        if isinstance(scaler, (int, float)):
            scaler = DynamicLossScaler.static(scaler)
        fine = scaler is None or isinstance(scaler, torch.amp.GradScaler)
        legal = "a `lightning_amp.DynamicLossScaler`, a `torch.amp.GradScaler`, a float for a static scale"
        require(fine, "scaler", legal, scaler, none="or `None`")
        self.given_scaler = scaler
        self._own_scaler: DynamicLossScaler | None = None
        self._picked = Choice.of("fp32")  # set for "auto" once a Trainer has attached
        self._first_state = None if scaler is None else scaler.state_dict()

    def choose(
        self, device: torch.device, pick: Callable[[], tuple[Choice, str]], *, fitting: bool = True
    ) -> tuple[Choice, str]:
        """Return the precision of training, and the reason if `"auto"` picked it.

        Refuse a precision that the device cannot run. `pick` picks for `"auto"`, on all ranks alike, and is not called
        without it. fp8 is only required in a fit.
        """
        if "auto" in (self.requested, self._eval_requested):
            self._picked, why = pick()
            if self.requested == "auto":
                return self._picked, why
        training = Choice.of(self.requested)
        if training.name != "fp8":
            training.require(device)
        elif fitting:
            training.require(device, emulated=emulates(self.fp8_recipe))
        return training, ""

    def evaluation(self, training: Choice, device: torch.device) -> Choice:
        """Return the precision of validation, test and prediction; refuse a precision that the device cannot run.

        Without `eval_precision` it is the precision of training, or bf16 if that is fp8.
        """
        wanted = None if self._eval_requested == self.requested == "auto" else self._eval_requested
        if wanted is None:
            return Choice.of("bf16") if training.name == "fp8" else training
        chosen = self._picked if wanted == "auto" else Choice.of(wanted)
        chosen.require(device, "eval_precision")
        return chosen

    def first(self) -> tuple[Choice | None, torch.amp.GradScaler | None]:
        """Return precision and scaler before a Trainer has attached. The precision is `None` for `"auto"`."""
        if self.requested == "auto":
            return None, self.given_scaler
        choice = Choice.of(self.requested)
        return choice, self._scaler(choice.name)

    def next_scaler(
        self, choice: Choice, current: torch.amp.GradScaler | None, device_type: str
    ) -> torch.amp.GradScaler | None:
        """Return the scaler for the next steps: in fp16 the current one, if there is one."""
        if choice.name != "fp16":
            return None
        scaler = self._scaler("fp16") if current is None else current
        if scaler is not None:
            _torch.set_scaler_device(scaler, device_type)
        return scaler

    def _scaler(self, precision: str) -> torch.amp.GradScaler | None:
        """Return the scaler for a precision; `None` if it needs none.

        `"auto"` and `"fp32"` ignore a scaler that was passed, so that one configuration serves all machines.
        """
        if precision == "fp16":
            if self.given_scaler is not None:
                return self.given_scaler
            if self._own_scaler is None:
                self._own_scaler = DynamicLossScaler()
            return self._own_scaler
        if self.given_scaler is not None and self.requested not in ("auto", "fp32"):
            raise ValueError(
                f"`precision={self.requested!r}` does not use a loss scaler, got `scaler={self.given_scaler!r}`."
                f" {_SCALES[self.requested]}: leave `scaler` out, or use precision 'fp16'. With 'auto', one that is not"
                " needed is left unused."
            )
        return None

    def reset(self, scaler: torch.amp.GradScaler | None) -> None:
        """Reset the scale; a scaler of another class gets the scale that it had when it was passed."""
        if isinstance(scaler, DynamicLossScaler):
            scaler.reset()
        elif scaler is not None and self._first_state:
            _torch.reset_scale(scaler, self._first_state["scale"])


def pick_on_all_ranks(module: LightningModule, device: torch.device) -> tuple[Choice, str]:
    """Pick the precision for `"auto"`, and give the reason.

    Rank 0 decides for all, because ranks may run on machines with different CPUs.
    """
    strategy = module.trainer.strategy
    picked = Choice.pick(device, module) if strategy.is_global_zero else None
    return strategy.broadcast(picked) or Choice.pick(device, module)


def pick_for_all_ranks(module: nn.Module, device: torch.device, group: Any) -> tuple[Choice, str]:
    """Pick the precision for `"auto"` in Fabric, and give the reason; the first rank of the group decides for all."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return Choice.pick(device, module)
    first = 0 if group is None else torch.distributed.get_global_rank(group, 0)
    picked = [Choice.pick(device, module) if torch.distributed.get_rank() == first else None]
    torch.distributed.broadcast_object_list(picked, first, group)
    return picked[0] or Choice.pick(device, module)
