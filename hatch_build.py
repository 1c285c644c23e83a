"""What a package index shows: the README with links that lead somewhere, and where the project is.

Where [tool.hatch.metadata.hooks.custom] in pyproject.toml gives the address of the repository,
links and images of the README lead there; else links into it are left out.
"""

import re
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface

RELATIVE = re.compile(r"(!?)\[([^\]]*)\]\((?!https?://|mailto:)([^)]*)\)")
PAGES = {"Documentation": "docs/quickstart.md", "Changelog": "CHANGELOG.md"}
PAPER = {"Code of the paper": "https://github.com/Linwei94/AAAI2025-FC"}


class Index(MetadataHookInterface):
    """The description and the addresses."""

    def update(self, metadata: dict[str, object]) -> None:
        """Adds both."""
        home = self.config.get("repository", "").rstrip("/")

        def link(found: re.Match[str]) -> str:
            image, words, path = found.groups()
            if not home:
                return "" if image else words
            return f"{image}[{words}]({home}/{'raw' if image else 'blob'}/main/{path})"

        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        text = RELATIVE.sub(link, text)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        pages = {name: f"{home}/blob/main/{path}" for name, path in PAGES.items()}
        metadata["urls"] = ({"Repository": home, **pages} if home else {}) | PAPER
