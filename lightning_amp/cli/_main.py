"""`lightning-amp`: run a command, and turn every error into an exit status and one line."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib
import inspect
import os
import re
import sys
import traceback
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lightning_amp._compat._messages import short_class_names
from lightning_amp.cli._commands import CLASS_OPTIONS
from lightning_amp.cli._errors import (
    CRASHED,
    FINE,
    INTERRUPTED,
    PIPE_CLOSED,
    TO_DO,
    WRONG_USE,
    UsageError,
    usage_error,
)
from lightning_amp.cli._output import check_output, require_extra, save, show

NAME = "lightning-amp"
DEBUG = "LIGHTNING_AMP_DEBUG"

COMMANDS = {
    "batch-size": "find the largest batch that fits into memory, in each precision",
    "compare": "train a module in several precisions, and say which one to use",
    "doctor": "measure this machine, and say why a module is not faster",
    "fp32-modules": "find the modules that must stay in fp32",
    "scale": "show saved scale histories",
}
_OUTPUTS = ("json", "html", "plot")
"""Options that name a file to write. They are checked before any work is done."""

_EXIT_STATUS = f"""\
exit status: {FINE} fine; {TO_DO} something to do (a finding that is a warning, a
verdict "worse", a run that failed, modules that need fp32); {WRONG_USE} wrong use,
with one line on stderr; {CRASHED} an error inside of {NAME}; {INTERRUPTED} interrupted.
`--debug`, or the environment variable {DEBUG}=1, shows the
traceback of an error."""

_NOISE = re.compile(
    r"does not validate against any|subtypes:|errors:|expected a <class 'nonetype'>|expected a (?:config )?path but|"
    r"given value type:|given value:|$",
    re.IGNORECASE,
)
"""Lines in errors of jsonargparse that do not help a user. They differ between versions."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; `None` reads the command line of the process.

    Returns:
        The exit status. This function never raises.

    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in given or bool(os.environ.get(DEBUG))
    given = [argument for argument in given if argument != "--debug"]
    name = f"{NAME} {given[0]}" if given and given[0] in COMMANDS else NAME
    try:
        status = _run(given)
        # otherwise the interpreter flushes stdout at its end, and prints an error if the pipe is closed
        sys.stdout.flush()
    except BrokenPipeError:
        return PIPE_CLOSED
    except KeyboardInterrupt as error:
        return _say(name, str(error) or "interrupted", INTERRUPTED, debug=debug)
    except UsageError as error:
        return _say(name, str(error), WRONG_USE, debug=debug)
    except Exception as error:
        advice = "" if debug else f" Please report it, with what the same command prints with `--debug` ({DEBUG}=1)."
        text = f"this is an error of {NAME} itself: {type(error).__name__}: {error}."
        return _say(name, f"{text}{advice}", CRASHED, debug=debug)
    return status


def _run(arguments: list[str]) -> int:
    require_extra("jsonargparse", "docstring_parser", "typeshed_client", "rich")
    from jsonargparse import ArgumentParser

    from lightning_amp import __version__

    settings: dict[str, Any] = {"allow_abbrev": False, "formatter_class": argparse.RawDescriptionHelpFormatter}
    top: dict[str, Any] = {"version": __version__, "description": "Choose a precision, and see what it did."}
    parser = ArgumentParser(prog=NAME, epilog=_EXIT_STATUS, exit_on_error=False, **top, **settings)
    commands = parser.add_subcommands(metavar="COMMAND")
    name = arguments[0] if arguments and arguments[0] in COMMANDS else ""
    file = importlib.import_module(f"lightning_amp.cli.{'_saved_scales' if name == 'scale' else '_commands'}")
    constant, own = name.upper().replace("-", "_"), parser
    options: dict[str, dict[str, Any]] = getattr(file, f"{constant}_OPTIONS", {})
    for command, what in COMMANDS.items():
        made = ArgumentParser(exit_on_error=False, **settings)
        if command == name:
            settings |= {"usage": f"{NAME} {name} [options]", "description": getattr(file, constant)}
            made, arguments = _own_parser(arguments, options, settings)
            own = made
        commands.add_subcommand(command, made, help=what)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # warnings of jsonargparse about Lightning
            parsed = parser.parse_args(arguments)
    except SystemExit:  # `--help`, `--version`
        return FINE
    except Exception as error:
        names = [*options, *CLASS_OPTIONS, *(f"--{key}" for key in own.get_defaults().keys() if "." in key)]  # noqa: SIM118
        raise UsageError(_one_line(str(error), arguments, names)) from error
    found = parsed[name]
    paths: Mapping[str, str | None] = {f"--{option}": found.get(option) for option in _OUTPUTS}
    for option, path in paths.items():
        check_output(option, path)
    try:
        outcome = getattr(file, f"run_{constant.lower()}")(found)
    except (BrokenPipeError, UsageError):
        raise
    except Exception as error:
        wrong = usage_error(error)
        if wrong is None:
            raise
        raise wrong from error
    for option, write_file in outcome.files.items():
        if path := paths[option]:
            save(option, path, write_file)
    show(outcome.markdown)
    return TO_DO if outcome.has_work else FINE


def _own_parser(arguments: list[str], options: Mapping[str, Any], settings: dict[str, Any]) -> tuple[Any, list[str]]:
    """Return the parser of a command, and the arguments with the YAML files in front."""
    name, *others = arguments
    wants_help = bool({"--help", "-h"} & {*others})
    # without a module, `doctor` looks at the machine
    has_classes = name != "doctor" or any(argument.partition("=")[0] in CLASS_OPTIONS for argument in others)
    if has_classes and name != "scale" and not wants_help:
        from lightning_amp.cli._classes import class_parser, with_configs

        parser, others = class_parser(**settings), with_configs(others)
    else:
        from jsonargparse import ArgumentParser

        parser = ArgumentParser(exit_on_error=False, **settings)
        options = {**CLASS_OPTIONS, **options} if wants_help and name != "scale" else options
    for option, how in options.items():
        parser.add_argument(option, **how)
    return parser, [name, *others]


def _one_line(text: str, arguments: Sequence[str], names: Sequence[str]) -> str:
    """Turn an error of jsonargparse, which may have many lines, into one line, with the nearest legal name."""
    if not arguments or arguments[0] not in COMMANDS:
        what = f"{arguments[0]!r} is no command" if arguments else "a command is missing"
        near = _nearest(arguments[0], COMMANDS) if arguments else ""
        return f"{what}{near}; there are {', '.join(COMMANDS)} (`{NAME} --help` says what they do)"
    lines = [line.strip().removeprefix("- ") for line in text.splitlines()]
    text = short_class_names("; ".join(line for line in lines if not _NOISE.match(line)).replace(":; ", ": "))
    key = re.match(r"Parser key \"([\w.]+)\":", text)
    if key is not None:
        option = key[1] if "." in key[1] else key[1].replace("_", "-")
        text = f"--{option}:{text[key.end() :]}".replace("Expected a int", "Expected an int")
    text = re.sub(rf"\b{arguments[0]}\.([a-z]\w*)", r"--\1", text).replace(f"{arguments[0]}.", "")
    found = re.search(r"nrecognized arguments: (--[\w.-]+)|not accept option '([\w.]+)'|'(\w+)' is not accepted", text)
    if found is None:
        return text
    if found[3] is not None:
        names = _arguments_of(text)
        return f"{text}{_nearest(found[3], names)}; it takes {', '.join(names)}"
    near = _nearest(found[1] or f"--{found[2]}", names)
    return f"{text}{near or f'; `{NAME} {arguments[0]} --help` lists the options'}"


def _arguments_of(text: str) -> list[str]:
    """Return the names of the arguments of the last class that a message names."""
    module, _, name = re.findall(r"class_path '([\w.]+)'", text)[-1].rpartition(".")
    return list(inspect.signature(getattr(importlib.import_module(module), name)).parameters)


def _nearest(name: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(names), n=1)
    return f"; did you mean {near[0]}?" if near else ""


def _say(name: str, text: str, status: int, *, debug: bool) -> int:
    """Write one line to stderr, even if stderr is closed; return the status."""
    with contextlib.suppress(OSError):
        if debug:
            traceback.print_exc()
        sys.stderr.write(f"{name}: {' '.join(text.split())}\n")
        sys.stderr.flush()
    return status
