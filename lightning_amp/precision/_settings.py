"""Check the arguments of a plugin, and derive from them its precision and loss scaler on a device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lightning_amp._arguments import checked_rules, require_bool
from lightning_amp._compat import _names, _torch
from lightning_amp._text import called
from lightning_amp.casting import (
    Canonical,
    Choice,
    Precision,
    checked_recipe,
    emulates,
    parse_precision,
)
from lightning_amp.scaling import DynamicLossScaler

_MODULES = "globs on qualified module names, such as 'decoder.head' or '*.norm', and subclasses of `torch.nn.Module`"
_BUFFERS = "globs on qualified buffer names, such as 'queue*' or '*.centre'"
_SCALES = {
    "bf16": "It has the range of fp32, so nothing underflows",
    "fp8": "It scales each tensor, or each row, by itself",
}


class PluginArguments:
    """The arguments that the plugins for the Trainer and for Fabric have in common, and the precision in use.

    `_requested` is our name of the precision, or `"auto"`; `_given_scaler` is the scaler that the user passed, as ours.
    """

    scaler: DynamicLossScaler | None
    _choice: Choice | None
    _fp8_layers: dict[str, str | None]

    def _take(
        self, precision: Any, eval_precision: Any, scaler: Any, rules: Any, skip: Any, buffers: Any, recipe: Any
    ) -> None:
        self._requested: Precision = parse_precision(precision)
        self._eval_requested: Precision | None = None
        if eval_precision is not None:
            self._eval_requested = parse_precision(eval_precision, "eval_precision")
        if recipe is not None and self._requested != "fp8":
            raise ValueError(
                f"`fp8_recipe` is for precision 'fp8', got `precision={precision!r}`. Write `AmpPrecision('fp8',"
                " fp8_recipe=...)`, or leave it out."
            )
        self.fp8_recipe: Any = checked_recipe(recipe) if self._requested == "fp8" else None
        self._given_scaler = DynamicLossScaler.taking(scaler)
        if scaler is not None and self._requested in _SCALES:
            raise ValueError(
                f"`precision={self._requested!r}` does not use a loss scaler, got `scaler={scaler!r}`."
                f" {_SCALES[self._requested]}: leave `scaler` out, or use precision 'fp16'. With 'auto', one that is"
                " not needed is left unused."
            )
        self._own_scaler = DynamicLossScaler()
        self.fp32_modules = checked_rules("fp32_modules", rules, _MODULES, "*.norm", torch.nn.Module)
        require_bool("skip_nonfinite", skip)
        self.skip_nonfinite = skip
        self.restore_buffers = checked_rules("restore_buffers", buffers, _BUFFERS, "queue*")
        self.device = (torch.accelerator.current_accelerator(True) or torch.device("cpu")).type  # until one is known

    def _choose(self, device: torch.device, group: Any = None, *, fitting: bool = True) -> tuple[Choice, Choice, str]:
        """Return the precisions of training and of evaluation, and why `"auto"` picked the first.

        Refuse a precision that the device cannot run; fp8 is only required in a fit. For `"auto"` the first rank of
        the process `group` decides for all, because machines may differ.
        """
        picked, why = Choice.of("fp32"), ""
        if "auto" in (self._requested, self._eval_requested):
            picked, why = Choice.pick(device)
            if torch.distributed.is_available() and torch.distributed.is_initialized():
                first = 0 if group is None else torch.distributed.get_global_rank(group, 0)
                choices: list[Any] = [(picked, why)]
                torch.distributed.broadcast_object_list(choices, first, group)
                picked, why = choices[0]
        if self._requested == "auto":
            training = picked
        else:
            training, why = Choice.of(self._requested), ""
            if training.name != "fp8" or fitting:
                training.require(device, emulated=emulates(self.fp8_recipe))
        if self._eval_requested is None:
            return training, Choice.of("bf16") if training.name == "fp8" else training, why
        evaluation = picked if self._eval_requested == "auto" else Choice.of(self._eval_requested)
        evaluation.require(device, "eval_precision")
        return training, evaluation, why

    def _until_attached(self) -> tuple[Choice | None, DynamicLossScaler | None]:
        """Return precision and scaler before a Trainer has attached. The precision is `None` for `"auto"`."""
        if self._requested == "auto":
            return None, self._given_scaler
        choice = Choice.of(self._requested)
        return choice, self._scaler_for(choice)

    def _scaler_for(self, choice: Choice, device_type: str | None = None) -> DynamicLossScaler | None:
        """Return the scaler for a precision; `None` if it needs none, so that one configuration serves all machines."""
        if choice.name != "fp16":
            return None
        scaler = self._given_scaler or self._own_scaler
        if device_type is not None:
            _torch.set_scaler_device(scaler, device_type)
        return scaler

    def __repr__(self) -> str:
        """Return the code that makes this plugin, without arguments that have their default."""
        return called(self, self._requested, scaler=self._given_scaler, eval_precision=self._eval_requested)

    def __bool__(self) -> bool:
        """Return `True`. To a Trainer of the other kind of Lightning, raise an error: it would train without us."""
        _names.require_kind_of_caller(self)
        return True

    @property
    def state_key(self) -> str:
        """Say where a plugin belongs: the Trainer reads this attribute of its `callbacks` only."""
        raise AttributeError(f"`{self!r}` is a plugin, not a callback: write `plugins=[{self!r}]`.")

    @property
    def fp8_layers(self) -> Mapping[str, str | None]:
        """Map the name of each `nn.Linear` to `None` if it runs in fp8, or ran in the last fit, else to the reason."""
        return dict(self._fp8_layers)

    @property
    def precision(self) -> Canonical:
        """Return Lightning's name, `"16-mixed"`, `"bf16-mixed"` (for `"fp8"` too) or `"32-true"`."""
        return self._settled().canonical

    def _settled(self) -> Choice:
        # before the device is known, "auto" goes by the device that Lightning chooses by default
        return self._choice or Choice.pick(torch.device(self.device))[0]

    @property
    def _skips(self) -> bool:
        return self.skip_nonfinite or (self.scaler is not None and self.scaler.is_enabled())
