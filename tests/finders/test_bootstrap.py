"""The user's own `sitecustomize` beside ours: it runs hooked, and its errors are Python's to report."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.finders.conftest import ROOT, SHOW, TINY, Ran
from veomni_hook.finders.children import BOOTSTRAP


@pytest.fixture
def own(python, tmp_path):
    """Run a script in a child of `veomni-hook run` whose environment has this `sitecustomize`."""

    def run(text: str, script: str = SHOW) -> Ran:
        (tmp_path / "site").mkdir(exist_ok=True)
        (tmp_path / "site" / "sitecustomize.py").write_text(text)
        data = (ROOT / "tests" / "data" / name for name in ("hub", "configs"))
        path = os.pathsep.join(map(str, (BOOTSTRAP, tmp_path / "site", *data, ROOT)))
        return python(script, PYTHONPATH=path, VEOMNI_HOOK="1")

    return run


def without_ours(folder):
    """What Python itself says of a `sitecustomize`."""
    environ = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run([sys.executable, "-c", ""], env=environ, capture_output=True, text=True)
    return done.stderr


@pytest.mark.parametrize(
    "text",
    ["raise RuntimeError('mine is broken')", "import nowhere", "def broken(", "raise ImportError('x')"],
)
def test_a_broken_one_is_reported_as_python_does_and_the_script_runs_hooked(own, tmp_path, text):
    ran = own(text)
    assert ran.out == "103\n", ran.err
    assert ran.err == without_ours(tmp_path / "site")
    assert ran.err.startswith("Error in sitecustomize; set PYTHONVERBOSE for traceback:\n")


def test_one_that_exits_ends_python_as_it_does_without_ours(own, tmp_path):
    ran = own("raise SystemExit(3)")
    expected = without_ours(tmp_path / "site")
    assert (ran.code, ran.out) == (1, "")
    assert ran.err.splitlines()[0] == expected.splitlines()[0]
    assert ran.err.splitlines()[-1] == expected.splitlines()[-1] == "SystemExit: 3"


def test_what_it_imports_is_patched(own):
    ran = own(
        f"import builtins\nfrom {TINY} import TinyNorm\nbuiltins.NORM = TinyNorm", "print(NORM().forward(1))"
    )
    assert (ran.out, ran.err) == ("103\n", "")


def test_a_finder_that_it_puts_first_does_not_hide_modules(own):
    ran = own(
        "import sys\n"
        "from importlib.machinery import PathFinder\n"
        "class Greedy:\n"
        "    find_spec = staticmethod(lambda name, path=None, target=None: PathFinder.find_spec(name, path))\n"
        "sys.meta_path.insert(0, Greedy)\n",
        f"import sys\n{SHOW}; print(sys.meta_path[1].__name__)",
    )
    assert ran.out == "103\nGreedy\n", ran.err


def test_one_that_makes_this_package_importable_runs_before_the_second_attempt(own, tmp_path):
    (tmp_path / "site" / "veomni_hook").mkdir(parents=True)
    (tmp_path / "site" / "veomni_hook" / "__init__.py").write_text("raise ImportError('not yet')")
    ran = own(f"import sys; sys.path.insert(0, {str(ROOT)!r})")
    assert (ran.out, ran.err) == ("103\n", "")
