"""`lightning-amp doctor`: measure this machine, and say why a module is not faster."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from lightning_amp.cli._errors import users_errors
from lightning_amp.cli._output import laid_out, note, require_extra
from lightning_amp.cli._runner import CLASS_OPTIONS, Command, Outcome, Request

if TYPE_CHECKING:
    from rich.console import RenderableType

_COLOURS = {"error": "bold red", "warning": "bold yellow", "note": "cyan", "ok": "green"}

_DESCRIPTION = """\
Measure what this machine can do in each precision. With a module and its data,
say why mixed precision is not faster or saves no memory. For this, the command
trains and records a few steps here, and tries its advice.

--model and --data take a class path; the arguments of the class follow, as in a
LightningCLI: --model.width 64, --trainer.max_epochs 2, --optimizer SGD.
--config takes the YAML of a LightningCLI; the command line overrides it."""

_EPILOG = """\
  lightning-amp doctor
  lightning-amp doctor --model models.Net --model.width 64 --data models.Data \\
      --precision bf16

Exit status: 0, or 1 if a finding is a warning or an error."""

_OPTIONS: dict[str, dict[str, Any]] = {
    **CLASS_OPTIONS,
    "--precision": {"metavar": "NAME", "help": "the precision to examine; default: auto", "default": "auto"},
    "--device": {"metavar": "NAME", "help": "cpu or cuda:0, for example; default: where a Trainer would train"},
    "--json": {"metavar": "FILE", "help": "save all measurements as JSON"},
}


def _run(request: Request) -> Outcome:
    options = request.options
    require_extra("rich")
    user = None
    if options.model is not None or options.data is not None or options.config:
        user = request.user_classes()
        note(f"{request.command}: training some steps of {user.make_module!r}")
    elif request.others:
        request.parser.error(f"unrecognized arguments: {' '.join(request.others)}")
    from lightning_amp import doctor

    where = {"precision": options.precision, "device": options.device}
    with users_errors():
        if user is None:
            report = doctor(**where)
        else:
            from lightning.pytorch import seed_everything

            seed_everything(user.seed, verbose=False)
            report = doctor(user.make_module, user.make_data, **where, trainer_kwargs=user.made_trainer_kwargs())
    return Outcome(_text(report), files={"--json": report.to_json}, has_work=report.has_problems)


def _text(report: Any) -> Iterator[RenderableType]:
    from rich.table import Table
    from rich.text import Text

    from lightning_amp.advice import SIGNS

    yield from (Text(report.title, style="bold"), "", Text(report.headline), "")
    for finding in report.findings:
        grid = Table.grid(padding=(0, 1))
        grid.add_column(no_wrap=True)
        grid.add_column()
        colour = _COLOURS[finding.severity]
        head = Text.assemble((finding.code, colour), " ", (f"({finding.severity})", "dim"))
        grid.add_row(Text(SIGNS[finding.severity], style=colour), head)
        grid.add_row("", Text(finding.message))
        if finding.action:
            grid.add_row("", Text(f"-> {finding.action}", style="bold"))
        yield grid
        yield ""
    yield from laid_out(report.details())
    yield ""


COMMAND = Command(
    "lightning-amp doctor",
    _DESCRIPTION,
    _EPILOG,
    _OPTIONS,
    _run,
    usage="lightning-amp doctor [--model CLASS --data CLASS] [options]",
)
