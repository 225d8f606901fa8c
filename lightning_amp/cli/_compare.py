"""`lightning-amp compare`: train one module in several precisions, and say which one to use."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lightning_amp._plain_data import code, line
from lightning_amp._text import counted
from lightning_amp.cli._errors import Interrupted, UsageError, documented_errors
from lightning_amp.cli._output import laid_out
from lightning_amp.cli._runner import CLASS_OPTIONS, Command, Outcome, Request

if TYPE_CHECKING:
    from lightning_amp import LocalDevices, PrecisionReport
    from lightning_amp.compare import Run

_MARGINS = "--margins."
_DESCRIPTION = """\
Train the same module once per precision and seed, each in its own process, and
say which precision to use.

--model and --data take a class path; the arguments of the class follow, as in a
LightningCLI: --model.width 64, --trainer.max_epochs 2, --optimizer SGD.
--config takes the YAML of a LightningCLI; the command line overrides it."""

_EPILOG = """\
--margins.METRIC is the loss in a metric that you accept, in its own unit:
--margins.val_acc 0.001. If the command cannot know whether more or less is
better, write max:0.1 (more is) or min:0.1 (less is).

  lightning-amp compare --model models.Net --model.width 64 --data models.Data \\
      --trainer.max_epochs 2 --seeds 3 --margins.val_acc 0.002 --dirpath compare
  lightning-amp compare --config config.yaml --precisions fp32 bf16

Several machines without a common program: each job of an array trains one
share, and a last command judges all runs:

  lightning-amp compare --config config.yaml --dirpath s3://bucket/x --part 3/12
  lightning-amp compare --config config.yaml --dirpath s3://bucket/x --collect

Exit status: 0, or 1 if a precision is worse or could not be trained, or if runs
are missing."""

_OPTIONS: dict[str, dict[str, Any]] = {
    **CLASS_OPTIONS,
    "--precisions": {
        "metavar": "NAME",
        "help": "the first is the reference; default: fp32 bf16 fp16",
        "nargs": "+",
        "default": ["fp32", "bf16", "fp16"],
    },
    "--seeds": {"metavar": "N", "help": "how many; fewer than three give no verdict", "type": int, "default": 1},
    "--seed": {"metavar": "N", "help": "the first; default: `seed_everything` of the YAML, or 0", "type": int},
    "--control": {
        "help": "train the reference again, its initial weights changed in the last bit;"
        " default: with two or more seeds",
        "choices": ["true", "false"],
    },
    "--dirpath": {"metavar": "DIR", "help": "keep finished runs; the same command continues from there"},
    "--devices-at-once": {
        "metavar": "N",
        "help": "train N runs at once, each on as many accelerators as --trainer.devices says,"
        " or on its share of the CPU cores",
        "type": int,
    },
    "--part": {"metavar": "I/N", "help": "train share I of N, from 1 on, into --dirpath; print no report"},
    "--collect": {"help": "train nothing; judge the runs in --dirpath", "action": "store_true"},
    "--json": {"metavar": "FILE", "help": "save all measurements as JSON"},
    "--html": {"metavar": "FILE", "help": "save the report as one HTML page"},
}


def _run(request: Request) -> Outcome:
    options = request.options
    part = _part(options)
    margins, others = _margins(request.others)
    user = request._replace(others=others).user_classes("this command compares precisions")
    from lightning_amp.compare import Comparison

    try:
        with documented_errors(ValueError, RuntimeError, ImportError, OSError):
            comparison = Comparison(
                user.make_module,
                user.make_data,
                precisions=tuple(options.precisions),
                trainer_kwargs=user.trainer_kwargs,
                seed=options.seed if options.seed is not None else user.seed,
                num_seeds=options.seeds,
                margins=margins or None,
                control=None if options.control is None else options.control == "true",
                dirpath=options.dirpath,
                executor=_executor(options.devices_at_once, user.trainer_kwargs.get("devices")),
            )
            if part is not None:
                return _outcome_of_part(comparison.run_part(*part), *part)
            report = comparison.collect() if options.collect else comparison.run()
    except KeyboardInterrupt as error:
        goes_on = f"finished runs are in `{options.dirpath}`, and the same command continues from there"
        without = "with `--dirpath DIR` the same command goes on where it was stopped"
        raise Interrupted(f"interrupted; {goes_on if options.dirpath else without}") from error
    files = {"--json": report.to_json, "--html": report.to_html}
    text = report.to_markdown()
    return Outcome(laid_out([text]), text, files, has_work=_is_something_wrong(report))


def _part(options: Any) -> tuple[int, int] | None:
    """Return the share that is trained, and the number of shares; `None` for all runs."""
    if options.part is None and not options.collect:
        return None
    option = "--collect" if options.part is None else "--part"
    if options.dirpath is None:
        raise UsageError(f"{option} needs --dirpath, the folder or URL in which the runs of all parts are kept")
    if options.part is None:
        return None
    if options.collect:
        raise UsageError("--part trains runs and --collect judges them: they are two commands")
    for option, file in (("--json", options.json), ("--html", options.html)):
        if file is not None:
            raise UsageError(f"--part prints no report that {option} could save; use {option} with --collect")
    found = re.fullmatch(r"(\d+)/(\d+)", options.part)
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise UsageError(f"--part must be I/N, with I from 1 to N, such as 3/12; got {options.part!r}")
    return int(found[1]), int(found[2])


def _executor(num_at_once: int | None, devices: object) -> LocalDevices | None:
    """Return an executor for this machine, whose runs get as many accelerators as the Trainer asks for."""
    if num_at_once is None:
        return None
    import torch

    from lightning_amp.compare import LocalDevices

    has_devices = torch.accelerator.current_accelerator(check_available=True) is not None
    try:
        return LocalDevices(num=num_at_once, per_run=int(str(devices)) if has_devices and str(devices).isdigit() else 1)
    except ValueError as error:
        raise UsageError(f"--devices-at-once: {error}") from error


def _outcome_of_part(runs: Sequence[Run], part: int, num_parts: int) -> Outcome:
    failed = [run for run in runs if not run.finished]
    text = f"Part {part} of {num_parts}: {counted(len(runs), 'run')}, {len(failed)} failed."
    if not runs:
        text = f"Part {part} of {num_parts} has no run, because there are fewer runs than parts."
    lines = [f"- {code(run.label)}, seed {run.seed}: {line(run.error or '')}" for run in failed]
    parts = [text, *(["\n".join(lines)] if lines else [])]
    return Outcome(laid_out(parts), "\n\n".join(parts) + "\n", {}, has_work=bool(failed))


def _is_something_wrong(report: PrecisionReport) -> bool:
    """Return whether a run failed or is missing, or an arm other than the control is worse."""
    return any(arm.errors or (arm.judged("worse") and not arm.is_control) for arm in report.arms.values())


def _margins(arguments: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Separate the options `--margins.METRIC VALUE` from the other arguments.

    `METRIC` is a name that the module logs.
    """
    margins: dict[str, Any] = {}
    rest: list[str] = []
    left = iter(arguments)
    for argument in left:
        if argument.startswith(_MARGINS):
            metric, equals, value = argument.removeprefix(_MARGINS).partition("=")
            margins[metric] = _margin(f"{_MARGINS}{metric}", value if equals else next(left, ""))
        else:
            rest.append(argument)
    return margins, rest


def _margin(option: str, text: str) -> Any:
    """Read `0.1`, `max:0.1` or `["max", 0.1]`."""
    pair = re.fullmatch(r"(min|max):(.+)|\[\s*[\"'](min|max)[\"']\s*,(.+)\]", text)
    try:
        if pair is None:
            return float(text)
        return pair[1] or pair[3], float(pair[2] or pair[4])
    except ValueError as error:
        rule = "a number such as 0.001, or, with the better direction, max:0.1 or min:0.1"
        raise UsageError(f"{option} must be {rule}, got {text!r}") from error


COMMAND = Command(
    "lightning-amp compare",
    _DESCRIPTION,
    _EPILOG,
    _OPTIONS,
    _run,
    outputs=("--json", "--html"),
    usage="lightning-amp compare --model CLASS --data CLASS [options]",
)
