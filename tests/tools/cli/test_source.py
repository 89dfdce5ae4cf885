"""`dump` and `diff`: what they print of a module, and which module the options name."""

from __future__ import annotations

import ast
import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from veomni_hook.tools.cli import dump as command
from veomni_hook.tools.cli.app import app

from .conftest import TINY, Command


def test_a_dump_is_the_stored_file_with_absolute_imports(tiny: Command, tmp_path: Path) -> None:
    done = tiny("dump", "tiny")
    assert (done.status, done.err) == (0, "")
    found = tiny("dump", "tiny", "--json").json
    assert (found["module"], found["reason"], found["text"]) == (TINY, "", done.out)
    stored = Path(found["stored"]).read_text()
    pairs = list(zip(done.out.splitlines(), stored.splitlines(), strict=True))
    assert [pair for pair in pairs if pair[0] != pair[1]] == [
        (
            f"# Made by:    VEOMNI_PATCHES=tiny_config veomni-hook dump {TINY} --device gpu",
            f"# See what changed: veomni-hook diff {TINY}",
        ),
        ("from transformers.pytorch_utils import double", "from ...pytorch_utils import double"),
    ]
    assert "[PATCHED METHOD] TinyNorm.forward" in done.out and "+ 100" in done.out


def test_the_installed_qwen3(veomni: Command, tmp_path: Path) -> None:
    done = veomni("dump", "qwen3", "-o", "out.py")
    assert (done.status, done.out, done.err) == (0, "", "wrote out.py\n")
    text = (tmp_path / "out.py").read_text()
    names = {node.name for node in ast.parse(text).body if isinstance(node, ast.ClassDef)}
    assert {"Qwen3RMSNorm", "Qwen3ForCausalLM"} <= names
    assert "VeomniSlot(" in text and "from ..." not in text
    done = veomni("diff", "qwen3")
    assert done.status == 0 and done.out.startswith("--- ")
    assert "+veomni_rms_norm_cast_before_weight = " in done.out
    assert "[PATCHED" not in done.out and "+from transformers." not in done.out


def test_source_is_coloured_on_a_terminal(tiny_environ: dict[str, str], tmp_path: Path) -> None:
    reader, writer = pty.openpty()
    subprocess.run(
        [sys.executable, "-m", "veomni_hook", "dump", "tiny", "--no-pager"],
        env=tiny_environ, cwd=tmp_path, stdout=writer, check=True,
    )  # fmt: skip
    os.close(writer)
    seen = os.read(reader, 100_000).decode()
    os.close(reader)
    assert "\x1b[" in seen and "TinyNorm" in seen


def test_the_file_keeps_line_ends_and_characters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    text = "# ä\r\nx = 1\n"
    found = SimpleNamespace(module="package.module", patched=object())
    monkeypatch.setattr(command, "_made", lambda *_, **__: (found, text))
    dump = ["dump", "package.module", "-o"]
    assert CliRunner().invoke(app, [*dump, str(tmp_path / "out.py")]).output == f"wrote {tmp_path}/out.py\n"
    assert (tmp_path / "out.py").read_bytes() == text.encode()
    monkeypatch.setattr(command, "facts_of", lambda _: {"module": "package.module"})
    CliRunner().invoke(app, [*dump, str(tmp_path / "out.json"), "--json"])
    assert json.loads((tmp_path / "out.json").read_bytes()) == {"module": "package.module", "text": text}
