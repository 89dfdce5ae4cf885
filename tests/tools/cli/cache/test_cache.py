from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from veomni_hook.tools.cli.cache.command import readable_size

from ..conftest import Command, starter


@pytest.fixture
def own(tiny_environ: dict[str, str], tmp_path: Path) -> Command:
    """The command with a cache of its own."""
    return starter({**tiny_environ, "VEOMNI_CACHE_DIR": str(tmp_path / "cache")}, tmp_path)


def test_clear_leaves_what_a_process_uses_and_says_so(
    own: Command, tiny_environ: dict[str, str], tmp_path: Path
) -> None:
    code = (
        "import veomni_hook.install, transformers.models.tiny.modeling_tiny as module, sys\n"
        "print(module.__file__, flush=True)\n"
        "sys.stdin.read()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        env={**tiny_environ, "VEOMNI_CACHE_DIR": str(tmp_path / "cache")},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    stored = process.stdout.readline().strip()
    kept = own("cache", "clear")
    assert kept.status == 1 and "stays" in kept.err and os.path.isfile(stored)
    forced = own("cache", "clear", "--force")
    assert forced.status == 0 and not os.path.isfile(stored)
    process.communicate("")
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 << 20, "3.0 MiB"), (5 << 30, "5.0 GiB")],
)
def test_readable_size(size: int, text: str) -> None:
    assert readable_size(size) == text


def test_a_damaged_entry_is_found(own: Command) -> None:
    (row,) = own("cache", "warm", "tiny", "--json").json
    Path(row["stored"]).write_text("harmful = True\n")
    damaged = own("cache", "verify")
    assert damaged.status == 1
    assert row["stored"] in damaged.out and "1 damaged" in damaged.out and "cache clear" in damaged.err
    assert own("cache", "verify", "--json").json["defects"][0]["path"] == row["stored"]


def test_a_folder_that_others_can_write_is_refused(own: Command, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    folder.mkdir()
    folder.chmod(0o777)
    for command in ("clear", "verify"):
        done = own("cache", command)
        assert done.status == 1 and str(folder) in done.err
    info = own("cache", "info", "--json")
    assert info.status == 0 and info.json["mode"] == "temporary" and info.json["reason"]
    assert any(str(folder) in hazard for hazard in own("doctor", "--fast", "--json").json["hazards"])
    done = own("dump", "tiny")
    assert done.status == 0 and "class TinyModel" in done.out
    assert done.err.startswith("warning: ") and str(folder) in done.err and done.err.count("\n") == 1
