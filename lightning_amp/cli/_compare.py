"""`lightning-amp compare`: the same module in several precisions, and which one to use."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from lightning_amp.cli._class_options import CLASS_OPTIONS, user_classes
from lightning_amp.cli._exits import FINE, TO_DO, Interrupted, UsageError
from lightning_amp.cli._markdown import markdown
from lightning_amp.cli._output import check_output, is_terminal, save, show, write
from lightning_amp.cli._parser import Parser

_NAME = "lightning-amp compare"
_MARGINS = "--margins."
_DESCRIPTION = """\
Train the same module once per precision and seed, each in a fresh process, and
say which precision to use.

--model and --data take a class path; its arguments follow, as those of a
LightningCLI do: --model.width 64, --trainer.max_epochs 2, --optimizer SGD.
--config takes the YAML of a LightningCLI; the command line wins over it."""

_EPILOG = """\
--margins.METRIC says what a precision may cost in a metric, in its own unit:
--margins.val_acc 0.001, or max:0.1 and min:0.1 where it is not known whether
more or less is better.

  lightning-amp compare --model models.Net --model.width 64 --data models.Data \\
      --trainer.max_epochs 2 --seeds 3 --margins.val_acc 0.002 --dirpath compare
  lightning-amp compare --config config.yaml --precisions fp32 bf16

Exit status: 0, or 1 if a precision is worse or could not be trained."""

_OPTIONS: dict[str, dict[str, Any]] = {
    **CLASS_OPTIONS,
    "--precisions": {
        "metavar": "NAME",
        "help": "the first is the reference; default: fp32 bf16 fp16",
        "nargs": "+",
        "default": ["fp32", "bf16", "fp16"],
    },
    "--seeds": {"metavar": "N", "help": "how many; fewer than three decide nothing", "type": int, "default": 1},
    "--seed": {"metavar": "N", "help": "the first; default: `seed_everything` of the YAML, or 0", "type": int},
    "--control": {
        "help": "train the reference also with initial weights moved in the last bit; default: if there are more seeds",
        "choices": ["true", "false"],
    },
    "--dirpath": {"metavar": "DIR", "help": "keeps what finished; the same command goes on from there"},
    "--json": {"metavar": "FILE", "help": "save all that was measured as JSON"},
    "--html": {"metavar": "FILE", "help": "save the report as one HTML page"},
}


def run(arguments: Sequence[str]) -> int:
    """Run the command; returns its exit status."""
    options, margins, others = _options(arguments)
    check_output("--json", options.json)
    check_output("--html", options.html)
    user, seed = user_classes(_NAME, options, others, "precisions are what is compared")
    report = _compare(
        user.make_module,
        user.make_data,
        precisions=tuple(options.precisions),
        trainer_kwargs=user.trainer_kwargs,
        seed=options.seed if options.seed is not None else seed or 0,
        num_seeds=options.seeds,
        margins=margins or None,
        control=None if options.control is None else options.control == "true",
        dirpath=options.dirpath,
    )
    if options.json:
        save("--json", options.json, report.to_json)
    if options.html:
        save("--html", options.html, report.to_html)
    _print(report)
    return TO_DO if _something_to_do(report) else FINE


def _options(arguments: Sequence[str]) -> tuple[Any, dict[str, Any], list[str]]:
    """Return the command's own options, the margins, and what is the user's classes'."""
    parser = Parser(_NAME, _DESCRIPTION, _EPILOG, usage=f"{_NAME} --model CLASS --data CLASS [options]")
    for option, settings in _OPTIONS.items():
        parser.add_argument(option, **settings)
    margins, rest = _margins(arguments)
    options, others = parser.parse_known_args(rest)
    return options, margins, others


def _margins(arguments: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Take `--margins.METRIC VALUE` out of the arguments; `METRIC` is whatever the module logs."""
    margins: dict[str, Any] = {}
    rest: list[str] = []
    left = list(arguments)
    while left:
        argument = left.pop(0)
        if not argument.startswith(_MARGINS):
            rest.append(argument)
            continue
        metric, equals, value = argument.removeprefix(_MARGINS).partition("=")
        if not equals:
            value = left.pop(0) if left else ""
        margins[metric] = _margin(f"{_MARGINS}{metric}", value)
    return margins, rest


def _margin(option: str, text: str) -> Any:
    """Read `0.1`, `max:0.1` or `["max", 0.1]`."""
    pair = re.fullmatch(r"(min|max):(.+)|\[\s*[\"'](min|max)[\"']\s*,(.+)\]", text)
    try:
        if pair is None:
            return float(text)
        return pair[1] or pair[3], float(pair[2] or pair[4])
    except ValueError as error:
        rule = "a number such as 0.001, or, with what is better, max:0.1 or min:0.1"
        raise UsageError(f"{option} must be {rule}, got {text!r}") from error


def _compare(*args: Any, dirpath: str | None, **kwargs: Any) -> Any:
    from lightning_amp import compare_precisions

    try:
        return compare_precisions(*args, dirpath=dirpath, **kwargs)
    except KeyboardInterrupt as error:
        if dirpath is None:
            text = "with `--dirpath DIR` the same command goes on where it was stopped"
        else:
            text = f"what finished is in `{dirpath}`, and the same command goes on from there"
        raise Interrupted(f"interrupted; {text}") from error
    except BrokenPipeError:
        raise
    except (ValueError, RuntimeError, ImportError, OSError) as error:  # those that it documents
        raise UsageError(str(error)) from error


# -- the report --------------------------------------------------------------------------------------------------------


def _print(report: Any) -> None:
    """Print the report: laid out on a terminal, and the Markdown itself where a program or a file gets it."""
    if is_terminal():
        show(markdown(report.to_markdown()))
    else:
        write(report.to_markdown())


def _something_to_do(report: Any) -> bool:
    return any(
        bool(arm.errors) or any(report.verdict(label, metric).claim == "worse" for metric in arm.metrics)
        for label, arm in report.arms.items()
    )
