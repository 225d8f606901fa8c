"""Checks what `python -m build` made: `python tests/check_dist.py [--tag v1.2.3]`, in a clone, after `make build`.

The sdist is what git tracks, less what only the repository needs; the wheel is the package and its licence; and the
README that PyPI shows has no link that leads nowhere. With `--tag`, all that a release needs is there, too.
"""

from __future__ import annotations

import argparse
import email
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
ONLY_IN_THE_REPOSITORY = (".ci/", ".github/", ".pre-commit-config.yaml")
MADE_BY_THE_BUILD = {"PKG-INFO"}
DIST_INFO = {"METADATA", "WHEEL", "RECORD", "licenses/LICENSE"}
ALLOWED_IN_DIST_INFO = {"entry_points.txt"}
LINK = re.compile(r"\]\(([^)]+)\)")


def differences(kind: str, files: Iterable[str], expected: Iterable[str]) -> Iterator[str]:
    files, expected = set(files), set(expected)
    if stray := sorted(files - expected):
        yield f"the {kind} has files that git does not track (commit or remove them): {', '.join(stray)}"
    if missing := sorted(expected - files):
        yield f"the {kind} lacks {', '.join(missing)} (for the sdist see `include` in pyproject.toml)"


def sdist_problems(path: Path, tracked: set[str]) -> Iterator[str]:
    with tarfile.open(path) as file:
        files = {name.partition("/")[2] for name in file.getnames()}
    expected = {name for name in tracked if not name.startswith(ONLY_IN_THE_REPOSITORY)}
    yield from differences("sdist", files, expected | MADE_BY_THE_BUILD)


def wheel_problems(path: Path, tracked: set[str]) -> Iterator[str]:
    with zipfile.ZipFile(path) as file:
        files = set(file.namelist())
    dist_info = {name for name in files if name.partition("/")[0].endswith(".dist-info")}
    yield from differences("wheel", files - dist_info, {n for n in tracked if n.startswith("lightning_amp/")})
    inside = {name.partition("/")[2] for name in dist_info}
    yield from differences("wheel's dist-info", inside, DIST_INFO | inside & ALLOWED_IN_DIST_INFO)


def link_problems(description: str, repository: str | None, version: str, tracked: set[str]) -> Iterator[str]:
    """Check that each link leads to another site, to a heading, or to a file of this version in the repository."""
    for target in LINK.findall(description):
        if re.match(r"\w+:|#", target) is None:
            yield f"on PyPI's page the README's link to {target} leads nowhere (see hatch_build.py)"
        elif repository and target.startswith(f"{repository}/"):
            path = re.sub(rf"^.*?/(?:blob|raw)/v{re.escape(version)}/", "", target).partition("#")[0]
            if not any(name == path or name.startswith(f"{path.rstrip('/')}/") for name in tracked):
                yield f"the README links to {target}, which is not a file of this version"


def release_problems(tag: str, version: str, repository: str | None) -> Iterator[str]:
    if tag != f"v{version}":
        yield f"the tag is {tag}, the version is {version}: the tag of a release is v{version}"
    if f"\n## [{version}]" not in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"):
        yield f"CHANGELOG.md has no section [{version}]"
    if repository is None:
        yield "pyproject.toml does not say where the repository is: fill in `repository`"


def main() -> None:
    parser = argparse.ArgumentParser(description="Checks the wheel and the sdist in dist/.")
    parser.add_argument("--tag", help="of the release that these are for, such as v1.2.3")
    tag = parser.parse_args().tag

    (sdist,), (wheel,) = (ROOT / "dist").glob("*.tar.gz"), (ROOT / "dist").glob("*.whl")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    tracked = set(listed.split("\0")) - {""}
    if not tracked:
        sys.exit("The distributions are compared with what git tracks, and this is no clone. Build them in one.")
    with zipfile.ZipFile(wheel) as file:
        (name,) = (name for name in file.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(file.read(name))
    version, description = str(metadata["Version"]), metadata.get_payload(decode=True)
    assert isinstance(description, bytes)
    urls = dict(url.split(", ", 1) for url in metadata.get_all("Project-URL", []))
    repository = urls.get("Repository")

    problems = [*sdist_problems(sdist, tracked), *wheel_problems(wheel, tracked)]
    problems += link_problems(description.decode(), repository, version, tracked)
    problems += release_problems(tag, version, repository) if tag else []
    if problems:
        sys.exit("dist/ is not right:\n" + "\n".join(f"- {problem}" for problem in problems))
    print(f"{sdist.name} and {wheel.name} have the files that they should have.")  # noqa: T201
    if repository is None:
        print("They have no URLs: `repository` in pyproject.toml is empty.")  # noqa: T201


if __name__ == "__main__":
    main()
