"""Children that inherit the hook by environment."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.finders.conftest import ROOT, TINY, Python
from veomni_hook.finders.children import BOOTSTRAP, environment
from veomni_hook.settings import Settings

SHOW = f"from {TINY} import TinyNorm; print(TinyNorm().forward(1))"


def test_only_what_differs_from_the_default_travels() -> None:
    variables = environment(Settings(strict=True, patches=("a", "b"), kernels="eager"), {})
    assert variables.pop("PYTHONPATH").split(os.pathsep) == [BOOTSTRAP, str(ROOT)]
    assert variables == {
        "VEOMNI_HOOK": "1",
        "VEOMNI_STRICT": "1",
        "VEOMNI_PATCHES": "a,b",
        "VEOMNI_KERNELS": "eager",
    }


def test_the_users_path_stays_and_ours_does_not_pile_up() -> None:
    once = environment(Settings(), {"PYTHONPATH": "mine"})
    assert once["PYTHONPATH"].split(os.pathsep) == [BOOTSTRAP, "mine", str(ROOT)]
    assert environment(Settings(), once)["PYTHONPATH"] == once["PYTHONPATH"]
    empty = environment(Settings(), {"PYTHONPATH": os.pathsep.join(["", "mine"])})["PYTHONPATH"]
    assert empty.split(os.pathsep)[:3] == [BOOTSTRAP, "", "mine"], "an empty entry is the working directory"


def child(python: Python, code: str) -> str:
    parent = os.pathsep.join(
        [BOOTSTRAP, str(ROOT / "tests/data/hub"), str(ROOT / "tests/data/configs"), str(ROOT)]
    )
    ran = python(code, PYTHONPATH=parent, VEOMNI_HOOK="1")
    assert ran.code == 0, ran.err
    return ran.out.strip()


def test_a_plain_child_is_patched_and_its_path_is_clean(python: Python) -> None:
    assert child(python, SHOW) == "103"
    assert child(python, f"import sys; print({BOOTSTRAP!r} in sys.path)") == "False"
    ran = python(SHOW, PYTHONPATH=os.pathsep.join([BOOTSTRAP, str(ROOT / "tests/data/hub"), str(ROOT)]))
    assert ran.out.strip() == "3", "without VEOMNI_HOOK=1 the bootstrap does nothing"


def test_the_sitecustomize_that_ours_hides_still_runs(python: Python, tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text("import builtins; builtins.HIDDEN = 'ran'\n")
    paths = [
        BOOTSTRAP,
        str(tmp_path / "site"),
        str(ROOT / "tests/data/hub"),
        str(ROOT / "tests/data/configs"),
        str(ROOT),
    ]
    ran = python(f"print(HIDDEN)\n{SHOW}", PYTHONPATH=os.pathsep.join(paths), VEOMNI_HOOK="1")
    assert ran.out.split() == ["ran", "103"], ran.err


@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
def test_multiprocessing_children(python: Python, tmp_path: Path, method: str) -> None:
    (tmp_path / "work.py").write_text(
        f"def work(_):\n    from {TINY} import TinyNorm\n    return TinyNorm().forward(1)\n"
    )
    code = (
        "import sys; sys.path.insert(0, '.')\nimport multiprocessing as mp, work\n"
        f"if __name__ == '__main__':\n    with mp.get_context({method!r}).Pool(2) as pool: print(pool.map(work.work, [0, 1]))"
    )
    assert child(python, code) == "[103, 103]"
