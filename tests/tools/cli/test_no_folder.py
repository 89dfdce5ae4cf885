"""Commands where there is no working directory, no home, or no cache on the disk."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import Command


@pytest.mark.skipif(
    sys.version_info[:2] == (3, 13), reason="pydantic_core is not imported there without a folder"
)
@pytest.mark.sample(2)
@pytest.mark.parametrize("command", [["list"], ["check", "tiny"], ["doctor", "--fast"], ["cache", "info"]])
def test_a_deleted_working_directory_is_no_error(
    tiny_environ: dict[str, str], tmp_path: Path, command: list[str]
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    code = (
        f"import os, sys; os.chdir({str(gone)!r}); os.rmdir({str(gone)!r})\n"
        f"sys.argv = ['veomni-hook', *{command!r}]\n"
        "from veomni_hook.tools.cli.app import main; sys.exit(main())"
    )
    environ = {**tiny_environ, "VEOMNI_CACHE_DIR": "relative"}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True)
    assert "Traceback" not in done.stderr and "FileNotFoundError" not in done.stderr
    if command[0] in ("doctor", "cache"):
        assert "relative is relative, and there is no working directory" in " ".join(
            (done.stdout + done.stderr).split()
        )


def test_no_cache_on_the_disk(tiny: Command, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import inspect\nfrom transformers import TinyNorm\n"
        "print(TinyNorm().forward(1), '+ 100' in inspect.getsource(TinyNorm.forward))\n"
    )
    variables = {"VEOMNI_CACHE_DIR": os.devnull, "TMPDIR": str(tmp_path / "temporary")}
    (tmp_path / "temporary").mkdir()
    for _ in range(2):
        done = tiny("run", "script.py", **variables)
        assert (done.out, done.err) == ("103 True\n", "")
    assert list((tmp_path / "temporary").iterdir()) == []
