"""`lightning-amp doctor`: what this machine can do, and why a module is not faster."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from lightning_amp.cli._class_options import CLASS_OPTIONS, user_classes
from lightning_amp.cli._exits import FINE, TO_DO
from lightning_amp.cli._markdown import markdown
from lightning_amp.cli._output import check_output, note, require_extra, save, show
from lightning_amp.cli._parser import Parser
from lightning_amp.cli._user_errors import users_errors

if TYPE_CHECKING:
    from rich.console import RenderableType

_NAME = "lightning-amp doctor"
_COLOURS = {"error": "bold red", "warning": "bold yellow", "note": "cyan", "ok": "green"}

_DESCRIPTION = """\
Measure what this machine can do in each precision. With a module and its data,
say why mixed precision is not faster, or saves no memory: a few steps are
trained and recorded here, and what is advised is tried.

--model and --data take a class path; its arguments follow, as those of a
LightningCLI do: --model.width 64, --trainer.max_epochs 2, --optimizer SGD.
--config takes the YAML of a LightningCLI; the command line wins over it."""

_EPILOG = """\
  lightning-amp doctor
  lightning-amp doctor --model models.Net --model.width 64 --data models.Data \\
      --precision bf16

Exit status: 0, or 1 if a finding is a warning or an error."""

_OPTIONS: dict[str, dict[str, Any]] = {
    **CLASS_OPTIONS,
    "--precision": {"metavar": "NAME", "help": "what is looked at; default: auto", "default": "auto"},
    "--device": {"metavar": "NAME", "help": "where: cpu, cuda:0; default: where a Trainer would train"},
    "--json": {"metavar": "FILE", "help": "save all that was measured as JSON"},
}


def run(arguments: Sequence[str]) -> int:
    """Run the command; returns its exit status."""
    parser = Parser(_NAME, _DESCRIPTION, _EPILOG, usage=f"{_NAME} [--model CLASS --data CLASS] [options]")
    for option, settings in _OPTIONS.items():
        parser.add_argument(option, **settings)
    options, others = parser.parse_known_args(arguments)
    require_extra("rich")
    check_output("--json", options.json)
    if options.model is None and options.data is None and not options.config:
        if others:
            parser.error(f"unrecognized arguments: {' '.join(others)}")
        report = _doctor(options, None, None)
    else:
        user, seed = user_classes(_NAME, options, others)
        note(f"{_NAME}: training some steps of {user.make_module!r}")
        report = _doctor(options, user, seed)
    if options.json:
        save("--json", options.json, report.to_json)
    show(_text(report))
    return TO_DO if report.has_problems else FINE


def _doctor(options: Any, user: Any, seed: int | None) -> Any:
    from lightning_amp import doctor

    where = {"precision": options.precision, "device": options.device}
    with users_errors():
        if user is None:
            return doctor(**where)
        from lightning.pytorch import seed_everything

        seed_everything(seed or 0, verbose=False)
        return doctor(user.make_module, user.make_data, **where, trainer_kwargs=user.made_trainer_kwargs())


def _text(report: Any) -> Iterator[RenderableType]:
    from rich.table import Table
    from rich.text import Text

    from lightning_amp.advice import SIGNS, details, summary, title

    yield Text(title(report.machine, report.step), style="bold")
    if report.step is not None:
        yield from ("", Text(summary(report.step)))
    yield ""
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
    for block in details(report.machine, report.step):
        yield from markdown(block)
        yield ""
