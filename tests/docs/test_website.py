"""What is added to MkDocs: pages from outside docs/, links to files of the repository, patterns in the navigation."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from mkdocs.config import load_config
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from scripts import website

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def config() -> MkDocsConfig:
    return load_config(str(ROOT / "mkdocs.yml"))


def test_a_pattern_is_the_pages_that_no_other_line_names() -> None:
    nav = [
        {"Start": "index.md"},
        {"Recipes": ["recipes*.md", "recipes/*.md", "late.md"]},
        {"None": ["no-such*.md", {"Deeper": ["nor-this*.md"]}]},
        {"More": ["*.md"]},
    ]
    pages = ["a.md", "index.md", "late.md", "recipes.md", "recipes/a.md", "recipes/b.md", "recipes/c/d.md"]
    assert website.expanded(nav, pages) == [
        {"Start": "index.md"},
        {"Recipes": ["recipes.md", "recipes/a.md", "recipes/b.md", "late.md"]},
        {"More": ["a.md"]},
    ]


@pytest.mark.parametrize(("page", "up"), [("page.md", ""), ("deep/page.md", "../")])
def test_links_as_on_a_code_host_hold_in_the_site(config: MkDocsConfig, page: str, up: str) -> None:
    document = (
        f"[a]({up}../README.md#limits) [b]({up}../CONTRIBUTING.md) [c]({up}../examples/recipes/trainer.py) [d]({up}other.md)\n"
        f'[e](#here) <img src="{up}../LICENSE"> [f](https://example.org/x.md) [g](no-such.md) `[h](../LICENSE)`\n'
        "```\n[i](../LICENSE)\n```\n"
    )
    config.nav = []
    config.plugins.on_startup(command="build", dirty=False)  # a file is made in an event of a plugin
    given = {page: document, "other.md": "# Other"}
    files = Files([File.generated(config, name, content=text) for name, text in given.items()])
    website.on_files(files, config=config)
    file = files.get_file_from_path(page)
    assert file is not None
    shown = website.on_page_markdown(document, page=Page(None, file, config), config=config, files=files)
    assert shown == (
        f"[a]({up}index.md#limits) [b]({up}contributing.md) [c]({up}files/examples/recipes/trainer.py) [d]({up}other.md)\n"
        f'[e](#here) <img src="{up}files/LICENSE"> [f](https://example.org/x.md) [g](no-such.md) `[h](../LICENSE)`\n'
        "```\n[i](../LICENSE)\n```\n"
    )


def test_every_page_of_the_documents_is_in_the_navigation(config: MkDocsConfig) -> None:
    pages = [path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")]
    loaded = load_config(str(ROOT / "mkdocs.yml"))
    found = website.expanded(loaded.nav or [], [*pages, *website.PAGES.values()])
    assert {*website._leaves(found)} == {*pages, *website.PAGES.values()}


def test_a_list_stands_below_an_empty_line() -> None:
    """Code hosts draw a list right below a line of text, and MkDocs goes on with the paragraph."""
    found = []
    for path in [*(ROOT / "docs").rglob("*.md"), *(ROOT / name for name in website.PAGES)]:
        text = re.sub(r"(?ms)^ *```.*?^ *```$", "", path.read_text(encoding="utf-8"))
        for line in re.finditer(r"(?m)^(?!#|\s|\||<|[-*] |\d+\. ).+\n((?:[-*]|\d+\.) .*)", text):
            found.append(f"{path.relative_to(ROOT)}: {line[1]}")
    assert found == []
