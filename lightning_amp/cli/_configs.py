"""Read a command line's YAML files, and choose the kind of Lightning by the user's classes before importing it."""

from __future__ import annotations

import contextlib
import json
import os
import pkgutil
import re
import sys
from collections.abc import Sequence

from lightning_amp._compat import _names
from lightning_amp._files import open_text
from lightning_amp.cli._output import UsageError

_SECTIONS = ("trainer", "model", "data", "optimizer", "lr_scheduler")
_IGNORED = ("seed_everything", "ckpt_path", "weights_only", "verbose", "return_predictions")
"""Keys of a YAML of a LightningCLI besides its sections."""


def use_kind(arguments: Sequence[str]) -> None:
    """Choose the kind of Lightning by the class of the module. A later import of it would be too late."""
    if not getattr(sys.flags, "safe_path", False) and os.getcwd() not in sys.path:  # as `python -m` does
        sys.path.insert(0, os.getcwd())
    options = re.compile(r"^--(model|model\.class_path|config)[=\n](.*)$", re.MULTILINE)
    for option, value in options.findall("\n".join(arguments)):
        model, kind = json.loads(value).get("model") if option == "config" else value, None
        with contextlib.suppress(Exception, SystemExit):  # the parser says what is wrong
            path = model["class_path"] if isinstance(model, dict) else model
            kind = _names.kind_of(pkgutil.resolve_name(path))
        if kind is not None:
            _names.use(kind)


def with_configs(arguments: Sequence[str]) -> list[str]:
    """Return arguments in which the name of each YAML is replaced by the text that the parser of a command takes."""
    found, left = list[str](), iter(arguments)
    for argument in left:
        option, equals, value = argument.partition("=")
        is_config = option == "--config"
        found.append(f"--config={_read(value if equals else next(left, ''))}" if is_config else argument)
    return found


def _read(path: str) -> str:
    """Read a file that a `LightningCLI` takes, with or without `fit:` around it; the path may be a URL."""
    from jsonargparse import get_loader

    try:
        with open_text(path, "--config") as file:
            read = get_loader("yaml")(file.read())
        found = dict(read.get("fit", read))
        trainer = found["trainer"] = dict(found.get("trainer") or {})
    except Exception as error:  # of YAML, of an fsspec driver, or a text in place of a mapping
        rule = f"it must be a YAML with {', '.join(_SECTIONS)}"
        raise UsageError(f"--config {path} cannot be read: {type(error).__name__}: {error}; {rule}") from error
    seed = found.get("seed_everything")
    dropped = [f"trainer.{name}" for name in ("precision", "plugins") if trainer.pop(name, None) not in (None, [])]
    dropped += ["ckpt_path"] if found.get("ckpt_path") else []
    if dropped:
        why = "is ignored: this command sets the precision and trains from the start"
        sys.stderr.write(f"lightning-amp: of --config {path}, {', '.join(dropped)} {why}\n")
    kept = {name: value for name, value in found.items() if name not in _IGNORED and value is not None}
    return json.dumps({**kept, "seed": seed} if type(seed) is int else kept, default=str)
