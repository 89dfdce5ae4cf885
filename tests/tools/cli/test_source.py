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

from veomni_hook.tools.cli import source
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
        ("from transformers.activations import double", "from ...activations import double")
    ]
    assert "[PATCHED METHOD] TinyNorm.forward" in done.out and "+ 100" in done.out


def test_the_difference_is_the_patch_and_nothing_else(tiny: Command) -> None:
    done = tiny("diff", "tiny")
    changed = [line for line in done.out.splitlines()[2:] if line[0] in "+-"]
    assert changed == [
        "-        # upstream's own comment",
        "-        return double(x) + self.bias",
        "+        # Patch.1: the point of it all",
        "+        return double(x) + self.bias + 100  # noqa: F821",
    ]
    assert (done.status, done.err) == (0, "")
    found = tiny("diff", "tiny", "--json").json
    assert (found["module"], found["diff"]) == (TINY, done.out)
    assert (found["added"], found["removed"]) == (2, 2)


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


@pytest.mark.parametrize(
    ("command", "text"), [("dump", '"""Matches the name of a target; nothing patches it."""\n'), ("diff", "")]
)
def test_a_module_without_patches(tiny: Command, command: str, text: str) -> None:
    done = tiny(command, "transformers.models.auto.modeling_auto")
    assert (done.status, done.out) == (0, text) and "no patch applies" in done.err
    done = tiny(command, "auto", "--json")
    assert "no patch applies" in done.json["reason"] and done.err == ""
    assert done.json.get("diff", "") == "" and done.json.get("added", 0) == 0


@pytest.mark.parametrize(("command", "sign"), [("dump", ""), ("diff", "+")])
def test_one_config_alone(tiny: Command, command: str, sign: str) -> None:
    done = tiny(command, "--config", "tiny_config:pair_b", VEOMNI_PATCHES=None)
    assert f'{sign}    return "patched b"\n' in done.out and done.status == 0


def test_a_config_of_several_modules_takes_a_target(tiny: Command) -> None:
    asked = tiny("dump", "--config", "tiny_config")
    assert asked.status == 2 and "4 modules" in asked.err and "pair_b" in asked.err
    assert 'return "patched b"' in tiny("dump", "pair_b", "--config", "tiny_config").out


def test_a_config_in_the_working_directory_and_its_device(tiny: Command, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from veomni_hook import PatchConfig\n"
        f"gpu = PatchConfig('{TINY}', device='gpu')\n"
        f"npu = PatchConfig('{TINY}', device='npu')\n"
        "configs = [gpu, npu]\n"
        "@gpu.override_method('TinyNorm.forward')\ndef on_gpu(self, x):\n    return 'gpu'\n"
        "@npu.override_method('TinyNorm.forward')\ndef on_npu(self, x):\n    return 'npu'\n"
    )
    for device in ("gpu", "npu"):
        # -P: a console script has no working directory on its path either.
        found = tiny("dump", "--config", "mine", "--device", device, flags=("-P",)).out
        assert f"return '{device}'" in found
        assert found.count("return 'gpu'") + found.count("return 'npu'") == 1
    assert "return 'npu'" in tiny("dump", "--config", "mine:npu").out
    wrong = tiny("dump", "--config", "mine:npu", "--device", "gpu")
    assert wrong.status == 2 and "(npu)" in wrong.err


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["dump"], "no target"),
        (["dump", "tinny"], "nearest names: tiny;"),
        (["dump", "transformers.models.tiny.modeling_nothing"], "not installed"),
        (["dump", "--config", "no_such_module"], "cannot be imported"),
        (["dump", "--config", "tiny_config:nothing"], "no attribute 'nothing'"),
        (["dump", "pair_a", "--config", "tiny_config:config"], "no config for"),
        (["dump", "tiny", "-o", "missing/out.py"], "cannot be written"),
        (["dump", "tiny", "--device", "tpu"], "tpu"),
    ],
)
def test_wrong_use(tiny: Command, arguments: list[str], message: str) -> None:
    done = tiny(*arguments)
    assert (done.status, done.out) == (2, "")
    assert message in done.err


def test_a_patch_that_does_not_apply_is_a_finding(tiny: Command) -> None:
    done = tiny("dump", "tiny", VEOMNI_PATCHES="misspelt_config")
    assert (done.status, done.out) == (1, "")
    assert "\n  where: " in done.err and "Traceback" not in done.err


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
    found = SimpleNamespace(module="package.module", stored_text=text, patched=object(), reason="")
    monkeypatch.setattr(source, "prepared", lambda *_: found)
    dump = ["dump", "package.module", "-o"]
    assert CliRunner().invoke(app, [*dump, str(tmp_path / "out.py")]).output == f"wrote {tmp_path}/out.py\n"
    assert (tmp_path / "out.py").read_bytes() == text.encode()
    monkeypatch.setattr(source, "facts_of", lambda _: {"module": "package.module"})
    CliRunner().invoke(app, [*dump, str(tmp_path / "out.json"), "--json"])
    assert json.loads((tmp_path / "out.json").read_bytes()) == {"module": "package.module", "text": text}


def test_what_a_config_prints_is_not_part_of_the_dump(tiny: Command, tmp_path: Path) -> None:
    (tmp_path / "talkative.py").write_text(
        'print("loading")\nfrom veomni_hook import PatchConfig\n'
        f'config = PatchConfig("{TINY}")\n'
        '@config.override_method("TinyNorm.forward")\ndef forward(self, x):\n    return x\n'
    )
    done = tiny("dump", "--config", "talkative", cwd=tmp_path)
    assert done.status == 0, done.err
    assert "loading" in done.err and done.out.startswith("# Patched in memory")
