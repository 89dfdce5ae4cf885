"""`VEOMNI_DUMP_PATCHED=1` on any script."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.finders.conftest import HERE, HOOK, TINY, config_of

CODE = f"import veomni_hook.install, {TINY} as m; print(m.__file__)"


def test_every_patched_module_and_its_diff_are_written(python, tmp_path):
    for _ in range(2):  # also from a warm cache
        ran = python(CODE, VEOMNI_DUMP_PATCHED="1", VEOMNI_DUMP_DIR="out")
        path = tmp_path / "out" / "models" / "tiny" / "modeling_tiny.py"
        assert ran.err.count("veomni-hook: dumped ") == 1
        assert str(path.relative_to(tmp_path)) in ran.err
    dumped, stored = path.read_text(), Path(ran.out.strip()).read_text()
    different = [(a, b) for a, b in zip(dumped.splitlines(), stored.splitlines(), strict=True) if a != b]
    assert different == [
        ("from transformers.pytorch_utils import double", "from ...pytorch_utils import double")
    ]
    diff = path.with_suffix(".diff").read_text()
    assert "+        return double(x) + self.bias + 100  # noqa: F821" in diff
    assert "[PATCHED" not in diff


def test_the_dump_runs_by_itself(python, tmp_path):
    python(CODE, VEOMNI_DUMP_PATCHED="1")
    path = tmp_path / "veomni_patched" / "models" / "tiny" / "modeling_tiny.py"
    ran = python(f"import runpy; print(runpy.run_path({str(path)!r})['TinyNorm']().forward(1))")
    assert ran.out.strip() == "103", ran.err
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "E9,F", str(path)], check=False
    )
    assert done.returncode == 0


def test_a_dump_folder_that_cannot_be_made_is_a_warning(python, tmp_path):
    (tmp_path / "file").write_text("")
    ran = python(CODE, VEOMNI_DUMP_PATCHED="1", VEOMNI_DUMP_DIR="file")
    assert ran.code == 0
    assert "cannot be dumped to file" in ran.err


@pytest.mark.parametrize("link", ["", "models", "models/tiny", "models/tiny/modeling_tiny.py"])
def test_a_dump_follows_no_link(python, tmp_path, link):
    inside = tmp_path / "home" / "models" / "tiny"
    inside.mkdir(parents=True)
    (inside / "modeling_tiny.py").write_text("precious = 1\n")
    place = tmp_path / "out" / link if link else tmp_path / "out"
    place.parent.mkdir(parents=True, exist_ok=True)
    place.symlink_to(tmp_path / "home" / link)
    ran = python(CODE, VEOMNI_DUMP_PATCHED="1", VEOMNI_DUMP_DIR="out")
    assert ran.code == 0, ran.err
    assert (inside / "modeling_tiny.py").read_text() == "precious = 1\n"
    assert not (inside / "modeling_tiny.diff").exists()
    if link.endswith(".py"):  # the link itself is replaced
        assert not place.is_symlink() and "+ 100" in place.read_text()
    else:
        assert "cannot be dumped to out" in ran.err and "is a symbolic link" in ran.err
        assert "VEOMNI_DUMP_DIR" in ran.err


def test_a_settings_file_of_another_user_writes_nothing(python, tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o1777)
    shared.chmod(0o1777)
    theirs = shared / "veomni-hook.toml"
    theirs.write_text(f"dump_patched = true\ndump_dir = {str(tmp_path / 'home')!r}\n")
    theirs.chmod(0o666)
    if os.geteuid() == 0:
        theirs.chmod(0o644)
        os.chown(theirs, 4242, 4242)
    ran = python(f"import os; os.chdir({str(shared)!r})\nfor _ in range(2):\n    {CODE}")
    assert ran.code == 0, ran.err
    assert not (tmp_path / "home").exists()
    assert ran.err.count("is ignored: it ") == 1 and str(theirs) in ran.err
    strict = python(f"import os; os.chdir({str(shared)!r})\n{CODE}", VEOMNI_STRICT="1")
    assert strict.code == 1 and "SettingsError" in strict.err


@pytest.mark.parametrize("below", ["", "models"])
def test_a_folder_of_another_user_is_not_written(python, tmp_path, below):
    folder = tmp_path / "out" / below
    folder.mkdir(parents=True)
    if os.geteuid() == 0:
        os.chown(folder, 4242, 4242)
    else:
        folder.chmod(0o777)
    ran = python(CODE, VEOMNI_DUMP_PATCHED="1", VEOMNI_DUMP_DIR="out")
    assert ran.code == 0, ran.err
    assert "cannot be dumped to out" in ran.err and "user" in ran.err
    assert not [path for path in folder.rglob("*") if path.is_file()]


@pytest.mark.parametrize(
    ("mode", "written"), [(0o1777, True), (0o777, False), (0o2775, False), (0o755, True)]
)
def test_a_folder_that_another_user_could_swap_is_not_written(python, tmp_path, mode, written):
    shared = tmp_path / "shared"
    shared.mkdir()
    if os.geteuid() == 0:
        os.chown(shared, 0, 4242)  # a group that is not the user's own
    elif mode == 0o2775:
        pytest.skip("needs a folder of a group of several users")
    shared.chmod(mode)
    ran = python(CODE, VEOMNI_DUMP_PATCHED="1", VEOMNI_DUMP_DIR="shared/out")
    assert (shared / "out" / "models" / "tiny" / "modeling_tiny.py").exists() == written, ran.err
    assert written or "above it, can be written" in ran.err


def test_a_module_without_a_package_is_dumped_into_the_folder(python, tmp_path):
    (tmp_path / "alone.py").write_text("def which():\n    return 1\n")
    (tmp_path / "alone_config.py").write_text(
        config_of("config.add_post_import_block('EARLIER = 1')", "alone")
    )
    register = "import veomni_hook, alone_config; veomni_hook.register(alone_config.config)\n"
    code = f"{HERE}{HOOK}{register}import alone; print(alone.EARLIER)"
    ran = python(code, VEOMNI_DUMP_PATCHED="1", VEOMNI_PATCHES=None)
    assert ran.out == "1\n", ran.err
    assert sorted(path.name for path in (tmp_path / "veomni_patched").iterdir()) == ["alone.diff", "alone.py"]
    assert not (tmp_path / "veomni_patched.py").exists()
