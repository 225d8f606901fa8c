"""The definition of a project, and the list of all projects."""

from __future__ import annotations

import importlib
import pkgutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import lightning as L
from zoo.registry import Entry, add, entries

PRECISIONS = ("bf16", "fp16")


@dataclass(frozen=True)
class Setup:
    """The objects of one arm, made anew by the project's function.

    `observe` looks at the trainer and the module afterwards: texts, whole numbers and truth values must be those of
    fp32; floats may differ by rounding. `script` replaces `trainer.fit(module, train, val)`.
    """

    module: L.LightningModule
    train: Any = None
    val: Any = None
    predict: Any = None
    trainer: Mapping[str, Any] = field(default_factory=dict)
    script: Callable[[L.Trainer, L.LightningModule], Any] | None = None
    observe: Callable[[L.Trainer, L.LightningModule], Mapping[str, Any]] | None = None

    def run(self, trainer: L.Trainer) -> None:
        if self.script is not None:
            self.script(trainer, self.module)
        elif isinstance(self.train, L.LightningDataModule):
            trainer.fit(self.module, datamodule=self.train)
        else:
            trainer.fit(self.module, self.train, self.val)


@dataclass(frozen=True, kw_only=True)
class Project(Entry):
    """A project's function, and what it needs. One with the tag `quick` also runs in `make test-all`.

    Args:
        family: Its group, by which `--family` selects it.
        make: Returns a `Setup`.
        what: The line in the table; by default the first one of the function's docstring.
        needs: Names that must be importable: packages, or attributes (`"torch.optim.Muon"`).
        precisions: Without `"fp16"` where the CPU takes minutes for it (convolutions).
        look: Where the gradients of the first step are read: `"after"` it, which no plugin notices, or `"before"` it,
            in `on_before_optimizer_step`: for optimizers that call the closure more than once. Manual optimization is
            always read before.
        timeout_s: For all arms together.

    """

    family: str
    make: Callable[[], Setup]
    what: str = ""
    needs: Sequence[str] = ()
    precisions: Sequence[str] = PRECISIONS
    look: str = "after"
    timeout_s: float = 240

    @property
    def description(self) -> str:
        return self.what or (self.make.__doc__ or "").strip().split("\n")[0]

    def missing(self) -> str | None:
        """Return the reason why the project cannot run here; `None` if it can."""
        for need in self.needs:
            try:
                find(need)
            except (ImportError, AttributeError, OSError, RuntimeError) as error:
                return f"`{need}` is missing ({str(error).splitlines()[0]})"
        return None


def find(name: str) -> Any:
    """Import `name`, which is a module or an attribute of one."""
    parts = name.split(".")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python's warnings when it compiles installed packages
        found = importlib.import_module(parts[0])
        for i, part in enumerate(parts[1:], start=2):
            found = getattr(found, part) if hasattr(found, part) else importlib.import_module(".".join(parts[:i]))
    return found


def project(
    family: str, *, name: str | None = None, quick: bool = False, **settings: Any
) -> Callable[[Callable[[], Setup]], Callable[[], Setup]]:
    """Add the function below to the list; `settings` are arguments of `Project`."""

    def declare(make: Callable[[], Setup]) -> Callable[[], Setup]:
        tags = frozenset({"quick"} if quick else ())
        entry = Project(name=name or getattr(make, "__name__", ""), family=family, make=make, tags=tags, **settings)
        if not entry.description:
            raise ValueError(f"project {entry.name!r} has no docstring: its first line is shown in the table")
        add(entry)
        return make

    return declare


def all_projects() -> dict[str, Project]:
    """Return every project of every file in `families/`, by name."""
    from projects import families

    for module in pkgutil.iter_modules(families.__path__):
        importlib.import_module(f"{families.__name__}.{module.name}")
    return dict(sorted(entries(Project).items(), key=lambda item: item[1].family))
