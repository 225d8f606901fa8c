"""What hatchling asks for when it makes a wheel or an sdist: URLs, and a README whose links work on PyPI's page."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK_INTO_THE_REPOSITORY = re.compile(r"(!?)\[([^]]*)\]\((?!\w+:|#)([^)]+)\)")


class Links(MetadataHookInterface):
    """Adds to the metadata what depends on the address of the repository, `repository` in pyproject.toml."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Fill in `readme` and `urls`, with links to the files of this version."""
        repository, tag = self.config["repository"], f"v{metadata['version']}"

        def absolute(link: re.Match[str]) -> str:
            image, text, path = link.groups()
            return f"{image}[{text}]({repository}/{'raw' if image else 'blob'}/{tag}/{path})" if repository else text

        readme = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        text = LINK_INTO_THE_REPOSITORY.sub(absolute, readme)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        metadata["urls"] = {} if not repository else {
            "Repository": repository,
            "Documentation": f"{repository}/tree/{tag}/docs",
            "Changelog": f"{repository}/blob/{tag}/CHANGELOG.md",
            "Issues": f"{repository}/issues",
        }  # fmt: skip
