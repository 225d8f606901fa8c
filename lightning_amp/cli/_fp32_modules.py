"""`lightning-amp fp32-modules`: which modules must stay in fp32."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from lightning_amp.cli._class_options import CLASS_OPTIONS, user_classes
from lightning_amp.cli._exits import FINE, TO_DO, UsageError
from lightning_amp.cli._output import check_output, paragraph, save_json, show, table
from lightning_amp.cli._parser import Parser
from lightning_amp.cli._user_errors import users_errors

if TYPE_CHECKING:
    from rich.console import RenderableType

_NAME = "lightning-amp fp32-modules"
_DESCRIPTION = """\
Find which modules must stay in fp32, so that in fp16 or bf16 gradients and
validation metrics are within a relative tolerance of those in fp32.

--model and --data take a class path; its arguments follow, as those of a
LightningCLI do: --model.width 64, --trainer.accelerator cpu.
--config takes the YAML of a LightningCLI; the command line wins over it."""
_EPILOG = """\
  lightning-amp fp32-modules --model models.Net --model.width 64 \\
      --data models.Data --precision fp16 --tolerance 0.05

Exit status: 0 if nothing is needed; 1 if modules are, or if nothing helps."""

_OPTIONS: dict[str, dict[str, Any]] = {
    **CLASS_OPTIONS,
    "--precision": {"metavar": "NAME", "help": "fp16 (default) or bf16", "dest": "precision"},
    "--precisions": {"metavar": "NAME", "help": "the same; exactly one", "nargs": "+", "default": []},
    "--tolerance": {
        "metavar": "X",
        "help": "largest relative error, such as 0.05",
        "type": float,
        "required": True,
    },
    "--json": {"metavar": "FILE", "help": "save what was found as JSON"},
}


def run(arguments: Sequence[str]) -> int:
    """Run the command; returns its exit status."""
    parser = Parser(_NAME, _DESCRIPTION, _EPILOG, usage=f"{_NAME} --model CLASS --data CLASS --tolerance X ...")
    for option, settings in _OPTIONS.items():
        parser.add_argument(option, **settings)
    options, others = parser.parse_known_args(arguments)
    precision = _precision(options.precision, options.precisions)
    check_output("--json", options.json)
    user, seed = user_classes(_NAME, options, others)
    from lightning_amp.tune import NothingHelps

    try:
        found = _find(user, seed, precision, options.tolerance)
    except NothingHelps as error:
        _save(options.json, {"precision": precision, "rules": None, "message": str(error)})
        show([paragraph(str(error))])
        return TO_DO
    _save(
        options.json,
        {
            "precision": precision,
            "tolerance": options.tolerance,
            "rules": list(found),
            "message": found.message,
            "cost": found.cost,
            "tried": found.tried,
            "gradient_errors": list(found.gradient_errors),
            "metric_errors": {name: list(errors) for name, errors in found.metric_errors.items()},
        },
    )
    show(_report(found, precision))
    return TO_DO if found else FINE


def _precision(one: str | None, several: Sequence[str]) -> str:
    given = [*([] if one is None else [one]), *several]
    if len(given) > 1:
        raise UsageError(f"--precisions must be exactly one here, got {' '.join(given)}")
    return given[0] if given else "fp16"


def _find(user: Any, seed: int | None, precision: str, tolerance: float) -> Any:
    from lightning.pytorch import seed_everything

    from lightning_amp import find_fp32_modules
    from lightning_amp.tune import NothingHelps

    with users_errors(NothingHelps):
        seed_everything(seed or 0, verbose=False)
        kwargs = user.made_trainer_kwargs()
        return find_fp32_modules(
            user.make_module, user.make_data, precision, tolerance=tolerance, trainer_kwargs=kwargs
        )


def _save(path: str | None, data: dict[str, Any]) -> None:
    if path:
        save_json("--json", path, data)


def _report(found: Any, precision: str) -> Iterator[RenderableType]:
    yield paragraph(found.message)
    if found:
        rules = ", ".join(json.dumps(rule) for rule in found)
        yield paragraph(f'\nAmpPrecision("{precision}", fp32_modules=[{rules}])\n')
        rows = [("gradients", *found.gradient_errors)]
        rows += [(name, *errors) for name, errors in found.metric_errors.items()]
        header = ["relative error", f"in {precision}", "with these in fp32"]
        yield table(header, [[name, _error(without), _error(with_rules)] for name, without, with_rules in rows])


def _error(value: float) -> str:
    return "not finite" if not math.isfinite(value) else f"{100 * value:.3g} %"
