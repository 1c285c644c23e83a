"""What a package index shows of the README: links into this repository lead nowhere there."""

import re
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface

RELATIVE = re.compile(r"(!?)\[([^\]]*)\]\((?!https?://|mailto:)[^)]*\)")


class Readme(MetadataHookInterface):
    """The README with the words of such links, and without such images."""

    def update(self, metadata: dict[str, object]) -> None:
        """Adds the description."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        text = RELATIVE.sub(lambda found: "" if found[1] else found[2], text)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
