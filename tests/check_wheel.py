"""Check an installed wheel from outside of the source tree: `python -I check_wheel.py`.

It runs without pytest, so that only the wheel and its requirements need to be installed.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import pkgutil
import sys
import sysconfig
from pathlib import Path


def main() -> None:
    package = importlib.import_module("lightning_amp")
    folder = Path(str(package.__file__)).resolve().parent
    site = {Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib")}

    problems: list[str] = []
    if not any(folder.is_relative_to(path) for path in site):
        problems.append(f"imported from {folder}, which is not in site-packages")
    if not (folder / "py.typed").is_file():
        problems.append("py.typed is missing")
    problems += [f"public name {name!r} is missing" for name in package.__all__ if not hasattr(package, name)]
    found = pkgutil.walk_packages([str(folder)], prefix="lightning_amp.")
    modules = [m.name for m in found if m.name != "lightning_amp.pytorch_lightning"]  # a process has one of the kinds
    for name in modules:
        if not name.endswith("__main__"):
            importlib.import_module(name)
    try:
        installed = importlib.metadata.version("lightning-amp")
    except importlib.metadata.PackageNotFoundError:
        installed = "not installed"
    if installed != package.__version__:
        problems.append(f"the metadata say {installed}, `__version__` says {package.__version__}")
    if problems:
        sys.exit("The wheel is not right: " + "; ".join(problems))
    print(f"lightning_amp {installed}: {len(package.__all__)} public names and {len(modules)} modules import")  # noqa: T201


if __name__ == "__main__":
    main()
