"""The README, tried: what it shows is what the tools print, and what it says can be typed works."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from typer.testing import CliRunner

from veomni_hook.cli.app import app

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def block(word: str) -> str:
    """The one Python block that contains a word."""
    (found,) = (text for text in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if word in text)
    return found


def veomni_hook(folder: Path, *arguments: str) -> str:
    """Run the command line in a folder, with a cache of its own."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("VEOMNI_")}
    return subprocess.run(
        [sys.executable, "-m", "veomni_hook", *arguments],
        cwd=folder,
        env={**environment, "PYTHONPATH": str(ROOT), "VEOMNI_CACHE_DIR": str(folder / "cache")},
        capture_output=True,
        text=True,
        check=True,
    ).stdout


def test_the_excerpt_is_what_dump_prints(tmp_path):
    dumped = veomni_hook(tmp_path, "dump", "qwen3")
    parts = block("[MODIFIED CLASS]").split("    ...\n")
    assert len(parts) == 2
    places = [dumped.index(part) for part in parts]
    assert places == sorted(places)


def test_the_two_scripts_differ_by_one_line():
    before, after = block("train.py, before").splitlines(), block("train.py, after").splitlines()
    assert [line for line in after[1:] if line not in before] == ["import veomni_hook.install"]
    assert [line for line in before[1:] if line not in after] == []


def test_the_patch_config_applies(tmp_path):
    (tmp_path / "my_patches.py").write_text(block("my_patches.py"), encoding="utf-8")
    diff = veomni_hook(tmp_path, "diff", "--config", "my_patches")
    assert '+        self.calls = getattr(self, "calls", 0) + 1\n' in diff


def commands() -> set[str]:
    """The commands that the README names: after `veomni-hook`, and in its list of the others."""
    (others,) = re.findall(r"^Other commands: (.*?)\n\n", README, re.DOTALL | re.MULTILINE)
    return {*re.findall(r"`veomni-hook ([a-z]+)", README), *re.findall(r"`([a-z]+)[` ]", others)}


def test_every_command_that_it_names_exists():
    for name in commands():
        assert name in CliRunner().invoke(app, [name, "--help"], catch_exceptions=False).stdout


def test_every_file_that_it_names_exists():
    named = set(re.findall(r"`([A-Z]+\.md)`", README))
    assert named
    assert all((ROOT / name).is_file() for name in named)
