"""Links of the package to the repository that `REPOSITORY_URL` names: its metadata, and a README for PyPI.

Documents link to files of the repository, which PyPI does not have. Without the variable nothing is linked.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

#: A link of Markdown to a file of the repository; the image mark in front of it.
LINK = re.compile(r"(!?)(\[[^\]]*\]\()(?![a-z]+:|#)([^)\s]+)\)")
BADGE = "[![tests]({url}/actions/workflows/tests.yml/badge.svg)]({url}/actions/workflows/tests.yml)\n"


class Links(MetadataHookInterface):
    """Sets ``readme`` and ``urls``."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set them in ``metadata``, the table ``project`` of pyproject.toml."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        url = os.environ.get("REPOSITORY_URL", "").rstrip("/")
        if url:
            text = absolute(text, url)
            metadata["urls"] = {
                "Repository": url,
                "Documentation": f"{url}/tree/main/docs",
                "Changes": f"{url}/blob/main/CHANGELOG.md",
                "Issues": f"{url}/issues",
            }
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def absolute(text: str, url: str) -> str:
    """Return a README with links and pictures at ``url``, and the badge of its tests before the others."""
    linked = LINK.sub(
        lambda link: f"{link[1]}{link[2]}{url}/{'raw' if link[1] else 'blob'}/main/{link[3]})", text
    )
    return linked.replace("\n![", f"\n{BADGE.format(url=url)}![", 1)
