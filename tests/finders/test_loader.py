"""What a patched module looks like to inspect, linecache, tracebacks, pickle; and without a cache folder."""

from pathlib import Path

from tests.finders.conftest import HOOK, SHOW, TINY, warnings_of

LOOK = f"""
import inspect, json, linecache, pickle, copy, traceback, typing, veomni_hook.install
import {TINY} as m
from veomni_hook.install import handle
norm = m.TinyNorm()
try:
    norm.forward(None)
except TypeError as error:
    frame = traceback.extract_tb(error.__traceback__)[1]
"""


def test_file_source_and_traceback_agree(python, tmp_path):
    ran = python(
        LOOK
        + """
lines, start = inspect.getsourcelines(m.TinyNorm.forward)
print(json.dumps({
    "file": m.__file__, "code": norm.forward.__code__.co_filename, "frame": [frame.filename, frame.line],
    "method": inspect.getsource(m.TinyNorm.forward), "class": inspect.getsource(m.TinyNorm),
    "untouched": inspect.getsource(m.TinyModel), "getline": linecache.getline(m.__file__, start),
    "sourcefile": inspect.getsourcefile(m.TinyNorm), "name": m.__name__, "package": m.__package__,
    "loader_source": m.__loader__.get_source(m.__name__) == open(m.__file__).read(),
}))"""
    )
    got = ran.result
    assert got["file"] == got["code"] == got["frame"][0] == got["sourcefile"]
    assert Path(got["file"]).parts[-3:] == ("models", "tiny", "modeling_tiny.py")
    assert Path(got["file"]).is_relative_to(tmp_path / "cache" / "transformers-5.99.0")
    assert "# Patch.1: the point of it all" in got["method"]
    assert got["method"] in got["class"]
    assert got["untouched"].startswith("class TinyModel:")
    assert got["getline"].lstrip().startswith("def forward")
    assert "+ 100" in got["frame"][1]
    assert (got["name"], got["package"]) == (TINY, TINY.rpartition(".")[0])
    assert got["loader_source"] is True


def test_torch_is_imported_by_nobody_but_the_module(python):
    """It takes seconds, also of commands that only show patched code."""
    for _ in ("miss", "hit"):
        ran = python(f"{HOOK}{SHOW}; import sys, json; print(json.dumps('torch' in sys.modules))")
        assert ran.result is False


def test_pickle_copy_and_type_hints(python):
    ran = python(
        LOOK
        + "hints = typing.get_type_hints(m.TinyModel.forward)\n"
        + "print(json.dumps([pickle.loads(pickle.dumps(norm)).forward(1), copy.deepcopy(norm).forward(1),"
        + " hints['x'] is m.TinyNorm, pickle.loads(pickle.dumps(m.TinyNorm)) is m.TinyNorm]))"
    )
    assert ran.result == [103, 103, True, True]


def test_a_pickle_crosses_between_patched_and_unpatched_processes(python, tmp_path):
    write = f"import pickle; from {TINY} import TinyNorm; pickle.dump(TinyNorm(5), open('norm.pkl', 'wb')); print(0)"
    read = "import pickle; print(pickle.load(open('norm.pkl', 'rb')).forward(1))"
    steps = ((HOOK + write, 0), (read, 7), (write, 0), (HOOK + read, 107))
    assert [python(code).result for code, _ in steps] == [result for _, result in steps]


def test_the_breakpoint_line_of_the_stored_file_is_hit(python):
    ran = python(
        LOOK
        + """
import bdb, linecache
class Debugger(bdb.Bdb):
    def user_line(self, frame):
        if self.break_here(frame):
            print(json.dumps(linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()))
        self.set_continue()
debugger = Debugger()
lines, start = inspect.getsourcelines(m.TinyNorm.forward)
assert debugger.set_break(m.__file__, start + 2) is None
debugger.runcall(norm.forward, 1)
"""
    )
    assert ran.result == "return double(x) + self.bias + 100  # noqa: F821", ran.err


def test_an_unwritable_cache_is_served_from_a_private_temporary_folder(python, tmp_path):
    (tmp_path / "file").write_text("")
    ran = python(
        LOOK + "import os\nprint(json.dumps([norm.forward(1), m.__file__, os.path.exists(m.__file__)]))",
        VEOMNI_CACHE_DIR=str(tmp_path / "file"),
    )
    value, path, existed = ran.result
    assert (value, existed) == (103, True)
    assert not Path(path).is_relative_to(tmp_path / "file")
    assert not Path(path).exists(), "the process that made the folder removes it"
    (said,) = warnings_of(ran.err)
    assert f"{tmp_path / 'file'} is a regular file" in said or f"{tmp_path / 'file'}: " in said
    assert (
        "are kept in a temporary folder until this process ends, and every start patches them again" in said
    )


def test_with_no_folder_at_all_the_code_is_virtual(python, tmp_path):
    (tmp_path / "file").write_text("")
    ran = python(
        "import tempfile\n"
        "def refuse(*a, **k): raise OSError('no space')\n"
        "tempfile.mkdtemp = refuse\n"
        + LOOK
        + "print(json.dumps([norm.forward(1), m.__file__, norm.forward.__code__.co_filename,"
        + " inspect.getsource(m.TinyNorm.forward), frame.line, handle.status().modules[m.__name__].cache]))",
        VEOMNI_CACHE_DIR=str(tmp_path / "file"),
    )
    value, path, code_name, source, line, cache = ran.result
    assert (value, cache) == (103, "memory")
    assert path.endswith("tests/data/hub/transformers/models/tiny/modeling_tiny.py")
    assert code_name == "/veomni_hook-in-memory/transformers/models/tiny/modeling_tiny.py"
    assert "+ 100" in source
    assert "+ 100" in line
