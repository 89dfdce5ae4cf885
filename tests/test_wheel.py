"""The built wheel, installed where the checkout cannot be seen: complete, typed, and it works."""

import ast
import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "veomni_hook"
#: What the demo runs.
SCRIPT = "examples/recipes/finetune.py"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built without isolation: no download."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)],
        check=True,
        capture_output=True,
    )
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """An environment that holds the wheel; torch and the other dependencies come from this one by path."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    options = "--no-deps", "--no-index", "--quiet"
    pip = sys.executable, "-m", "pip", "--python", str(python), "install", *options, str(wheel)
    subprocess.run(pip, check=True, capture_output=True)
    (site,) = {path.parent for path in folder.rglob("site-packages/veomni_hook")}
    # A folder that a .pth file names is searched last, and its own .pth files (an editable install's) are not
    # read: what this environment installed wins, and the checkout stays out of reach.
    ours = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (site / "dependencies.pth").write_text("\n".join(ours) + "\n", encoding="utf-8")
    return python


def run(installed, folder, *command):
    """Run a command of the environment in ``folder``, with a cache of its own."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("VEOMNI_", "PYTHON", "COVERAGE"))
    }
    program = installed.parent / command[0]
    return subprocess.run(
        [str(program), *command[1:]],
        cwd=folder,
        env={**environment, "VEOMNI_CACHE_DIR": str(folder / "cache"), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_wheel_holds_the_whole_package_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        example = archive.read(f"veomni_hook/{SCRIPT}")
    sources = {
        file.relative_to(ROOT).as_posix()
        for file in PACKAGE.rglob("*")
        if file.is_file() and "__pycache__" not in file.parts and file.suffix != ".pyc"
    }
    assert "veomni_hook/py.typed" in names
    assert names == sources | {f"veomni_hook/{SCRIPT}"}
    assert example == (ROOT / SCRIPT).read_bytes()


def test_the_wheel_carries_licence_and_command(wheel):
    with zipfile.ZipFile(wheel) as archive:
        files = {
            name.partition(".dist-info/")[2]: name for name in archive.namelist() if ".dist-info/" in name
        }
        assert "Apache License" in archive.read(files["licenses/LICENSE"]).decode()
        assert (
            "veomni-hook = veomni_hook.tools.cli.app:main" in archive.read(files["entry_points.txt"]).decode()
        )


def test_the_installed_package_is_the_wheels(installed, tmp_path):
    found = run(installed, tmp_path, "python", "-c", "import veomni_hook; print(veomni_hook.__file__)")
    assert Path(found.stdout.strip()).is_relative_to(installed.parents[1]), found.stderr


@pytest.mark.slow
def test_doctor_runs(installed, tmp_path):
    done = run(installed, tmp_path, "veomni-hook", "doctor", "--json")
    assert done.returncode == 0, done.stderr
    assert str(tmp_path / "cache") in done.stdout


def test_dump_prints_patched_source(installed, tmp_path):
    done = run(installed, tmp_path, "veomni-hook", "dump", "qwen3")
    assert done.returncode == 0, done.stderr
    classes = {node.name for node in ast.parse(done.stdout).body if isinstance(node, ast.ClassDef)}
    assert "Qwen3ForCausalLM" in classes
    assert "[MODIFIED CLASS]" in done.stdout


def test_a_hooked_import_executes_the_stored_source(installed, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import veomni_hook.install\nfrom transformers import Qwen3ForCausalLM\n"
        "import sys\nprint(sys.modules[Qwen3ForCausalLM.__module__].__file__)\n",
        encoding="utf-8",
    )
    done = run(installed, tmp_path, "python", str(script))
    stored = Path(done.stdout.strip())
    assert stored.is_relative_to(tmp_path / "cache"), done.stderr
    assert stored.name == "modeling_qwen3.py"
    assert "[MODIFIED CLASS]" in stored.read_text(encoding="utf-8")
