from __future__ import annotations

import os
from pathlib import Path

import pytest

from veomni_hook.tools.cli.inputs.sources import read_source, source_tree
from veomni_hook.tools.cli.usage import UsageError


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A folder that holds a transformers package."""
    files = {
        "__init__.py": '__version__ = "5.4.3"\n',
        "modeling_layers.py": "",
        "models/tiny/modeling_tiny.py": "",
        "models/pair/modeling_pair_a.py": "",
        "models/pair/modeling_pair_b.py": "",
        "models/pair/configuration_pair.py": "",
    }
    for name, text in files.items():
        path = tmp_path / "transformers" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_every_family_and_the_shared_modules(package: Path) -> None:
    tree = source_tree(str(package))
    assert tree.version == "5.4.3"
    assert [*tree.files()] == [
        "transformers.modeling_layers",
        "transformers.models.pair.modeling_pair_a",
        "transformers.models.pair.modeling_pair_b",
        "transformers.models.tiny.modeling_tiny",
    ]
    assert all(Path(path).is_file() for path in tree.files().values())


def test_every_folder_is_read_once(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    listdir = os.listdir
    monkeypatch.setattr(os, "listdir", lambda path: read.append(str(path)) or listdir(path))
    source_tree(str(package)).files()
    assert len(read) == len(set(read)) == 3


@pytest.mark.parametrize(
    ("given", "modules"),
    [
        ("pair", ["pair.modeling_pair_a", "pair.modeling_pair_b"]),
        ("pair_b", ["pair.modeling_pair_b"]),
        ("TinyForCausalLM", ["tiny.modeling_tiny"]),
        ("some/Tiny-1.5B", ["tiny.modeling_tiny"]),
        ("transformers.models.tiny.modeling_tiny", ["tiny.modeling_tiny"]),
    ],
)
def test_what_a_user_types_names_modules(package: Path, given: str, modules: list[str]) -> None:
    found = source_tree(str(package)).files([given])
    assert [*found] == [f"transformers.models.{module}" for module in modules]


def test_a_file_and_a_module_elsewhere(package: Path, tmp_path: Path) -> None:
    file = tmp_path / "remote.py"
    file.write_text("")
    tree = source_tree(str(package))
    assert tree.files([str(file)]) == {str(file): str(file)}
    assert tree.files(["json.decoder"])["json.decoder"].endswith("decoder.py")


@pytest.mark.parametrize("folder", [".", "transformers", "../{name}"])
def test_the_package_or_what_holds_it(package: Path, folder: str) -> None:
    tree = source_tree(str(package / folder.format(name=package.name)))
    assert Path(tree.folder).resolve() == (package / "transformers").resolve()


def test_a_checkout(package: Path) -> None:
    (package / "src").mkdir()
    (package / "transformers").rename(package / "src" / "transformers")
    assert source_tree(str(package)).version == "5.4.3"


def test_a_package_that_does_not_tell_its_version(package: Path) -> None:
    (package / "transformers" / "__init__.py").unlink()
    assert source_tree(str(package)).version == "unknown"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("tinny", "unknown family 'tinny'"),
        ("transformers.models.tiny.modeling_no", "no module transformers.models.tiny.modeling_no"),
        ("transformers.modeling_utils", "no module transformers.modeling_utils"),
        ("no.such.module", "no module no.such.module"),
        ("no_such_file.py", "no module no_such_file.py"),
    ],
)
def test_what_does_not_exist_is_wrong_use(package: Path, given: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        source_tree(str(package)).files([given])
    assert said in caught.value.what
    assert given != "tinny" or "nearest names: tiny" in caught.value.fix


def test_a_folder_without_the_package(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no transformers package"):
        source_tree(str(tmp_path))


def test_a_source_is_decoded_as_python_does(tmp_path: Path) -> None:
    file = tmp_path / "m.py"
    file.write_bytes("# coding: latin-1\nx = 'é'\r\n".encode("latin-1"))
    assert read_source(str(file)) == "# coding: latin-1\nx = 'é'\n"


def test_the_installed_transformers() -> None:
    tree = source_tree()
    assert tree.version.startswith("5.") and len(tree.files()) > 300
    assert tree.files(["llama"]) == {
        "transformers.models.llama.modeling_llama": tree.path("transformers.models.llama.modeling_llama")
    }
