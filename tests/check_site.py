"""Check the documentation that `make docs` built: `python tests/check_site.py docs/_build/html`.

Every internal link has a target, and pages load nothing from other sites. Every public name and every symptom is at
most two clicks from the first page, and the search finds it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import lightning_amp
from lightning_amp import precision

PUBLIC = [
    *(f"lightning_amp.{name}" for name in lightning_amp.__all__ if name[0] != "_"),
    *(f"lightning_amp.precision.{name}" for name in precision.__all__ if name[0].islower()),
]
SYMPTOM = re.compile(r"^## (.+)$", re.MULTILINE)
ELSEWHERE = ("http:", "https:", "//")
LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}
NOT_LOADED = {"canonical", "next", "prev", "search", "index"}
BUILT_BY_SPHINX = {"genindex.html", "search.html", "py-modindex.html"}


class Page(HTMLParser):
    """The links, the anchors and the loaded files of one page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.loads: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        if "id" in given:
            self.anchors.add(given["id"])
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if tag in LOADED and LOADED[tag] in given and given.get("rel", "") not in NOT_LOADED:
            self.loads.append(given[LOADED[tag]])


PRIVATE_TYPE = re.compile(r"\blightning_amp(?:\.\w+)*\._\w+\.\w+")


class Site:
    """Return all pages by their path under the root."""

    def __init__(self, root: Path) -> None:
        self.root = root
        files = sorted(path for path in root.rglob("*.html") if "_static" not in path.parts)
        self.pages = {path.relative_to(root).as_posix(): Page(path) for path in files}

    def target(self, page: str, link: str) -> tuple[str, str] | None:
        """Return the file under the root and the anchor that a link leads to; `None` for another site."""
        parts = urlsplit(link)
        if parts.scheme or parts.netloc:
            return None
        here = self.root / page
        path = (here.parent / unquote(parts.path)).resolve() if parts.path else here.resolve()
        return path.relative_to(self.root.resolve()).as_posix(), unquote(parts.fragment)

    def dead_links(self) -> Iterator[str]:
        for name, page in self.pages.items():
            for link in page.links:
                if (target := self.target(name, link)) is None:
                    continue
                file, anchor = target
                if not (self.root / file).exists():
                    yield f"{name}: {link} leads nowhere"
                elif anchor and file in self.pages and anchor not in self.pages[file].anchors:
                    yield f"{name}: {link}: there is no such place on that page"

    def loads_from_elsewhere(self) -> Iterator[str]:
        for name, page in self.pages.items():
            yield from (f"{name} loads {url}" for url in page.loads if url.startswith(ELSEWHERE))

    def within(self, clicks: int) -> set[str]:
        """Return the pages that this many clicks reach without a search."""
        found = {"index.html"}
        for _ in range(clicks):
            steps = (self.target(name, link) for name in found if name in self.pages for link in self.pages[name].links)
            found = found | {step[0] for step in steps if step is not None}
        return found

    def private_types(self) -> Iterator[str]:
        for path in sorted((self.root / "reference").glob("*.html")):
            found = {match[0] for match in PRIVATE_TYPE.finditer(path.read_text(encoding="utf-8"))}
            yield from (f"reference/{path.name} shows the private name {name}" for name in sorted(found))

    def too_far(self) -> Iterator[str]:
        """Return the names that need more than two clicks; the second click may be the page's own list of contents."""
        near = self.within(1)
        anchors = {anchor for name in near if name in self.pages for anchor in self.pages[name].anchors}
        yield from (f"{name} is more than two clicks away" for name in PUBLIC if name not in anchors)
        guide = Path(__file__).parents[1] / "docs" / "guide" / "symptoms.md"
        for symptom in SYMPTOM.findall(guide.read_text(encoding="utf-8")):
            place = re.sub(r"[^a-z0-9]+", "-", symptom.lower()).strip("-")
            if "guide/symptoms.html" not in near or place not in self.pages["guide/symptoms.html"].anchors:
                yield f"the symptom {symptom!r} is more than two clicks away"
        lost = set(self.pages) - self.within(2) - BUILT_BY_SPHINX
        yield from (f"{name} is more than two clicks away" for name in sorted(lost))

    def not_in_the_search(self) -> Iterator[str]:
        index = (self.root / "searchindex.js").read_text(encoding="utf-8")
        yield from (f"the search does not know {name}" for name in PUBLIC if name.rpartition(".")[2] not in index)


def problems(root: Path) -> list[str]:
    site = Site(root)
    if "index.html" not in site.pages:
        return [f"{root} has no index.html"]
    return [
        *site.dead_links(),
        *site.loads_from_elsewhere(),
        *site.private_types(),
        *site.too_far(),
        *site.not_in_the_search(),
    ]


if __name__ == "__main__":
    sys.exit("\n".join(problems(Path(sys.argv[1]))) or None)
