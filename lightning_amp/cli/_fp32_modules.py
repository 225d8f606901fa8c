"""`lightning-amp fp32-modules`: find the modules that must stay in fp32."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from lightning_amp.cli._errors import UsageError, users_errors
from lightning_amp.cli._output import json_writer, paragraph, table
from lightning_amp.cli._runner import CLASS_OPTIONS, Command, Outcome, Request

if TYPE_CHECKING:
    from rich.console import RenderableType

_DESCRIPTION = """\
Find which modules must stay in fp32, so that gradients and validation metrics
in fp16 or bf16 are within a relative tolerance of fp32.

--model and --data take a class path; the arguments of the class follow, as in a
LightningCLI: --model.width 64, --trainer.accelerator cpu.
--config takes the YAML of a LightningCLI; the command line overrides it."""
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
    "--json": {"metavar": "FILE", "help": "save the result as JSON"},
}


def _run(request: Request) -> Outcome:
    given = [one for one in (request.options.precision, *request.options.precisions) if one is not None]
    if len(given) > 1:
        raise UsageError(f"--precisions must be exactly one here, got {' '.join(given)}")
    precision, tolerance = given[0] if given else "fp16", request.options.tolerance
    user = request.user_classes()
    from lightning.pytorch import seed_everything

    from lightning_amp import find_fp32_modules
    from lightning_amp.tune import NothingHelps

    try:
        with users_errors(NothingHelps):
            seed_everything(user.seed, verbose=False)
            kwargs = user.made_trainer_kwargs()
            found = find_fp32_modules(
                user.make_module, user.make_data, precision, tolerance=tolerance, trainer_kwargs=kwargs
            )
    except NothingHelps as error:
        data = {"precision": precision, "rules": None, "message": str(error)}
        return Outcome([paragraph(str(error))], files={"--json": json_writer(data)}, has_work=True)
    data = {
        "precision": precision,
        "tolerance": tolerance,
        "rules": list(found),
        "message": found.message,
        "cost": found.cost,
        "tried": found.tried,
        "gradient_errors": list(found.gradient_errors),
        "metric_errors": {name: list(errors) for name, errors in found.metric_errors.items()},
    }
    return Outcome(_report(found, precision), files={"--json": json_writer(data)}, has_work=bool(found))


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


COMMAND = Command(
    "lightning-amp fp32-modules",
    _DESCRIPTION,
    _EPILOG,
    _OPTIONS,
    _run,
    usage="lightning-amp fp32-modules --model CLASS --data CLASS --tolerance X ...",
)
