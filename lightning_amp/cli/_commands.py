"""The commands: what they ask for, and what they print."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from typing_extensions import final

from lightning_amp._files import child, location, write_json
from lightning_amp._plain_data import Table, null, plain
from lightning_amp._text import counted, exact
from lightning_amp.cli._output import Outcome, UsageError

if TYPE_CHECKING:
    from lightning_amp.compare import LocalDevices
    from lightning_amp.reports import ScaleHistory

Options = Mapping[str, Mapping[str, Any]]


@final
class Command(NamedTuple):
    """A command: its line in `--help`, its own help, the arguments of `add_argument` by option, and what it does."""

    what: str
    description: str
    options: Options
    run: Callable[[Any], Outcome]


_CLASSES = """
--model and --data take a class path; the arguments of the class follow, as in a
LightningCLI: --model.width 64, --trainer.max_epochs 2, --optimizer SGD.
--config takes the YAML of a LightningCLI; options after it override it. If it
has no class_path for the model, write --model before it, and so for the data."""

CLASS_OPTIONS: Options = {
    "--model": {"metavar": "CLASS", "help": "the LightningModule: package.module.Class"},
    "--data": {"metavar": "CLASS", "help": "the LightningDataModule: package.module.Class"},
    "--config": {"metavar": "FILE", "help": "the YAML of a LightningCLI"},
}
"""Options that jsonargparse makes of the classes; they are only shown in `--help`."""

_SEED = {"metavar": "N", "type": int, "default": 0, "help": "the first; default: seed_everything of the YAML, or 0"}
_JSON = {"metavar": "FILE", "help": "save all measurements as JSON"}


def _user(options: Any) -> Mapping[str, Any]:
    """Return the arguments that all functions share."""
    from lightning_amp.cli._classes import user_classes

    return user_classes(options)


# -- doctor ------------------------------------------------------------------------------------------------------------

DOCTOR = f"""\
Measure what this machine can do in each precision. With a module and its data,
say why mixed precision is not faster or saves no memory.
{_CLASSES}

  lightning-amp doctor
  lightning-amp doctor --model models.Net --model.width 64 --data models.Data \\
      --precision bf16

Exit status: 0, or 1 if a finding is a warning or an error."""

DOCTOR_OPTIONS: Options = {
    "--precision": {"metavar": "NAME", "help": "the precision to examine; default: auto", "default": "auto"},
    "--device": {"metavar": "NAME", "help": "cpu or cuda:0, for example; default: where a Trainer would train"},
    "--seed": _SEED,
    "--json": _JSON,
}


def run_doctor(options: Any) -> Outcome:
    """Examine this machine, and a module if there is one."""
    from lightning_amp.advice import doctor

    where = {"precision": options.precision, "device": options.device}
    if "model" in options:
        from lightning_amp._compat._names import seed_everything

        user = _user(options)
        seed_everything(options.seed, verbose=False)
        report = doctor(**user, **where)
    else:
        report = doctor(**where)
    return Outcome(report.to_markdown(), {"--json": report.to_json}, report.has_problems)


# -- compare -----------------------------------------------------------------------------------------------------------

COMPARE = f"""\
Train the same module once per precision and seed, each in its own process, and
say which precision to use.
{_CLASSES}

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

Exit status: 0, or 1 if a precision is worse, or if a run failed or is missing."""

_FIRST = "the first is the reference; default: fp32 bf16 fp16"
_AT_ONCE = "train N runs at once, each on the accelerators of --trainer.devices, or on its share of the CPU cores"
_CONTROL = "train the reference again, weights changed in the last bit; default: with two or more seeds"

COMPARE_OPTIONS: Options = {
    "--precisions": {"metavar": "NAME", "nargs": "+", "default": ["fp32", "bf16", "fp16"], "help": _FIRST},
    "--seeds": {"metavar": "N", "help": "how many; fewer than three give no verdict", "type": int, "default": 1},
    "--seed": _SEED,
    "--margins": {"metavar": ".METRIC X", "help": "what a precision may cost in a metric", "type": dict, "default": {}},
    "--control": {"metavar": "true|false", "help": _CONTROL, "type": bool},
    "--dirpath": {"metavar": "DIR", "help": "keep finished runs; the same command continues from there"},
    "--devices-at-once": {"metavar": "N", "help": _AT_ONCE, "type": int},
    "--part": {"metavar": "I/N", "help": "train share I of N, from 1 on, into --dirpath; print no report"},
    "--collect": {"help": "train nothing; judge the runs in --dirpath", "action": "store_true"},
    "--json": _JSON,
    "--html": {"metavar": "FILE", "help": "save the report as one HTML page"},
}


def run_compare(options: Any) -> Outcome:
    """Train and judge, train a part, or judge what is kept."""
    part = _part(options)
    user = _user(options)
    from lightning_amp.compare import Comparison

    comparison = Comparison(
        **user,
        precisions=tuple(options.precisions),
        seed=options.seed,
        num_seeds=options.seeds,
        margins={name: _margin(name, value) for name, value in options.margins.items()},
        control=options.control,
        dirpath=options.dirpath,
        executor=_executor(options.devices_at_once, user["trainer_kwargs"].get("devices")),
    )
    if part is not None:
        runs = comparison.run_part(*part)
        failed = [run for run in runs if not run.finished]
        text = f"Part {part[0]} of {part[1]}: {counted(len(runs), 'run')}, {len(failed)} failed.\n"
        lines = "".join(f"\n- `{run.name}`: {' '.join((run.error or '').split())}\n" for run in failed)
        return Outcome(text + lines, has_work=bool(failed))
    report = comparison.collect() if options.collect else comparison.run()
    # a run failed or is missing, or an arm other than the control is worse
    has_work = any(arm.errors or (arm.judged("worse") and not arm.is_control) for arm in report.arms.values())
    return Outcome(report.to_markdown(), {"--json": report.to_json, "--html": report.to_html}, has_work)


def _part(options: Any) -> tuple[int, int] | None:
    """Return the share that is trained, and the number of shares; `None` for all runs."""
    if (options.part or options.collect) and options.dirpath is None:
        raise UsageError("--part and --collect need --dirpath, the folder or URL in which all runs are kept")
    if options.part is None:
        return None
    if options.collect or options.json or options.html:
        raise UsageError("--part trains runs and prints no report: use --collect, --json and --html in a last command")
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
    return LocalDevices(num=num_at_once, per_run=int(str(devices)) if has_devices and str(devices).isdigit() else 1)


def _margin(name: str, value: Any) -> Any:
    """Read `0.1` or `max:0.1`."""
    way, _, number = str(value).rpartition(":")
    try:
        return (way, float(number)) if way else float(number)
    except ValueError as error:
        rule = "a number such as 0.001, or, with the better direction, max:0.1 or min:0.1"
        raise UsageError(f"--margins.{name} must be {rule}, got {value!r}") from error


# -- batch-size --------------------------------------------------------------------------------------------------------

BATCH_SIZE = f"""\
Find the largest batch that fits into memory, in each precision, by short runs
in processes of their own. The data module or the module must have a
`batch_size` that its loaders use.
{_CLASSES}

  lightning-amp batch-size --model models.Net --model.width 64 \\
      --data models.Data --memory-limit-gib 4
  lightning-amp batch-size --config config.yaml --precisions bf16

Exit status: 0, or 1 if a precision has no batch size that fits."""

_LIMIT = "limit for each device; default: its free memory; needed on the CPU"

BATCH_SIZE_OPTIONS: Options = {
    "--precisions": {"metavar": "NAME", "help": "default: fp32 bf16", "nargs": "+", "default": ["fp32", "bf16"]},
    "--memory-limit-gib": {"metavar": "GIB", "help": _LIMIT, "type": float},
    "--seed": {**_SEED, "help": "ignored: the values do not matter here"},
    "--json": _JSON,
}


def run_batch_size(options: Any) -> Outcome:
    """Search in each precision."""
    from lightning_amp.tune import find_batch_size

    limit = options.memory_limit_gib
    found = find_batch_size(**_user(options), precisions=tuple(options.precisions), memory_limit_gib=limit)
    failed = any(result.error is not None for result in found.values())
    return Outcome(found.to_markdown(), {"--json": found.to_json}, failed)


# -- fp32-modules ------------------------------------------------------------------------------------------------------

FP32_MODULES = f"""\
Find which modules must stay in fp32, so that gradients and validation metrics
in fp16 or bf16 are within a relative tolerance of fp32.
{_CLASSES}

  lightning-amp fp32-modules --model models.Net --model.width 64 \\
      --data models.Data --precision fp16 --tolerance 0.05

Exit status: 0 if nothing is needed; 1 if modules are, or if nothing helps."""

FP32_MODULES_OPTIONS: Options = {
    "--precision": {"metavar": "NAME", "help": "fp16 (default) or bf16", "default": "fp16"},
    "--tolerance": {"metavar": "X", "help": "largest relative error, such as 0.05", "type": float, "required": True},
    "--seed": _SEED,
    "--json": _JSON,
}


def run_fp32_modules(options: Any) -> Outcome:
    """Search for the rules."""
    from lightning_amp._compat._names import seed_everything
    from lightning_amp.tune import NothingHelps, find_fp32_modules

    seed_everything(options.seed, verbose=False)
    data: dict[str, Any] = {"precision": options.precision, "tolerance": options.tolerance, "rules": None}
    files = {"--json": lambda path: write_json(path, plain(data, null))}
    try:
        found = find_fp32_modules(**_user(options), precision=options.precision, tolerance=options.tolerance)
    except NothingHelps as error:
        data["message"] = str(error)
        return Outcome(f"{error}\n", files, has_work=True)
    data |= {"rules": list(found), "message": found.message, "cost": found.cost}
    text = f"{found.message}\n"
    if found:
        rules = ", ".join(f'"{rule}"' for rule in found)
        text += f'\n`AmpPrecision("{options.precision}", fp32_modules=[{rules}])`\n'
    return Outcome(text, files, has_work=bool(found))


# -- scale -------------------------------------------------------------------------------------------------------------

_HISTORY = "scale_history.csv"

SCALE = f"""\
Sum up the loss scale of saved runs, and draw it.

FILE is a file of ScaleMonitor(dirpath=...) or history.to_csv(...), or a folder
with a {_HISTORY}; URLs work too.

  lightning-amp scale logs/run1 logs/run2 --plot scales.png"""

SCALE_OPTIONS: Options = {
    "FILE": {"nargs": "+", "help": "a scale history, or the folder it is in"},
    "--plot": {"metavar": "FILE", "help": "save one picture of all of them: .png, .svg, .pdf"},
    "--json": {"metavar": "FILE", "help": "save the figures as JSON"},
}


def run_scale(options: Any) -> Outcome:
    """Sum up the histories, several side by side."""
    from lightning_amp.reports import plot_histories

    histories = {path.rstrip("/").removesuffix(f"/{_HISTORY}") or path: _read(path) for path in options.FILE}
    figures = {label: _figures(history) for label, history in histories.items()}
    header = ["run", *(name.replace("_", " ") for name in next(iter(figures.values())))]
    rows = [[label, *map(_shown, own.values())] for label, own in figures.items()]
    parts = [f"`{label}`: {history.summary()}" for label, history in histories.items()]
    data = [{"run": label, "summary": histories[label].summary(), **own} for label, own in figures.items()]
    plot, figures_file = partial(plot_histories, histories), partial(write_json, data=plain({"runs": data}, null))
    files = {"--plot": plot, "--json": figures_file}
    return Outcome("\n\n".join([*parts, str(Table(header, rows))]) + "\n", files)


def _read(path: str) -> ScaleHistory:
    """Read a history from a file, a folder, or a URL, which is a folder unless it ends in `.csv`."""
    from lightning_amp.reports import ScaleHistory

    place = location(path, "FILE")
    is_folder = place.is_dir() if isinstance(place, Path) else not place.endswith(".csv")
    file = child(place, _HISTORY) if is_folder else place
    try:
        return ScaleHistory.from_csv(file)
    except OSError as error:
        rule = "FILE is a file that `ScaleMonitor(dirpath=...)` writes, or its folder"
        raise UsageError(f"`{file}` cannot be read: {type(error).__name__}: {error}; {rule}") from error


def _figures(history: ScaleHistory) -> dict[str, Any]:
    """Return the numbers of a run; scales are `None` if it has no record."""
    records = list(history)
    scales = [scale for record in records for scale in (record.scale, record.next_scale)]
    reasons = [record.reason for record in records if record.skipped]
    return {
        "steps": history.num_attempted,
        "skipped": len(reasons),
        "skipped_gradient": reasons.count("gradient"),
        "skipped_loss": reasons.count("loss"),
        "first_scale": scales[0] if scales else None,
        "last_scale": scales[-1] if scales else None,
        "lowest_scale": min(scales, default=None),
        "highest_scale": max(scales, default=None),
    }


def _shown(value: float | None) -> str:
    return "-" if value is None else exact(value) if isinstance(value, float) else f"{value:,}"


COMMANDS = {
    "batch-size": Command(
        "find the largest batch that fits into memory", BATCH_SIZE, BATCH_SIZE_OPTIONS, run_batch_size
    ),
    "compare": Command(
        "train a module in several precisions, and say which one to use", COMPARE, COMPARE_OPTIONS, run_compare
    ),
    "doctor": Command("measure this machine, and say why a module is not faster", DOCTOR, DOCTOR_OPTIONS, run_doctor),
    "fp32-modules": Command(
        "find the modules that must stay in fp32", FP32_MODULES, FP32_MODULES_OPTIONS, run_fp32_modules
    ),
    "scale": Command("show saved scale histories", SCALE, SCALE_OPTIONS, run_scale),
}
