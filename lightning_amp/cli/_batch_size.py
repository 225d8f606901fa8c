"""`lightning-amp batch-size`: the largest batch that fits, in each precision."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_amp.cli._class_options import CLASS_OPTIONS, user_classes
from lightning_amp.cli._exits import FINE, TO_DO, UsageError
from lightning_amp.cli._markdown import markdown
from lightning_amp.cli._output import check_output, is_terminal, save, show, write
from lightning_amp.cli._parser import Parser

_NAME = "lightning-amp batch-size"
_DESCRIPTION = """\
Find the largest batch that fits into memory, in each precision: measured at two
sizes, each in a fresh process, and proved by a run.

--model and --data take a class path; its arguments follow, as those of a
LightningCLI do: --model.width 64, --trainer.accumulate_grad_batches 4.
--config takes the YAML of a LightningCLI; the command line wins over it. The
data module or the module must have a `batch_size` that its loaders use."""

_EPILOG = """\
  lightning-amp batch-size --model models.Net --model.width 64 \\
      --data models.Data --memory-limit-gib 4
  lightning-amp batch-size --config config.yaml --precisions bf16

Exit status: 0, or 1 if a precision has no batch size that could be run."""

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
        "help": "limit for each device; default: what the device has free; needed on the CPU",
        "type": float,
    },
    "--json": {"metavar": "FILE", "help": "save all that was measured as JSON"},
}


def run(arguments: Sequence[str]) -> int:
    """Run the command; returns its exit status."""
    parser = Parser(_NAME, _DESCRIPTION, _EPILOG, usage=f"{_NAME} --model CLASS --data CLASS [options]")
    for option, settings in _OPTIONS.items():
        parser.add_argument(option, **settings)
    options, others = parser.parse_known_args(arguments)
    check_output("--json", options.json)
    user, _ = user_classes(_NAME, options, others)
    found = _find(
        user.make_module,
        user.make_data,
        tuple(options.precisions),
        memory_limit_gib=options.memory_limit_gib,
        trainer_kwargs=user.trainer_kwargs,
    )
    if options.json:
        save("--json", options.json, found.to_json)
    if is_terminal():
        show(markdown(found.to_markdown()))
    else:
        write(found.to_markdown())
    return TO_DO if any(result.error is not None for result in found.values()) else FINE


def _find(*args: Any, **kwargs: Any) -> Any:
    from lightning_amp import find_batch_size

    try:
        return find_batch_size(*args, **kwargs)
    except BrokenPipeError:
        raise
    except (ValueError, RuntimeError, OSError) as error:  # those that it documents
        raise UsageError(str(error)) from error
