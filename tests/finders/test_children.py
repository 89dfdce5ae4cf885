"""Children that inherit the hook by environment."""

from __future__ import annotations

import os

import pytest

from tests.finders.conftest import DATA, HERE, HOOK, ROOT, SHOW, TINY
from veomni_hook.finders import children
from veomni_hook.finders.children import BOOTSTRAP, environment
from veomni_hook.settings import Settings

HUB = [str(DATA / "hub"), str(DATA / "configs"), str(ROOT)]


def test_only_what_differs_from_the_default_travels():
    variables = environment(Settings(strict=True, patches=("a", "b"), kernels="eager"), {})
    assert variables.pop("PYTHONPATH").split(os.pathsep) == [BOOTSTRAP, str(ROOT)]
    assert variables == {
        "VEOMNI_HOOK": "1",
        "VEOMNI_STRICT": "1",
        "VEOMNI_PATCHES": "a,b",
        "VEOMNI_KERNELS": "eager",
    }


def test_the_users_path_stays_and_ours_does_not_pile_up():
    once = environment(Settings(), {"PYTHONPATH": "mine"})
    assert once["PYTHONPATH"].split(os.pathsep) == [BOOTSTRAP, "mine", str(ROOT)]
    assert environment(Settings(), once)["PYTHONPATH"] == once["PYTHONPATH"]
    empty = environment(Settings(), {"PYTHONPATH": os.pathsep.join(["", "mine"])})["PYTHONPATH"]
    assert empty.split(os.pathsep)[:3] == [BOOTSTRAP, "", "mine"], "an empty entry is the working directory"


def test_a_plain_child_is_patched_and_its_path_is_clean(python):
    path = os.pathsep.join([BOOTSTRAP, *HUB])
    ran = python(f"{SHOW}\nimport sys; print({BOOTSTRAP!r} in sys.path)", PYTHONPATH=path, VEOMNI_HOOK="1")
    assert ran.out.split() == ["103", "False"], ran.err
    assert python(SHOW, PYTHONPATH=path).out.strip() == "3", (
        "without VEOMNI_HOOK=1 the bootstrap does nothing"
    )


def test_the_sitecustomize_that_ours_hides_still_runs(python, tmp_path):
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text("import builtins; builtins.HIDDEN = 'ran'\n")
    path = os.pathsep.join([BOOTSTRAP, str(tmp_path / "site"), *HUB])
    ran = python(f"print(HIDDEN)\n{SHOW}", PYTHONPATH=path, VEOMNI_HOOK="1")
    assert ran.out.split() == ["ran", "103"], ran.err


def test_what_was_put_is_taken_out_exactly():
    for before in ({}, {"PYTHONPATH": ""}, {"PYTHONPATH": f"mine{os.pathsep}"}, {"VEOMNI_KERNELS": "eager"}):
        environ = dict(before)
        put = children.put(Settings(kernels="torch"), environ)
        assert environ["VEOMNI_KERNELS"] == "torch" and children.is_inherited(environ)
        children.take_out(put, environ)
        assert environ == before


def test_what_others_changed_meanwhile_or_put_before_stays():
    environ = {"PYTHONPATH": "mine", "VEOMNI_STRICT": "0"}
    put = children.put(Settings(kernels="torch", strict=True), environ)
    environ["PYTHONPATH"] = os.pathsep.join(["theirs", environ["PYTHONPATH"], "more"])
    environ["VEOMNI_KERNELS"] = "eager"
    children.take_out(put, environ)
    path = os.pathsep.join(["theirs", "mine", "more"])
    assert environ == {"PYTHONPATH": path, "VEOMNI_STRICT": "0", "VEOMNI_KERNELS": "eager"}
    environ = {}
    outer = children.put(Settings(), environ)
    whole = dict(environ)
    children.take_out(children.put(Settings(), environ), environ)
    assert environ == whole
    environ["PYTHONPATH"] = BOOTSTRAP
    children.take_out(outer, environ)
    assert environ == {}, "others removed a part of what was ours"


# What docs/children.md says: who inherits the hook from a script that imports `veomni_hook.install`.
START = {
    "subprocess": "import subprocess; print(subprocess.run([sys.executable, '-c', {show!r}], capture_output=True, text=True).stdout)",
    "os.fork": "pid = os.fork()\n    if not pid: exec({show!r}); sys.stdout.flush(); os._exit(0)\n    os.waitpid(pid, 0)",
    **{
        method: f"import multiprocessing as mp, work\n    with mp.get_context({method!r}).Pool(1) as pool: print(pool.map(work.work, [0])[0])"
        for method in ("spawn", "forkserver", "fork")
    },
    "deaf": "import subprocess; print(subprocess.run([sys.executable, '-E', '-c', {deaf!r}], capture_output=True, text=True).stdout)",
}
HOOKED, PLAIN = "103", "3"


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("start", "install", "expected", "with_children"),
    [
        ("subprocess", "top", PLAIN, HOOKED), ("subprocess", "main", PLAIN, HOOKED),
        ("spawn", "top", HOOKED, HOOKED), ("spawn", "main", PLAIN, HOOKED),
        ("forkserver", "top", HOOKED, HOOKED), ("forkserver", "main", PLAIN, HOOKED),
        ("fork", "top", HOOKED, HOOKED), ("fork", "main", HOOKED, HOOKED),
        ("os.fork", "main", HOOKED, HOOKED), ("deaf", "top", PLAIN, PLAIN),
    ],
)  # fmt: skip
def test_who_inherits(python, tmp_path, start, install, expected, with_children):
    (tmp_path / "work.py").write_text(
        f"def work(_):\n    from {TINY} import TinyNorm\n    return TinyNorm().forward(1)\n"
    )
    code = START[start].format(show=SHOW, deaf=f"import sys; sys.path[:0] = {HUB!r}; {SHOW}")
    top, below = (HOOK, "") if install == "top" else ("", HOOK.strip())
    (tmp_path / "script.py").write_text(
        f"{HERE}import os\n{top}\nif __name__ == '__main__':\n    {below}\n    {code}\n"
    )
    run = "import os, sys; os.execv(sys.executable, [sys.executable, 'script.py'])"
    for variable, wanted in ((None, expected), ("1", with_children)):
        ran = python(run, VEOMNI_CHILDREN=variable)
        assert ran.out.strip() == wanted, ran.err


def test_activate_with_children_and_undoing_it(python):
    ran = python(
        f"""
import json, os, subprocess, sys, veomni_hook
def child():
    return subprocess.run([sys.executable, "-c", {SHOW!r}], capture_output=True, text=True).stdout.strip()
before, got = dict(os.environ), [child()]
with veomni_hook.activate(children=True, patches=("importing_config",)):
    got += [child(), os.environ["VEOMNI_PATCHES"], os.environ["VEOMNI_HOOK"]]
    with veomni_hook.activate(strict=True):
        got += [os.environ["VEOMNI_STRICT"]]
        with veomni_hook.activate(children=False):
            got += [child(), "VEOMNI_STRICT" in os.environ]
        got += [child()]
    got += ["VEOMNI_STRICT" in os.environ, child()]
got += [child(), dict(os.environ) == before]
print(json.dumps(got))
"""
    )
    assert ran.result == [
        "3", "103", "importing_config", "1", "1", "3", False, "103", False, "103", "3", True
    ], ran.err  # fmt: skip


def test_an_inner_activation_leaves_the_outer_ones_children(python):
    ran = python(
        """
import json, os, veomni_hook
from veomni_hook.finders.children import is_inherited
outer = veomni_hook.activate(children=True)
inner = veomni_hook.activate(kernels="eager", children=True)
got = [is_inherited(os.environ), os.environ.get("VEOMNI_KERNELS")]
outer.deactivate()
got += [is_inherited(os.environ), os.environ.get("VEOMNI_KERNELS")]
inner.deactivate(); inner.deactivate()
print(json.dumps([*got, is_inherited(os.environ), os.environ.get("VEOMNI_KERNELS"), "VEOMNI_CHILDREN" in os.environ]))
"""
    )
    assert ran.result == [True, "eager", True, "eager", False, None, False], ran.err


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["veomni-hook.toml", "pyproject.toml"])
def test_a_settings_file_says_children(python, tmp_path, name):
    table = "[tool.veomni-hook]\n" if name == "pyproject.toml" else ""
    code = (
        "import os, subprocess, sys, veomni_hook.install\n"
        f"print(subprocess.run([sys.executable, '-c', {SHOW!r}], capture_output=True, text=True, cwd='/').stdout)"
    )
    for said, hook, expected in (("", None, HOOKED), ("# ", None, PLAIN), ("", "0", PLAIN)):
        (tmp_path / name).write_text(f"{table}{said}children = true\n")
        assert python(code, VEOMNI_HOOK=hook).out.strip() == expected


def test_an_illegal_value_undoes_the_activation(python):
    ran = python(
        "import sys\ntry:\n    import veomni_hook.install\nexcept Exception as error: print(type(error).__name__)\n"
        "print([f for f in sys.meta_path if 'PatchFinder' in repr(f)])",
        VEOMNI_CHILDREN="perhaps",
    )
    assert ran.out.split() == ["SettingsError", "[]"], ran.err
