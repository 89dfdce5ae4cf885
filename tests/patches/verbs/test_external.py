import sys

import pytest

from veomni_hook.errors import SignatureError
from veomni_hook.patches.verbs.external import external_function, known_names


@pytest.fixture
def package(tmp_path, monkeypatch):
    root = tmp_path / "external_of_test"
    (root / "sub").mkdir(parents=True)
    (root / "__init__.py").write_text("raise RuntimeError('imported')\nfrom .plain import x\n")
    (root / "plain.py").write_text(
        "import os\ndef f(): hidden = 1\nclass C: m = 1\ntry:\n    v = 1\nexcept E: pass\n"
    )
    (root / "lazy.py").write_text("def __getattr__(name): return name\n")
    (root / "star.py").write_text("from .plain import *\n")
    (root / "swap.py").write_text("import sys\nsys.modules[__name__] = object()\n")
    (root / "broken.py").write_text("def (\n")
    (root / "sub" / "__init__.py").write_text("")
    (root / "sub" / "leaf.py").write_text("y = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return root.name


def test_names_are_read_without_importing(package):
    assert known_names(f"{package}.plain") == {"os", "f", "C", "v"}
    assert known_names(f"{package}.sub.leaf") == {"y"}
    assert {"x", "plain", "sub"} <= (known_names(package) or set())
    assert package not in sys.modules


@pytest.mark.parametrize("name", ["lazy", "swap", "broken"])
def test_what_cannot_be_told_is_taken_on_trust(package, name):
    assert known_names(f"{package}.{name}") == set()


def test_loaded_and_built_in_modules():
    assert "OrderedDict" in (known_names("collections") or set())
    assert known_names("_sre") is not None


def test_star_imports_are_followed_from_file_to_file(tmp_path, monkeypatch):
    package = tmp_path / "starry"
    (package / "inner").mkdir(parents=True)
    (package / "__init__.py").write_text("from .inner import *\nfrom starry.other import *\nown = 1\n")
    (package / "inner" / "__init__.py").write_text("from .deep import Deep\n__all__ = ['Deep']\n")
    (package / "inner" / "deep.py").write_text("class Deep: pass\n")
    (package / "other.py").write_text("def other(): pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    names = known_names("starry")
    assert names is not None
    assert {"own", "Deep", "other", "inner"} <= names
    assert "Deeper" not in names
    assert "starry" not in sys.modules


def test_a_star_import_of_a_module_that_tells_nothing_leaves_it_open(tmp_path, monkeypatch):
    (tmp_path / "opaque.py").write_text("from lazyone import *\n")
    (tmp_path / "lazyone.py").write_text("def __getattr__(name): return 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert known_names("opaque") == set()


def test_parameters_of_an_external_function_are_compared(tmp_path, monkeypatch, patched):
    (tmp_path / "fast.py").write_text("def rotate(q, past=None, **options): return g(q, past, **options)\n")
    monkeypatch.syspath_prepend(tmp_path)
    code = "config.add_patch(create_patch_from_external('rotate', 'fast', 'rotate', PatchType.FUNCTION_REPLACEMENT))"
    assert "from fast import rotate" in patched("def rotate(q, past=None, **kwargs): ...\n", code).text
    with pytest.raises(SignatureError, match=r"nobody passes past .*: upstream has cache \(for past\)"):
        patched("def rotate(q, cache=None, **kwargs): ...\n", code)
    assert "fast" not in sys.modules


def test_functions_whose_file_does_not_say_their_parameters(package):
    assert external_function(f"{package}.plain.f") is not None
    for name in ("plain.C", "plain.v", "broken.f", "none.f", "star.f"):
        assert external_function(f"{package}.{name}") is None
