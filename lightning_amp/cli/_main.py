"""`lightning-amp`: run a command, and turn every error into an exit status and one line."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import inspect
import os
import pkgutil
import re
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import Any

from lightning_amp._compat._messages import short_class_names
from lightning_amp.cli._commands import CLASS_OPTIONS, COMMANDS
from lightning_amp.cli._output import UsageError, check_output, require_extra, save, show, usage_error

NAME = "lightning-amp"
DEBUG = "LIGHTNING_AMP_DEBUG"

FINE, TO_DO, WRONG_USE = 0, 1, 2
CRASHED = 70
"""Exit status for an error of this package, different from `TO_DO`; `EX_SOFTWARE` of sysexits.h."""
INTERRUPTED, PIPE_CLOSED = 130, 141
"""Exit statuses after Ctrl-C, and if the reader of the output is gone (`| head`): 128 plus the number of the signal."""

_OUTPUTS = ("json", "html", "plot")
"""Options that name a file to write. They are checked before any work is done."""

_EXIT_STATUS = f"""\
exit status: {FINE} fine; {TO_DO} something to do (a finding that is a warning, a
verdict "worse", a run that failed, modules that need fp32); {WRONG_USE} wrong use,
with one line on stderr; {CRASHED} an error inside of {NAME}; {INTERRUPTED} interrupted.
The environment variable {DEBUG}=1 shows the traceback of an error."""

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
    try:
        return _run(given)
    except BrokenPipeError:
        return PIPE_CLOSED
    except KeyboardInterrupt:
        status, text = INTERRUPTED, "interrupted"
    except Exception as error:
        wrong = error if isinstance(error, UsageError) else usage_error(error)
        status, text = WRONG_USE, " ".join([str(wrong), *getattr(error, "__notes__", ())])
        if wrong is None:
            text = f"this is an error of {NAME} itself: {type(error).__name__}: {error}. Please report it, with what"
            status, text = CRASHED, f"{text} the same command prints if {DEBUG}=1."
        if os.environ.get(DEBUG):
            traceback.print_exc()
    name = f"{NAME} {given[0]}" if given and given[0] in COMMANDS else NAME
    with contextlib.suppress(OSError):  # stderr is closed
        sys.stderr.write(f"{name}: {' '.join(text.split())}\n")
        sys.stderr.flush()
    return status


def _run(arguments: Sequence[str]) -> int:
    require_extra("jsonargparse", "docstring_parser", "typeshed_client", "rich")
    from jsonargparse import ArgumentParser

    from lightning_amp import __version__

    settings: dict[str, Any] = {"allow_abbrev": False, "exit_on_error": False}
    settings["formatter_class"] = argparse.RawDescriptionHelpFormatter
    top: dict[str, Any] = {"version": __version__, "description": "Choose a precision, and see what it did."}
    parser = ArgumentParser(prog=NAME, epilog=_EXIT_STATUS, **top, **settings)
    commands = parser.add_subcommands(metavar="COMMAND")
    name, others = (arguments[0], list(arguments[1:])) if arguments else ("", [])
    own = parser
    for command, (what, *_) in COMMANDS.items():
        made = ArgumentParser(exit_on_error=False)
        if command == name:
            made, others = _own_parser(name, others, settings)
            own = made
        commands.add_subcommand(command, made, help=what)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # warnings of jsonargparse about Lightning
            found = parser.parse_args([*arguments[:1], *others])[name]
    except SystemExit as error:  # `--help`, `--version`
        if error.code:
            raise UsageError(f"importing a class ended with `sys.exit({error.code!r})`") from error
        return FINE
    except Exception as error:
        near = [] if name in COMMANDS else difflib.get_close_matches(name, COMMANDS, n=1)
        raise UsageError(_one_line(str(error), name, own) + "".join(f"; did you mean {n}?" for n in near)) from error
    paths = {f"--{option}": found.get(option) for option in _OUTPUTS}
    for option, path in paths.items():
        check_output(option, path)
    outcome = COMMANDS[name].run(found)
    for option, write_file in outcome.files.items():
        if path := paths[option]:
            save(option, path, write_file)
    show(outcome.markdown)
    return TO_DO if outcome.has_work else FINE


def _own_parser(name: str, arguments: list[str], settings: dict[str, Any]) -> tuple[Any, list[str]]:
    """Return the parser of a command, and its arguments with the text of each YAML file."""
    from jsonargparse import ArgumentParser

    _, description, options, _ = COMMANDS[name]
    settings = {**settings, "usage": f"{NAME} {name} [options]", "description": description}
    wants_help = not {"--help", "-h"}.isdisjoint(arguments)
    # without a module, `doctor` looks at the machine
    has_classes = name != "doctor" or any(argument.partition("=")[0] in CLASS_OPTIONS for argument in arguments)
    if has_classes and name != "scale" and not wants_help:
        from lightning_amp.cli._configs import use_kind, with_configs

        arguments = with_configs(arguments)
        use_kind(arguments)
        from lightning_amp.cli._classes import class_parser

        parser = class_parser(**settings)
    else:
        parser = ArgumentParser(**settings)
        options = {**CLASS_OPTIONS, **options} if wants_help and name != "scale" else options
    for option, how in options.items():
        parser.add_argument(option, **how)
    return parser, arguments


def _option(key: str) -> str:
    return key if "." in key else key.replace("_", "-")


def _one_line(text: str, command: str, parser: Any) -> str:
    """Turn an error of jsonargparse, which may have many lines, into one line that says what is legal."""
    lines = [line.strip().removeprefix("- ") for line in text.splitlines()]
    text = short_class_names("; ".join(line for line in lines if not _NOISE.match(line)).replace(":; ", ": "))
    keys = rf"Parser key \"([\w.]+)\"|\b{command}\.(?=[a-z])"
    text = re.sub(keys, lambda found: f"--{_option(found[1] or '')}", text)
    text = text.replace(f"{command}.", "")
    found = re.search(r"arguments: --([\w.-]+)|option '([\w.]+)'", text, re.IGNORECASE)
    if found is None:
        return text
    classes = re.findall(r"class_path '([\w.]+)'", text)
    legal = [*map(_option, parser.get_defaults().keys()), *(option.removeprefix("--") for option in CLASS_OPTIONS)]
    names = list(inspect.signature(pkgutil.resolve_name(classes[-1])).parameters) if classes else legal
    near = difflib.get_close_matches(found[1] or found[2], names, n=1)
    rest = f"it takes {', '.join(names)}" if classes else "`--help` lists the options"
    meant = f"; did you mean {'' if classes else '--'}{near[0]}?" if near else ""
    return f"{text}{meant}; {rest}"
