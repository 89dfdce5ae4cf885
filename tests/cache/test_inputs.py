"""What is seen of files, folders, variables and modules: content counts, dates do not."""

import os
from pathlib import Path

import pytest

from veomni_hook.cache import inputs
from veomni_hook.cache.inputs import check_inputs, observe
from veomni_hook.cache.trusted_folder import Defect


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("file", lambda path: path.write_bytes(b"2")),
        ("file", Path.unlink),
        ("place", lambda path: path.write_bytes(b"longer")),
        ("place", Path.unlink),
        ("place", lambda path: (path.unlink(), path.mkdir())),
        ("place", lambda path: (path.rename(f"{path}.moved"), path.symlink_to(f"{path}.moved"))),
    ],
)
def test_what_is_seen_of_a_file(tmp_path, kind, change):
    path = tmp_path / "data"
    path.write_bytes(b"1")
    seen = {(kind, str(path)): observe(kind, str(path))}
    check_inputs(seen)
    os.utime(path, (1, 1))
    check_inputs(seen)
    change(path)
    with pytest.raises(Defect, match=r"data, which a config .*(has changed|is gone)"):
        check_inputs(seen)


@pytest.mark.parametrize("name", ["new.py", "__pycache__"])
def test_what_is_seen_of_a_folder(tmp_path, name):
    """Python makes folders of bytecode while it imports; they are no change."""
    seen = observe("names", str(tmp_path))
    (tmp_path / name).mkdir()
    assert (observe("names", str(tmp_path)) == seen) == (name == "__pycache__")


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert observe("file", str(tmp_path / "pipe")) == observe("place", str(tmp_path / "pipe"))


def test_a_large_file_counts_by_its_size_and_time(tmp_path, monkeypatch):
    monkeypatch.setattr(inputs, "_LARGE", 4)
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"large")
    os.utime(path, (1, 1))
    before = observe("file", str(path))
    path.write_bytes(b"other")
    assert observe("file", str(path)) != before


def test_a_module_that_nobody_watched_is_not_known(tmp_path):
    """Unless this process has imported it while it recorded, and has seen the same."""
    seen = {("module", "json.decoder"): observe("module", "json.decoder")}
    import json.decoder  # noqa: F401

    with pytest.raises(Defect, match=r"json\.decoder, which a config imports, was imported before"):
        check_inputs(seen)
    check_inputs(seen, seen)
    with pytest.raises(Defect, match="has changed"):
        check_inputs(seen, {("module", "json.decoder"): "elsewhere"})


def test_a_variable_is_not_stored(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert "secret" not in observe("variable", "HF_TOKEN")
    assert observe("variable", "HF_TOKEN") != observe("variable", "NO_SUCH_VARIABLE")


def test_what_cannot_be_seen_is_a_defect():
    with pytest.raises(Defect, match="nothing can be seen of a star"):
        check_inputs({("star", "sun"): "bright"})
