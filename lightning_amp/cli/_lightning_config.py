"""Read the YAML of a `LightningCLI`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from typing_extensions import final

from lightning_amp._files import open_text
from lightning_amp._text import named
from lightning_amp.cli._errors import UsageError

SECTIONS = ("trainer", "model", "data", "optimizer", "lr_scheduler")
COMPARED = ("precision", "plugins")
_SUBCOMMANDS = {"fit", "validate", "test", "predict"}
_FIT = ("ckpt_path", "weights_only", "verbose")
"""Arguments of `fit` that a YAML file has besides its sections."""


@final
class Config(NamedTuple):
    """The contents of a YAML file.

    Attributes:
        sections: Its sections, of :data:`SECTIONS`.
        seed: The value of `seed_everything` if it is an integer.
        dropped: Settings of the Trainer that the command replaces.

    """

    sections: dict[str, Any]
    seed: int | None
    dropped: list[str]


def read_config(path: str, model: str | None, data: str | None) -> Config:
    """Read a file that a `LightningCLI` takes, with or without `fit:` around it.

    Args:
        path: The file, or its URL.
        model: Class path for a section `model` without one, as in the YAML of `LightningCLI(MyModel)`.
        data: Class path for a section `data` without one.

    Raises:
        UsageError: If the file cannot be read, or has settings that a command cannot use.

    """
    found = _load(path)
    if "fit" in found:
        others = found.keys() - _SUBCOMMANDS - {"subcommand"}
        found = {**{key: found[key] for key in found if key in others}, **_section(path, "fit", found["fit"])}
    unknown = [key for key in found if key not in (*SECTIONS, *_FIT, "seed_everything")]
    if unknown:
        raise UsageError(
            f"--config {path} has {named(unknown)}, which only the LightningCLI of your script knows; legal are"
            f" {', '.join([*SECTIONS, 'seed_everything'])}. `compare_precisions` in Python accepts any module"
        )
    if found.get("ckpt_path") is not None:
        raise UsageError(f"--config {path} has a `ckpt_path`; a comparison trains from the start: remove it")
    sections = {key: _section(path, key, found[key]) for key in SECTIONS if found.get(key) is not None}
    for key, given in (("model", model), ("data", data)):
        if key in sections:
            sections[key] = _with_class(path, key, sections[key], given)
    for key in ("optimizer", "lr_scheduler"):
        if key in sections and "class_path" not in sections[key]:
            raise UsageError(f"--config {path}: `{key}` has no `class_path`; add it, for example `torch.optim.SGD`")
    trainer = sections.get("trainer", {})
    dropped = [f"trainer.{name}" for name in COMPARED if trainer.get(name) not in (None, [])]
    if trainer:
        sections["trainer"] = {name: value for name, value in trainer.items() if name not in COMPARED}
    seed = found.get("seed_everything")
    return Config(sections, seed if isinstance(seed, int) and not isinstance(seed, bool) else None, dropped)


def _section(path: str, key: str, value: Any) -> dict[str, Any]:
    if isinstance(value, str) and Path(value).suffix in {".yaml", ".yml", ".json"}:  # relative to the file
        return _load(str(Path(path).parent / value), key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise UsageError(f"--config {path}: `{key}` must be a mapping, got {value!r}")
    return {str(name): inner for name, inner in value.items()}


def _with_class(path: str, key: str, section: dict[str, Any], given: str | None) -> dict[str, Any]:
    if "class_path" in section:
        return section
    if given is None:
        advice = f"pass it: `--{key} package.module.Class`"
        raise UsageError(f"--config {path}: `{key}` has no `class_path`, so its class is not known; {advice}")
    return {"class_path": given, "init_args": section}


def _load(path: str, key: str = "it") -> dict[str, Any]:
    """Read YAML as jsonargparse does: it reads 1e-3 as a number."""
    import yaml
    from jsonargparse import get_loader

    try:
        with open_text(path, "--config") as file:
            found: Any = get_loader("yaml")(file.read())
    except FileNotFoundError as error:
        raise UsageError(f"there is no file `{path}`, which --config names") from error
    except (OSError, ValueError, ImportError, yaml.YAMLError) as error:
        raise UsageError(f"--config {path} cannot be read as YAML: {error}") from error
    if found is not None and not isinstance(found, Mapping):
        raise UsageError(f"--config {path} must hold a mapping with {', '.join(SECTIONS)}")
    return _section(path, key, found)
