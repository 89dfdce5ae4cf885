"""The README, tried: what it shows is what the tools print, and what it says can be typed works."""

import re
from pathlib import Path

from typer.testing import CliRunner

from hatch_build import absolute
from tests.processes import outputs, started
from veomni_hook.tools.cli.app import app

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def block(word):
    """The one Python block that contains a word."""
    (found,) = (text for text in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if word in text)
    return found


def veomni_hook(folder, *arguments):
    """Run the command line in a folder, with a cache of its own."""
    return outputs(started("-m", "veomni_hook", *arguments, cwd=folder, cache=folder / "cache"))[0]


def test_the_excerpt_is_what_dump_prints(tmp_path):
    dumped = veomni_hook(tmp_path, "dump", "qwen3")
    parts = block("[MODIFIED CLASS]").split("    ...\n")
    assert len(parts) == 2
    places = [dumped.index(part) for part in parts]
    assert places == sorted(places)


def test_every_command_that_it_names_exists():
    for name in set(re.findall(r"`?veomni-hook ([a-z]+)", README)):
        assert name in CliRunner().invoke(app, [name, "--help"], catch_exceptions=False).stdout


def test_links_are_absolute_where_the_repository_is_known():
    text = absolute(README, "https://host/owner/name")
    assert not re.findall(r"\]\((?!https://|#)", text)
    assert "![python: 3.11+](https://host/owner/name/raw/main/docs/images/badge-python.svg)" in text
    assert "[commands](https://host/owner/name/blob/main/docs/cli.md)" in text
    assert text.index("tests.yml/badge.svg") < text.index("badge-python.svg")
