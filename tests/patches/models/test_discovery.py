import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import veomni_hook.patches.models as models

PACKAGE = "veomni_hook.patches.models"


@pytest.fixture
def specs(tmp_path, monkeypatch):
    """A folder of specs that replaces the package's own; none of them can be imported."""
    for name in ("one", "two", "_private"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit\n")
    monkeypatch.setattr(models, "__path__", [str(tmp_path)])
    return tmp_path


@pytest.mark.parametrize(
    ("module", "found"),
    [
        ("transformers.models.one.modeling_one", [f"{PACKAGE}.one"]),
        ("transformers.models.three.modeling_three", []),
        ("transformers.models.one.configuration_one", []),
        ("transformers.models.one.modeling_two", []),
        ("transformers.models._private.modeling__private", []),
        ("other.models.one.modeling_one", []),
        ("", []),
    ],
)
def test_specs_are_found_by_file_name(module, found, specs):
    assert models.spec_modules(module) == found


def test_families_lists_what_spec_modules_finds(specs):
    assert models.families() == {
        "one": ("transformers.models.one.modeling_one",),
        "two": ("transformers.models.two.modeling_two",),
    }
    assert models.all_spec_modules() == [f"{PACKAGE}.one", f"{PACKAGE}.two"]
    for covered in models.families().values():
        assert all(models.spec_modules(module) for module in covered)


def test_a_package_in_a_zip_file_answers_too(specs, monkeypatch):
    archive = specs / "site.zip"
    with zipfile.ZipFile(archive, "w") as file:
        file.write(specs / "one.py", "models/one.py")
    monkeypatch.setattr(models, "__path__", [str(archive / "models")])
    assert models.spec_modules("transformers.models.one.modeling_one") == [f"{PACKAGE}.one"]
    assert models.spec_modules("transformers.models.two.modeling_two") == []
    assert list(models.families()) == ["one"]


def test_asking_imports_no_spec_and_nothing_heavy():
    code = (
        "import sys; before = set(sys.modules)\n"  # .pth files of an environment may import anything
        "import veomni_hook.patches.models as m\n"
        "m.spec_modules('transformers.models.qwen3.modeling_qwen3')\n"
        "loaded = {'ast', 'dataclasses', 'inspect', 'pathlib'} & (set(sys.modules) - before)\n"
        "m.families()\n"
        f"loaded |= {{n for n in sys.modules if n.startswith('{PACKAGE}.')}}\n"
        "loaded |= {'torch', 'transformers'} & set(sys.modules)\n"
        "print(sorted(loaded))\n"
    )
    root = Path(models.__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
