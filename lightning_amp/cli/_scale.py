"""`lightning-amp scale`: show the loss scale of saved runs, and replay another scale policy over them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_amp._files import child, is_url, location
from lightning_amp._text import exact, literal, percent, span
from lightning_amp.cli._errors import UsageError
from lightning_amp.cli._output import WIDEST, json_writer, output_width, paragraph, require_extra, table
from lightning_amp.cli._runner import Command, Outcome, Request
from lightning_amp.reports import SCALE_HISTORY_FILE, PolicyReplay, ScaleHistory, plot_histories, scale_chart
from lightning_amp.scaling import POLICY_SETTINGS, scaler_of_policy

if TYPE_CHECKING:
    from rich.console import RenderableType

_POWER = re.compile(r"([\d.]+)\*\*(-?\d+)")

_DESCRIPTION = f"""\
Sum up the loss scale of saved runs, draw it, and replay another scale policy.

FILE is a file of ScaleMonitor(dirpath=...) or history.to_csv(...), or a folder
with a {SCALE_HISTORY_FILE}; URLs work too. Marks in the picture: `v` a step
skipped because gradients overflowed; `x` because the loss was not finite; `*`
both; `>` a stuck run that went on in another precision."""

_EPILOG = f"""\
--policy takes settings of DynamicLossScaler:
  {", ".join(POLICY_SETTINGS[:4])},
  {", ".join(POLICY_SETTINGS[4:])}.
A setting that is not given has its default; init_scale is then as recorded.

  lightning-amp scale logs/run1 logs/run2 --plot scales.png
  lightning-amp scale logs/run1 --policy init_scale=2**12 growth_interval=500"""


_OPTIONS: dict[str, dict[str, Any]] = {
    "files": {"nargs": "+", "metavar": "FILE", "help": "a scale history, or the folder it is in"},
    "--policy": {"nargs": "+", "default": [], "metavar": "NAME=VALUE", "help": "replay another scale policy"},
    "--plot": {"metavar": "FILE", "help": "save one picture of all of them: .png, .svg, .pdf"},
    "--json": {"metavar": "FILE", "help": "save the figures as JSON"},
}


def _run(request: Request) -> Outcome:
    require_extra("rich")
    policy = _policy(request.options.policy)
    histories = {_label(path): _read(path) for path in request.options.files}
    replays = {label: _replay(label, history, policy) for label, history in histories.items()} if policy else {}
    files = {
        "--plot": lambda path: plot_histories(histories, path, replays=replays),
        "--json": json_writer(_data(histories, replays)),
    }
    return Outcome(chain(_text(histories), _replay_text(replays)), files=files)


# -- reading -----------------------------------------------------------------------------------------------------------


def _policy(settings: Sequence[str]) -> dict[str, float]:
    """Read `name=value` pairs, and check that they are settings of a policy."""
    policy: dict[str, float] = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals:
            raise UsageError(f"--policy takes NAME=VALUE, got {setting!r}; files come before it")
        policy[name] = _number(name, value)
    try:
        scaler_of_policy(policy, policy.get("init_scale", 1.0))
    except ValueError as error:
        raise UsageError(f"--policy: {error}") from error
    return policy


def _number(name: str, text: str) -> float:
    """Read `500`, `0.5`, `1e3` or `2**16`."""
    power = _POWER.fullmatch(text)
    try:
        if power is not None:
            return float(power[1]) ** int(power[2])
        return int(text) if re.fullmatch(r"[-+]?\d+", text) else float(text)
    except (ValueError, OverflowError) as error:
        raise UsageError(f"--policy: {name} must be a number such as 500, 0.5 or 2**16, got {text!r}") from error


def _label(path: str) -> str:
    """Return the label of a run: its path, without the name that all such files have."""
    short = path.rstrip("/").removesuffix(f"/{SCALE_HISTORY_FILE}")
    return short or path


def _read(path: str) -> ScaleHistory:
    """Read a history from a file, a folder, or a URL, which is a folder unless it ends in `.csv`."""
    try:
        place = location(path, "FILE")
        is_folder = place.is_dir() if isinstance(place, Path) else not place.endswith(".csv")
        file = child(place, SCALE_HISTORY_FILE) if is_folder else place
        if isinstance(file, Path) and not file.exists():
            what = f"the folder `{path}` has no {SCALE_HISTORY_FILE}" if is_folder else f"there is no file `{path}`"
            raise UsageError(f"{what}; FILE is a file that `ScaleMonitor(dirpath=...)` writes, or its folder")
        return ScaleHistory.from_csv(file)
    except (ValueError, ImportError) as error:
        raise UsageError(str(error)) from error
    except UsageError:
        raise
    except Exception as error:
        if isinstance(error, OSError) or is_url(path):  # each fsspec driver raises its own exceptions
            raise UsageError(f"`{path}` cannot be read: {type(error).__name__}: {error}") from error
        raise


def _replay(label: str, history: ScaleHistory, policy: Mapping[str, Any]) -> PolicyReplay:
    try:
        return history.replay(**policy)
    except ValueError as error:
        raise UsageError(f"--policy, `{label}`: {error}") from error


# -- text --------------------------------------------------------------------------------------------------------------


def _text(histories: Mapping[str, ScaleHistory]) -> Iterator[RenderableType]:
    from rich.text import Text

    width = min(output_width(), WIDEST)
    for label, history in histories.items():
        yield Text.assemble((label, "bold"), f": {history.summary()}")
        yield ""
        if history.last is not None:
            yield Text(scale_chart(history, width), no_wrap=True)
            yield ""
    header = ("run", "steps", "skipped", "gradient", "loss", "first", "last", "lowest", "highest")
    yield table(header, [_row(label, history) for label, history in histories.items()])


def _row(label: str, history: ScaleHistory) -> list[str]:
    figures = _figures(history)
    counts = [figures[name] for name in ("steps", "skipped", "skipped_gradient", "skipped_loss")]
    scales = [figures[name] for name in ("first_scale", "last_scale", "lowest_scale", "highest_scale")]
    return [label, *(f"{count:,}" for count in counts), *("-" if scale is None else exact(scale) for scale in scales)]


def _replay_text(replays: Mapping[str, PolicyReplay]) -> Iterator[RenderableType]:
    if not replays:
        return
    yield ""
    yield paragraph(f"Replayed with {_policy_text(list(replays.values()))}.")
    yield ""
    rows = [_replay_row(label, replay) for label, replay in replays.items()]
    header = ["run", "skipped", "in the record", "decided by it", "last scale", "stops at step"]
    shown = len(header) if any(row[-1] for row in rows) else len(header) - 1
    yield table(header[:shown], [row[:shown] for row in rows])
    yield ""
    same = [f"`{label}`" for label, replay in replays.items() if replay.equals_record]
    if same:
        yield paragraph(f"Equal to the record, step by step: {', '.join(same)}.")
    yield paragraph(PolicyReplay.LIMITS)


def _replay_row(label: str, replay: PolicyReplay) -> list[str]:
    lasts = sorted(history.last.next_scale for history in (replay.optimistic, replay.pessimistic) if history.last)
    stops = sorted(step for step in replay.stopped_at if step is not None)
    where = span([f"{step:,}" for step in stops])
    return [
        label,
        span([f"{number:,}" for number in sorted(replay.num_skipped)]),
        f"{replay.recorded.num_skipped:,}",
        span([percent(fraction) for fraction in sorted(replay.decided_fraction)]),
        span([exact(scale) for scale in lasts]),
        where if len(stops) != 1 else f"{where} or never",
    ]


def _policy_text(replays: Sequence[PolicyReplay]) -> str:
    """Write the settings; `init_scale` only if it is the same in all replays."""
    policies = [replay.policy for replay in replays]
    differ = any(policy["init_scale"] != policies[0]["init_scale"] for policy in policies)
    settings = [
        f"{name}={literal(value)}" for name, value in policies[0].items() if not (differ and name == "init_scale")
    ]
    return ", ".join(["init_scale as recorded", *settings] if differ else settings)


# -- JSON --------------------------------------------------------------------------------------------------------------


def _data(histories: Mapping[str, ScaleHistory], replays: Mapping[str, PolicyReplay]) -> dict[str, Any]:
    runs = [
        {
            "run": label,
            "summary": history.summary(),
            **_figures(history),
            "replay": _replay_data(replays[label]) if label in replays else None,
        }
        for label, history in histories.items()
    ]
    return {"runs": runs, "what_a_replay_cannot_know": PolicyReplay.LIMITS if replays else None}


def _figures(history: ScaleHistory) -> dict[str, Any]:
    """Return the numbers of a run; scales are `None` if it has no record."""
    records = list(history)
    scales = [scale for record in history.before_fallback() for scale in (record.scale, record.next_scale)]
    skipped = [record.reason for record in records if record.skipped]
    fallbacks = [{"step": record.index, "precision": record.precision} for record in history.fallbacks]
    return {
        "steps": history.num_attempted,
        "applied": history.num_steps,
        "skipped": len(skipped),
        "skipped_gradient": skipped.count("gradient"),
        "skipped_loss": skipped.count("loss"),
        "first_scale": scales[0] if scales else None,
        "last_scale": scales[-1] if scales else None,
        "lowest_scale": min(scales, default=None),
        "highest_scale": max(scales, default=None),
        **({"fallbacks": fallbacks} if fallbacks else {}),
    }


def _replay_data(replay: PolicyReplay) -> dict[str, Any]:
    return {
        "policy": dict(replay.policy),
        "summary": replay.summary(),
        "equals_record": replay.equals_record,
        **{
            name: {**_figures(history), "decided_fraction": decided, "stopped_at": stopped}
            for name, history, decided, stopped in zip(
                ("optimistic", "pessimistic"),
                (replay.optimistic, replay.pessimistic),
                replay.decided_fraction,
                replay.stopped_at,
                strict=True,
            )
        },
    }


COMMAND = Command(
    "lightning-amp scale", _DESCRIPTION, _EPILOG, _OPTIONS, _run, outputs=("--plot", "--json"), takes_others=False
)
