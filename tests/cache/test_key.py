"""The key changes with everything that shapes the output, and with nothing else."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import veomni_hook
from tests.processes import outputs, started
from veomni_hook.cache import key
from veomni_hook.patterns import PATTERN_FILES, pattern_source

FIELDS: dict[str, Any] = {
    "module": "pkg.mod", "upstream": b"a = 1\n", "engine": "e1", "settings": {"device": "gpu", "x": "y"},
    "config_names": ("one", "two"), "inprocess": (("mine", "d1"),), "distribution": "pkg", "version": "1.0",
}  # fmt: skip


@pytest.mark.parametrize(
    ("field", "other"),
    [
        ("module", "pkg.mod2"),
        ("upstream", b"a = 2\n"),
        ("engine", "e2"),
        ("settings", {"device": "npu", "x": "y"}),
        ("settings", {"device": "gpu", "x": "y", "z": ""}),
        ("config_names", ("two", "one")),
        ("config_names", ("onetwo",)),
        ("config_names", ("one", "two", "mine", "d1")),
        ("inprocess", ()),
        ("inprocess", (("mine", "d2"),)),
        ("inprocess", (("mined", "1"),)),
        ("distribution", "pkg2"),
        ("version", "1.1"),
    ],
)
def test_every_field_changes_the_key(field, other):
    assert key.stage1_key(**FIELDS) != key.stage1_key(**{**FIELDS, field: other})


def test_fields_do_not_run_into_their_neighbours():
    moved = {"config_names": (), "inprocess": (("one", "two"), ("mine", "d1"))}
    swapped = {"distribution": "1.0", "version": "pkg"}
    assert len({key.stage1_key(**{**FIELDS, **changes}) for changes in ({}, moved, swapped)}) == 3


def test_key_is_a_plain_name_and_ignores_the_order_of_settings():
    turned = {**FIELDS, "settings": dict(reversed(FIELDS["settings"].items()))}
    found = key.stage1_key(**FIELDS)
    assert found == key.stage1_key(**turned) and len(found) == 40 and found.isalnum()


def test_interpreter_is_part_of_the_key(monkeypatch):
    before = key.stage1_key(**FIELDS)
    monkeypatch.setattr(sys, "flags", SimpleNamespace(optimize=2))
    assert key.interpreter_tag() == f"{sys.implementation.cache_tag}.opt-2"
    optimised = key.stage1_key(**FIELDS)
    monkeypatch.setattr(sys, "implementation", SimpleNamespace(cache_tag=None, name="other"))
    assert key.interpreter_tag() == f"other-{sys.hexversion:x}.opt-2"
    assert len({before, optimised, key.stage1_key(**FIELDS)}) == 3


def _digest_in(place):
    script = "from veomni_hook.cache.key import engine_digest; print(engine_digest(), engine_digest())"
    out, _ = outputs(started("-c", script, cwd=place.parent, PYTHONPATH=str(place)))
    first, second = out.split()
    assert first == second
    return first


@pytest.fixture
def copied(tmp_path):
    """A copy of the package's parts that an engine digest needs."""
    source = Path(veomni_hook.__file__).parent
    ignore = shutil.ignore_patterns("__pycache__")
    for part in ("cache", "patches", "kernels"):
        shutil.copytree(source / part, tmp_path / "site" / "veomni_hook" / part, ignore=ignore)
    for name in ("__init__.py", "errors.py", "on_use.py", "patterns.py"):
        shutil.copy(source / name, tmp_path / "site" / "veomni_hook" / name)
    (tmp_path / "site/veomni_hook/patches/extra.py").write_text("x = 1\n")
    return tmp_path / "site"


def test_engine_digest_follows_the_files_that_shape_the_output(copied):
    before = _digest_in(copied)
    os.utime(copied / "veomni_hook/patches/extra.py", (1, 1))
    (copied / "veomni_hook/errors.py").write_text((copied / "veomni_hook/errors.py").read_text() + "\n")
    (copied / "veomni_hook/patches/notes.txt").write_text("no code")
    assert _digest_in(copied) == before
    (copied / "veomni_hook/patches/extra.py").write_text("x = 2\n")
    edited = _digest_in(copied)
    (copied / "veomni_hook/patches/extra.py").rename(copied / "veomni_hook/patches/renamed.py")
    assert len({before, edited, _digest_in(copied)}) == 3


def test_engine_digest_follows_the_formulas_that_idioms_match(copied):
    before = _digest_in(copied)
    (copied / "veomni_hook/kernels/rms_norm/torch.py").write_text("x = 1\n")
    assert _digest_in(copied) == before
    digests = {before}
    formulas = [path for path in copied.glob("veomni_hook/kernels/*/*.py") if path.name in PATTERN_FILES]
    for path in formulas:
        path.write_text(path.read_text() + "\n")
        digests.add(_digest_in(copied))
    assert len(digests) == 1 + len(formulas) > 20


# Together they have a candidate of every op, and every pattern is tried on one of them.
FAMILIES = (
    "cohere", "deepseek_v3", "deepseek_v32", "deepseek_v4", "gemma3", "glm4_moe", "gpt_oss", "jamba",
    "longcat_flash", "mixtral", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_vl",
)  # fmt: skip
_READS = """
import sys

opened = set()
sys.addaudithook(lambda event, args: event == "open" and opened.add(str(args[0])))

import json
import os
from pathlib import Path

import veomni_hook
from veomni_hook.patches.engine import Origin, patch_source

package = os.path.dirname(os.path.abspath(veomni_hook.__file__))
for path in json.load(sys.stdin):
    module = f"transformers.models.{Path(path).parent.name}.{Path(path).stem}"
    patch_source(Path(path).read_text("utf-8"), [], Origin(module, path, "transformers", "0"), idioms=True)
names = {os.path.relpath(path, package).replace(os.sep, "/") for path in opened if path.startswith(package)}
modules = [name for name in sys.modules if name.partition(".")[0] == "veomni_hook"]
print(json.dumps([sorted(names), sorted(modules)]))
"""


@pytest.mark.parametrize("families", [FAMILIES, pytest.param((), marks=pytest.mark.slow, id="all")])
def test_the_key_follows_every_file_that_patching_reads(families):
    """Idioms open pattern files alone, and import no kernel."""
    home = Path(importlib.util.find_spec("transformers").origin).parent / "models"  # type: ignore[union-attr,arg-type]
    paths = sorted(map(str, home.glob("*/modeling_*.py")))
    chosen = [path for path in paths if not families or Path(path).parent.name in families]
    printed = subprocess.run(
        [sys.executable, "-c", _READS], input=json.dumps(chosen), capture_output=True, text=True, check=True
    )
    names, modules = json.loads(printed.stdout)
    ours = (
        "cache/",
        "patches/",
        "__pycache__/",
        "__init__",
        "errors",
        "locate",
        "on_use",
        "printable",
        "patterns",
    )
    read = {name for name in names if not name.startswith(ours)}
    assert {"kernels/rms_norm/reference.py", "kernels/rotary/variants.py"} < read
    assert {Path(name).name for name in read} == PATTERN_FILES
    homes = ("cache", "patches", "errors", "locate", "on_use", "printable", "patterns")
    assert [name for name in modules if name.partition(".")[2].partition(".")[0] not in ("", *homes)] == []


@pytest.mark.parametrize("path", ["kernels/rms_norm/triton.py", "patches/reference.py", "reference.py"])
def test_only_a_pattern_file_is_read_as_one(path):
    with pytest.raises(ValueError, match=f"^{path} is not a pattern file"):
        pattern_source(path)


def test_engine_digest_from_a_zip_file_is_the_same(copied, tmp_path):
    archive = Path(shutil.make_archive(str(tmp_path / "archive"), "zip", copied))
    assert _digest_in(archive) == _digest_in(copied)


def test_engine_digest_of_this_process_is_computed_once(monkeypatch):
    first = key.engine_digest()
    monkeypatch.setattr(key, "_folder_files", lambda package: iter([("x.py", b"")]))
    assert key.engine_digest() == first
    monkeypatch.setattr(key, "_engine", {})
    assert key.engine_digest() != first
