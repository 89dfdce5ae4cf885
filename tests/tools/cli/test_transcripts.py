"""What commands print where the stand-in for transformers is installed: see `transcript`."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from .conftest import DATA, REPOSITORY, Command, Done
from .transcript import compare, here, installed

#: What says more about the process than about a command: what it has imported and holds of a cache, and the
#: settings in force.
APART = ("cache", "doctor", "explain")


@pytest.mark.parametrize(
    "name", ["cache", "check", "doctor", "explain", "generated", "list", "source", "upgrade", "wrong_use"]
)
def test_what_is_printed(name: str, tiny: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    variables = {
        "VEOMNI_CACHE_DIR": str(tmp_path / "cache"), "VEOMNI_PATCHES": "tiny_config", "VEOMNI_BANNER": "0",
    }  # fmt: skip
    for variable in [one for one in os.environ if one.startswith("VEOMNI_")]:
        monkeypatch.delenv(variable)
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    site = DATA / "hub"
    if name == "upgrade":  # it changes what is installed
        site = shutil.copytree(site, tmp_path / "site", ignore=shutil.ignore_patterns("__pycache__"))
    installed(DATA / "configs", site, monkeypatch=monkeypatch)

    def run(words: list[str], changed: dict[str, str | None]) -> Done:
        if name in APART or words[0] == "run" or "PYTHONSAFEPATH" in changed:
            return tiny(*words, **variables | changed)
        done = here(words, changed)
        for module, imported in list(sys.modules.items()):
            if str(getattr(imported, "__file__", "")).startswith((str(tmp_path), str(DATA / "configs"))):
                del sys.modules[module]
        return done

    compare(name, run, {"REPOSITORY": REPOSITORY})
