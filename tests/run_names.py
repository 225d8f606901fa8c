"""Runs tests and an example with `pytorch_lightning`: `python tests/run_names.py ARGUMENTS_OF_PYTEST`.

They run in a copy of the repository, in which the imports of `lightning` name `pytorch_lightning` and
`lightning_fabric`, and those of `lightning_amp` name `lightning_amp.pytorch_lightning`. The package is a link.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
EXAMPLE = ("examples/gan.py", "--fast")
REWRITTEN = ("tests", "examples")
NAMES = {
    r"^( *)import lightning as L$": r"\1import lightning_fabric, pytorch_lightning as L",
    r"\bL\.pytorch\b": "L",
    r"\bL\.fabric\b": "lightning_fabric",
    r"\bL\.Fabric\b": "lightning_fabric.Fabric",
    r"\blightning\.pytorch\b": "pytorch_lightning",
    r"\blightning\.fabric\b": "lightning_fabric",
    r"\bfrom lightning import": "from pytorch_lightning import",
    r"\bfrom lightning_amp import": "from lightning_amp.pytorch_lightning import",
}
CHECK = """
import lightning_amp.pytorch_lightning

_collect = pytest_collection_modifyitems

@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    _collect(config, items)
    quick = [item for item in items if item.get_closest_marker("slow") is None]
    items[:] = [item for every in _cases_of_each(quick) for item in _spread(every, 2)]

@pytest.fixture(scope="session", autouse=True)
def really_pytorch_lightning():
    yield
    from pytorch_lightning.plugins import MixedPrecision
    assert issubclass(lightning_amp.pytorch_lightning.AmpPrecision, MixedPrecision)
    assert not [name for name in sys.modules if name.partition(".")[0] == "lightning"]
"""
"""Stands at the end of `tests/conftest.py`. Of a parametrized test two cases run, and nothing slow."""


def copy(root: Path) -> None:
    """Fill the folder `root`."""
    for entry in REPOSITORY.iterdir():
        if entry.name not in (*REWRITTEN, ".git"):
            (root / entry.name).symlink_to(entry)
    for path in (path for folder in REWRITTEN for path in (REPOSITORY / folder).rglob("*") if path.is_file()):
        there = root / path.relative_to(REPOSITORY)
        there.parent.mkdir(parents=True, exist_ok=True)
        content = path.read_bytes()
        if path.suffix == ".py":
            text = content.decode()
            for pattern, name in NAMES.items():
                text = re.sub(pattern, name, text, flags=re.MULTILINE)
            content = (text + CHECK * (path == REPOSITORY / "tests" / "conftest.py")).encode()
        there.write_bytes(content)


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        copy(Path(folder))
        for command in ([*EXAMPLE], ["-m", "pytest", "-p", "no:cacheprovider", *sys.argv[1:]]):
            done = subprocess.run([sys.executable, *command], cwd=folder, check=False)
            if done.returncode:
                return done.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
