"""The loader of remote modules, with a stand-in package and idiom: no torch, no transformers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.finders.conftest import DATA, HERE

NAME = "transformers_modules.repo.modeling_remote"
HOOK = f"{HERE}import thousand; thousand.install(); import veomni_hook.install\n"


@pytest.fixture
def remote(python, tmp_path):
    """Run code where `transformers_modules.repo` can be imported and remote code is turned on."""
    source = DATA / "hub/transformers/models/scaled/modeling_scaled.py"
    folder = tmp_path / "transformers_modules" / "repo"
    folder.mkdir(parents=True)
    for package in (folder.parent, folder):
        (package / "__init__.py").touch()
    (folder / "modeling_remote.py").write_text(source.read_text())

    def run(code: str, **environment: str | None) -> object:
        given = {"VEOMNI_PATCHES": None, "VEOMNI_REMOTE_CODE": "1", **environment}
        return python(HOOK + code, **given)

    return run


def test_what_the_finder_finds_is_patched_where_it_is_turned_on(remote, tmp_path):
    code = f"import json, {NAME} as m\nprint(json.dumps([m.Scaled().forward(1), m.__file__, m.Scaled.forward.__code__.co_filename]))"
    original = str(tmp_path / "transformers_modules/repo/modeling_remote.py")
    for _ in range(2):
        value, file, name = remote(code).result
        assert (value, file) == (1002, original)
        assert Path(name).parts[-2:] == ("repo", "modeling_remote.py") and name != original
    for off in ({"VEOMNI_REMOTE_CODE": None}, {"VEOMNI_IDIOMS": "0"}, {"VEOMNI_HOOK": "0"}):
        assert remote(code, **off).result == [2, original, original]


def test_packages_stay_as_they_are(remote):
    show = "print(json.dumps(type(p.__loader__).__name__))"
    assert remote(f"import json, {NAME}, transformers_modules.repo as p\n{show}").result == "SourceFileLoader"


AGAIN = {
    "reload": "importlib.reload(m)",
    "executed": "spec = spec_from_file_location(m.__name__, path); spec.loader.exec_module(m)\n"
    "assert m.__loader__ is m.__spec__.loader is spec.loader",
}


@pytest.mark.parametrize("again", AGAIN)
def test_a_module_that_is_executed_again_answers_with_its_new_source(remote, again):
    ran = remote(
        f"""
import importlib, inspect, json, pathlib, {NAME} as m
from veomni_hook.finders.remote import spec_from_file_location
path = pathlib.Path(m.__file__)
path.write_text(path.read_text().replace("scale = 2", "scale = 7  # changed"))
{AGAIN[again]}
print(json.dumps([m.Scaled().forward(1), "# changed" in m.__loader__.get_source(m.__name__), "1000" in inspect.getsource(m.Scaled.forward)]))
"""
    )
    assert ran.result == [1007, True, True], ran.err


def test_in_memory_only_source_and_traceback_are_the_patched_ones(remote, tmp_path):
    (tmp_path / "file").write_text("")
    ran = remote(
        f"""
import tempfile
def refuse(*a, **k): raise OSError('no space')
tempfile.mkdtemp = refuse
import inspect, json, traceback, {NAME} as m
try:
    m.Scaled().forward([])
    m.Scaled().forward([1])
except TypeError as error:
    frame = traceback.extract_tb(error.__traceback__)[-1]
print(json.dumps([m.__file__, frame.filename, frame.line, inspect.getsource(m.Scaled.forward)]))
""",
        VEOMNI_CACHE_DIR=str(tmp_path / "file"),
    )
    file, name, line, source = ran.result
    assert file.endswith("transformers_modules/repo/modeling_remote.py")
    assert name == "/veomni_hook-in-memory/transformers_modules/repo/modeling_remote.py"
    assert line == "return 1000 + self.scale * x"
    assert "return 1000 + self.scale * x" in source


def test_entry_modules_are_left_alone_after_deactivation(remote):
    ran = remote(
        f"""
import json
from veomni_hook.finders.remote import spec_from_file_location
path = "transformers_modules/repo/modeling_remote.py"
kinds = [type(spec_from_file_location({NAME!r}, path).loader).__name__]
veomni_hook.install.handle.deactivate()
kinds.append(type(spec_from_file_location({NAME!r}, path).loader).__name__)
kinds.append(spec_from_file_location("x", "no_code.txt"))
print(json.dumps(kinds))
"""
    )
    assert ran.result == ["RemoteLoader", "SourceFileLoader", None]


def test_early_remote_modules_are_named(python, remote):
    early = f"{HERE}import transformers, {NAME}\n"
    ran = python(early + HOOK, VEOMNI_PATCHES=None, VEOMNI_REMOTE_CODE="1")
    assert f"imported too early to be patched: {NAME}." in ran.err
    assert python(early + HOOK, VEOMNI_PATCHES=None).err == ""
