from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from veomni_hook.cache.store import Store
from veomni_hook.errors import VeomniHookError
from veomni_hook.tools.cli.inputs.sources import SourceTree
from veomni_hook.tools.cli.sites import kept, table
from veomni_hook.tools.coverage import ERROR, Row

TREE = SourceTree("", "5.9")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The modules that were examined, one after the other."""
    modules: list[str] = []

    def survey(work: Any, files: Mapping[str, str], label: str, *, jobs: int | None) -> list[Any]:
        modules.extend(files)
        return [_examined(module) for module in files]

    monkeypatch.setattr(table, "survey", survey)
    return modules


def _examined(module: str) -> list[Row] | VeomniHookError:
    if module == "unreadable":
        return VeomniHookError("no", where="there", fix="none")
    status = ERROR if module == "failing" else "routed"
    return [Row(module, "A.forward", "rms_norm", "v", status, "", lineno=3, edited=True)]


def test_a_module_is_examined_again_where_its_source_has_changed(tmp_path: Path, asked: list[str]) -> None:
    files = {}
    for name in ("good", "other", "failing", "unreadable"):
        (tmp_path / f"{name}.py").write_text("x = 1\n")
        files[name] = str(tmp_path / f"{name}.py")
    (tmp_path / "cache").mkdir(mode=0o700)
    store, tree = Store(tmp_path / "cache"), SourceTree(str(tmp_path), "5.9")
    first = kept.site_table(tree, files, store)
    assert asked == [*files] and [*first] == [*files]
    assert kept.site_table(tree, files, store)["good"] == first["good"] == _examined("good")
    assert asked[4:] == ["failing", "unreadable"], "a failure is not kept"
    (tmp_path / "good.py").write_text("x = 2\n")
    kept.site_table(tree, {"good": files["good"]}, store)
    kept.site_table(tree, {"other": files["other"]}, store)
    assert asked[6:] == ["good"]
    kept.site_table(SourceTree("another folder", "5.9"), {"other": files["other"]}, store)
    assert asked[7:] == ["other"]
    assert kept.forget(store) > 0 and kept.forget(store) == 0
    assert not (tmp_path / "cache" / kept.FOLDER).exists()


@pytest.mark.parametrize("damage", ["no json", ""])
def test_a_damaged_file_is_written_anew(tmp_path: Path, asked: list[str], damage: str) -> None:
    (tmp_path / "good.py").write_text("x = 1\n")
    (tmp_path / "cache").mkdir(mode=0o700)
    store, files = Store(tmp_path / "cache"), {"good": str(tmp_path / "good.py")}
    kept.site_table(TREE, files, store)
    (path,) = (tmp_path / "cache" / kept.FOLDER).iterdir()
    path.write_text(damage)
    for _ in range(2):
        kept.site_table(TREE, files, store)
    assert asked == ["good", "good"]


def test_nothing_is_kept_where_there_is_no_cache(tmp_path: Path, asked: list[str]) -> None:
    (tmp_path / "good.py").write_text("x = 1\n")
    for _ in range(2):
        kept.site_table(TREE, {"good": str(tmp_path / "good.py")}, Store("", mode="memory"))
    assert asked == ["good", "good"]
