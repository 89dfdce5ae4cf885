from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from veomni_hook.tools.cli.cache import readable_size

from .conftest import TINY, Command, starter


@pytest.fixture
def own(tiny_environ: dict[str, str], tmp_path: Path) -> Command:
    """The command with a cache of its own."""
    return starter({**tiny_environ, "VEOMNI_CACHE_DIR": str(tmp_path / "cache")}, tmp_path)


def test_warm_info_verify_clear(own: Command, tmp_path: Path) -> None:
    warmed = own("cache", "warm", "--json")
    results = {row["module"]: row for row in warmed.json}
    assert warmed.status == 0 and len(results) == 4
    assert {row["result"] for row in results.values()} == {"stored"}
    assert Path(results[TINY]["stored"]).is_relative_to(tmp_path / "cache")
    assert {row["result"] for row in own("cache", "warm", "tiny", "--json").json} == {"was stored"}

    info = own("cache", "info", "--json").json
    assert (info["root"], info["mode"], info["writable"]) == (str(tmp_path / "cache"), "disk", True)
    assert {entry["module"] for entry in info["entries"]} == set(results)
    assert TINY in own("cache", "info").out
    assert own("cache", "verify").out == "4 entries checked, 0 damaged, 0 outdated\n"

    Path(results[TINY]["stored"]).write_text("harmful = True\n")
    damaged = own("cache", "verify")
    assert damaged.status == 1
    assert (
        results[TINY]["stored"] in damaged.out and "1 damaged" in damaged.out and "cache clear" in damaged.err
    )
    assert own("cache", "verify", "--json").json["defects"][0]["path"] == results[TINY]["stored"]

    cleared = own("cache", "clear")
    assert cleared.status == 0 and cleared.out.startswith("4 entries removed")
    assert own("cache", "info", "--json").json["entries"] == []


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


def test_a_folder_that_others_can_write_is_refused(own: Command, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    for command in ("clear", "verify"):
        done = own("cache", command)
        assert done.status == 1 and str(tmp_path / "cache") in done.err
    info = own("cache", "info", "--json")
    assert info.status == 0 and info.json["mode"] == "temporary" and info.json["reason"]


def test_warm_goes_on_after_a_failure(own: Command) -> None:
    done = own("cache", "warm", "--json", VEOMNI_PATCHES="misspelt_config,tiny_config")
    assert done.status == 1
    results = {row["module"]: row["result"] for row in done.json}
    assert results["transformers.models.pair_a.modeling_pair_a"] == "stored"
    assert "forwrad" in results[TINY]
    assert done.err.count("error: ") == 1 and "fix:" in done.err


def test_warm_names_a_config_that_cannot_be_loaded(own: Command) -> None:
    done = own("cache", "warm", "--json", VEOMNI_PATCHES="broken_config")
    assert done.status == 1 and "broken_config" in {row["module"] for row in done.json}


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 << 20, "3.0 MiB"), (5 << 30, "5.0 GiB")],
)
def test_readable_size(size: int, text: str) -> None:
    assert readable_size(size) == text
