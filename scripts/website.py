"""What MkDocs asks while it builds the site (`hooks` in mkdocs.yml).

Some pages lie outside docs/: the README is the first one. Documents link to files of the repository as on
a code host; here such a link leads to the page that shows the file, or to a copy of the file in the site.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
#: Documents outside docs/, and the pages that show them.
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security-policy.md",
    "benchmarks/README.md": "measurements.md",
}
#: Pages of wide tables, which get the room of the table of contents.
WIDE = ("models.md", "maintain/releases.md", "maintain/veomni-parity.md")
#: Where copies of other files lie in the site.
COPIES = "files"

# A fenced block, an inline code span, or a link: the target of [text](target), src="target" or href="target".
_PARTS = re.compile(
    r"(?ms)^ *(```+|~~~+).*?^ *\1 *$|(`+)(?!`).*?(?<!`)\2(?!`)|"
    r"(?P<before>\]\(|\b(?:src|href|srcset)=\")(?P<target>[^)\s\"]+)"
)


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages outside docs/ and the files that documents link to; expand the patterns of `nav`."""
    for name, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text(encoding="utf-8")))
    for page in files.documentation_pages():
        for target in _targets(page):
            if _page_of(target) is None and (ROOT / target).is_file():
                copy = f"{COPIES}/{target}"
                if copy not in files.src_uris:
                    files.append(File.generated(config, copy, abs_src_path=str(ROOT / target)))
    pages = sorted(page.src_uri for page in files.documentation_pages())
    config.nav = expanded(config.nav or [], pages)
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return the text of a page with links that hold in the site."""
    here = PurePosixPath(page.file.src_uri).parent
    if page.file.src_uri in WIDE:
        page.meta["hide"] = ["toc"]

    def replaced(found: re.Match[str]) -> str:
        if found["target"] is None:
            return found[0]
        path, anchor, fragment = found["target"].partition("#")
        target = _repository_path(page.file.src_uri, path)
        if target is None:
            return found[0]
        place = _page_of(target) or f"{COPIES}/{target}"
        # A link to something that is no file stays, so that the strict build names it.
        if place not in files.src_uris:
            return found[0]
        return f"{found['before']}{os.path.relpath(place, here)}{anchor}{fragment}"

    return _PARTS.sub(replaced, markdown)


def expanded(nav: Iterable[Any], pages: Iterable[str]) -> list[Any]:
    """Return ``nav`` with the pages that its patterns match, and without sections that hold none."""
    left = [page for page in pages if page not in {*_leaves(nav)}]
    return _expanded(nav, left)


def _expanded(nav: Iterable[Any], left: list[str]) -> list[Any]:
    found: list[Any] = []
    for entry in nav:
        if isinstance(entry, dict):
            for title, held in entry.items():
                inside = held if isinstance(held, str) else _expanded(held, left)
                found += [{title: inside}] if inside else []
        elif "*" in entry:
            # A pattern says nothing of the folders below.
            matching = [one for one in left if fnmatchcase(one, entry) and one.count("/") == entry.count("/")]
            left[:] = [one for one in left if one not in matching]
            found += matching
        else:
            found.append(entry)
    return found


def _leaves(nav: Iterable[Any]) -> Iterator[str]:
    for entry in nav:
        if isinstance(entry, str):
            yield entry
        else:
            for held in entry.values():
                yield from [held] if isinstance(held, str) else _leaves(held)


def _targets(page: File) -> Iterator[str]:
    """Paths in the repository that a page links to."""
    for found in _PARTS.finditer(page.content_string):
        path = (found["target"] or "").partition("#")[0]
        if path and (target := _repository_path(page.src_uri, path)) is not None:
            yield target


def _repository_path(page: str, path: str) -> str | None:
    """What a relative link in a page's document means in the repository, or None for any other link."""
    if not path or re.match(r"[a-z][a-z+.-]*:|/", path):
        return None
    documents = {shown: name for name, shown in PAGES.items()}
    document = documents.get(page, f"docs/{page}")
    target = os.path.normpath(os.path.join(os.path.dirname(document), path)).replace(os.sep, "/")
    return None if target.startswith("..") else target


def _page_of(target: str) -> str | None:
    """The place in the site of a document, or of another file below docs/."""
    return PAGES.get(target) or (target.removeprefix("docs/") if target.startswith("docs/") else None)
