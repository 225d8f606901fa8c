"""`lightning-amp batch-size`: find the largest batch that fits, in each precision."""

from __future__ import annotations

from typing import Any

from lightning_amp.cli._errors import documented_errors
from lightning_amp.cli._output import laid_out
from lightning_amp.cli._runner import CLASS_OPTIONS, Command, Outcome, Request

_DESCRIPTION = """\
Find the largest batch that fits into memory, in each precision, by short runs
in processes of their own.

--model and --data take a class path; the arguments of the class follow, as in a
LightningCLI: --model.width 64, --trainer.accumulate_grad_batches 4.
--config takes the YAML of a LightningCLI; the command line overrides it. The
data module or the module must have a `batch_size` that its loaders use."""

_EPILOG = """\
  lightning-amp batch-size --model models.Net --model.width 64 \\
      --data models.Data --memory-limit-gib 4
  lightning-amp batch-size --config config.yaml --precisions bf16

Exit status: 0, or 1 if a precision has no batch size that fits."""

_OPTIONS: dict[str, dict[str, Any]] = {
    **CLASS_OPTIONS,
    "--precisions": {
        "metavar": "NAME",
        "help": "default: fp32 bf16",
        "nargs": "+",
        "default": ["fp32", "bf16"],
    },
    "--memory-limit-gib": {
        "metavar": "GIB",
        "help": "limit for each device; default: its free memory; needed on the CPU",
        "type": float,
    },
    "--json": {"metavar": "FILE", "help": "save all measurements as JSON"},
}


def _run(request: Request) -> Outcome:
    user = request.user_classes()
    from lightning_amp import find_batch_size

    with documented_errors(ValueError, RuntimeError, OSError):
        found = find_batch_size(
            user.make_module,
            user.make_data,
            tuple(request.options.precisions),
            memory_limit_gib=request.options.memory_limit_gib,
            trainer_kwargs=user.trainer_kwargs,
        )
    failed = any(result.error is not None for result in found.values())
    return Outcome(laid_out(found.blocks()), found.to_markdown(), {"--json": found.to_json}, has_work=failed)


COMMAND = Command(
    "lightning-amp batch-size",
    _DESCRIPTION,
    _EPILOG,
    _OPTIONS,
    _run,
    usage="lightning-amp batch-size --model CLASS --data CLASS [options]",
)
