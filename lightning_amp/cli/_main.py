"""`lightning-amp`: run a command, and turn every error into an exit status and one line."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import traceback
from collections.abc import Sequence

from lightning_amp.cli._errors import CRASHED, FINE, INTERRUPTED, PIPE_CLOSED, TO_DO, WRONG_USE, Interrupted, UsageError
from lightning_amp.cli._output import write
from lightning_amp.cli._runner import HelpShown, Parser, run

NAME = "lightning-amp"
DEBUG = "LIGHTNING_AMP_DEBUG"

COMMANDS = {
    "batch-size": "find the largest batch that fits into memory, in each precision",
    "compare": "train a module in several precisions, and say which one to use",
    "doctor": "measure this machine, and say why a module is not faster",
    "fp32-modules": "find the modules that must stay in fp32",
    "scale": "show saved scale histories, and replay other scale policies",
}
"""The description of each command. The command itself is `COMMAND` of the file with its name, imported on use."""

_EXIT_STATUS = f"""\
exit status: {FINE} fine; {TO_DO} something to do (a finding that is a warning, a
verdict "worse", a run that failed, modules that need fp32); {WRONG_USE} wrong use,
with one line on stderr; {CRASHED} an error inside of {NAME}; {INTERRUPTED} interrupted.
`--debug`, or the environment variable {DEBUG}=1, shows the
traceback of an error."""


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
        try:
            status = _run(given)
        except HelpShown:
            status = FINE
        # otherwise the interpreter flushes stdout at its end, and prints an error if the pipe is closed
        sys.stdout.flush()
    except BrokenPipeError:
        return PIPE_CLOSED
    except (Interrupted, KeyboardInterrupt) as error:
        return _say(name, str(error) or "interrupted", INTERRUPTED, debug=debug)
    except UsageError as error:
        return _say(name, str(error), WRONG_USE, debug=debug)
    except Exception as error:
        advice = "" if debug else f" Please report it, with what the same command prints with `--debug` ({DEBUG}=1)."
        text = f"this is an error of {NAME} itself: {type(error).__name__}: {error}."
        return _say(name, f"{text}{advice}", CRASHED, debug=debug)
    return status


def _run(arguments: list[str]) -> int:
    if arguments and arguments[0] in COMMANDS:
        file = importlib.import_module(f"lightning_amp.cli._{arguments[0].replace('-', '_')}")
        return run(file.COMMAND, arguments[1:])
    listed = "\n".join(f"  {command:12} {what}" for command, what in COMMANDS.items())
    parser = Parser(
        NAME,
        f"Choose a precision, and see what it did.\n\ncommands:\n{listed}",
        _EXIT_STATUS,
        usage=f"{NAME} COMMAND ...   ({NAME} COMMAND --help says more)",
    )
    parser.add_argument("--version", action="store_true", help="show the version, and exit")
    options, others = parser.parse_known_args(arguments)
    if options.version:
        from lightning_amp import __version__

        write(f"{__version__}\n")
        return FINE
    what = f"{others[0]!r} is no command" if others else "a command is missing"
    raise UsageError(f"{what}; there are {', '.join(COMMANDS)} (`{NAME} --help` says what they do)")


def _say(name: str, text: str, status: int, *, debug: bool) -> int:
    """Write one line to stderr, even if stderr is closed; return the status."""
    with contextlib.suppress(OSError):
        if debug:
            traceback.print_exc()
        sys.stderr.write(f"{name}: {' '.join(text.split())}\n")
        sys.stderr.flush()
    return status
