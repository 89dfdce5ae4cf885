"""Configs made for patchgen, without patchgen: served classes, its rules, and what is said about them."""

import json
import shutil

import pytest

from tests.finders.conftest import DATA, HERE, TINY

CONFIG = "family.tiny_gpu_patch_gen_config"
RUN = f"""
import json, sys, warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import veomni_hook.install
    from {TINY} import TinyNorm, TinyModel
norm = TinyNorm()
said = [str(each.message).splitlines()[0] for each in caught]
print(json.dumps([norm.forward(1), norm.modified, TinyModel.__module__, "patchgen" in sys.modules, said]))
"""
BESIDE = ["beside the config"] * 3
SAID = [
    "nowhere_imported cannot be dropped from the imports: it is not imported at module level",
    "name_map matches nothing in the replacement's source for 'Nothing'",
    "the external replacement not_installed.models.Model does not exist: there is no module not_installed.models;"
    " upstream's TinyModel stays",
]


def test_a_config_for_patchgen_runs_and_its_mistakes_are_told_in_every_process(python):
    for _ in range(2):  # a miss, a hit
        forward, modified, home, left, said = python(RUN, VEOMNI_PATCHES=CONFIG).result
        assert forward == [201, *BESIDE] and modified
        assert home == TINY and not left
        assert sorted(said) == sorted(SAID)


def test_strict_mode_makes_them_errors(python):
    assert python(RUN, VEOMNI_PATCHES=CONFIG).code == 0
    ran = python(RUN, VEOMNI_PATCHES=CONFIG, VEOMNI_STRICT="1")  # from the cache
    assert ran.code == 1 and "ConfigError" in ran.err and "patch_gen_config.py" in ran.err


def test_check_lists_them(python):
    code = "import sys; from veomni_hook.tools.cli.app import main; sys.argv[1:] = ['check', 'tiny', '--json']; main()"
    rows = json.loads(python(code, VEOMNI_PATCHES=CONFIG).out)
    remarks = {row["target"]: row for row in rows if row["verdict"] == "remark"}
    assert sorted(remarks) == ["TinyModel", "TinyNorm.forward", "nowhere_imported"]
    assert all(row["fix"] for row in remarks.values())
    applied = {
        row["target"] for row in rows if row["verdict"] == "applies" and row["config"].startswith(CONFIG)
    }
    assert applied == {"TinyNorm.forward", "TinyNorm"}


def test_an_own_config_keeps_its_errors(python, tmp_path):
    text = (DATA / "configs" / "family" / "tiny_gpu_patch_gen_config.py").read_text()
    text = text.replace("from patchgen.patch_spec import", "from veomni_hook import")
    (tmp_path / "own_config.py").write_text(text.replace('"a description, as patchgen takes it"', ""))
    ran = python(HERE + RUN, VEOMNI_PATCHES="own_config")
    assert ran.code == 1 and "ReplacementError: the external replacement" in ran.err


def test_an_installed_patchgen_comes_first(python, tmp_path):
    (tmp_path / "patchgen").mkdir()
    (tmp_path / "patchgen" / "__init__.py").write_text("")
    (tmp_path / "patchgen" / "patch_spec.py").write_text("raise RuntimeError('the installed one')\n")
    code = HERE + RUN
    ran = python(code, VEOMNI_PATCHES=CONFIG)
    assert ran.code == 1 and "RuntimeError: the installed one" in ran.err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import absent_runtime.ops", "install the package that provides absent_runtime"),
        ("from patchgen import run_codegen", "install patchgen from VeOmni's repository"),
    ],
)
def test_what_a_config_lacks_is_named(python, tmp_path, text, said):
    (tmp_path / "lacking_config.py").write_text(f"{text}\n")
    ran = python(HERE + RUN, VEOMNI_PATCHES="lacking_config")
    assert ran.code == 1 and "ConfigError" in ran.err and said in ran.err


def test_a_module_of_its_package_that_imports_models_is_not_imported_in_a_circle(python, tmp_path):
    """As VeOmni's runtime: what the patched code imports needs the upstream classes of the patched module."""
    package = tmp_path / "runtime"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "outputs.py").write_text(
        f"from {TINY} import TinyModel\nclass Output(TinyModel):\n    made = True\n"
    )
    (package / "tiny_gpu_patch_gen_config.py").write_text(
        "from patchgen.patch_spec import PatchConfig\n"
        "from runtime.outputs import Output\n"
        f'config = PatchConfig(source_module="{TINY}")\n'
        'config.add_import("runtime.outputs", names=["Output"])\n'
        '@config.override_method("TinyNorm.forward")\n'
        "def forward(self, x):\n    return Output.made\n"
    )
    first = f"{HERE}import json, veomni_hook.install\n"
    last = f"from {TINY} import TinyNorm; print(json.dumps(TinyNorm().forward(1)))"
    patches = "runtime.tiny_gpu_patch_gen_config"
    for before in ("", "", "import runtime.outputs\n"):  # a miss, a hit, the runtime first
        ran = python(first + before + last, VEOMNI_PATCHES=patches)
        assert ran.result is True


def test_a_config_is_not_loaded_for_modules_that_it_is_not_for(python):
    code = """
import json, sys, veomni_hook.install
import transformers.models.pair_a.modeling_pair_a
before = "family.tiny_gpu_patch_gen_config" in sys.modules
import transformers.models.tiny.modeling_tiny
print(json.dumps([before, "family.tiny_gpu_patch_gen_config" in sys.modules]))
"""
    assert python(code, VEOMNI_PATCHES=CONFIG).result == [False, True]


def test_a_config_that_another_module_takes_over_stays_as_it_was(python, tmp_path):
    (tmp_path / "gpu_config.py").write_text(
        "from patchgen.patch_spec import PatchConfig\n"
        f'config = PatchConfig(source_module="{TINY}", target_file="patched_gpu.py")\n'
        '@config.override_method("TinyNorm.forward")\ndef forward(self, x):\n    return "patched"\n'
    )
    (tmp_path / "npu_config.py").write_text(
        'from gpu_config import config\nconfig.target_file = "patched_npu.py"\n'
        '@config.override_method("TinyModel.forward")\ndef forward(self, x):\n    return "npu"\n'
    )
    code = f"""{HERE}
import json, veomni_hook.install
from {TINY} import TinyModel, TinyNorm
print(json.dumps([TinyNorm().forward(1), TinyModel().forward(1)]))
"""
    expected = {"gpu": ["patched", "patched"], "npu": ["patched", "npu"]}
    for device, values in expected.items():
        ran = python(code, VEOMNI_PATCHES="gpu_config,npu_config", VEOMNI_DEVICE=device)
        assert ran.result == values


@pytest.mark.slow
def test_a_package_that_is_installed_or_removed_later_counts(python, tmp_path):
    code = f"""{HERE}
import json, veomni_hook.install
from {TINY} import TinyModel
print(json.dumps(getattr(TinyModel, "installed", False)))
"""
    package = tmp_path / "not_installed"
    for present in (False, True, True, False):
        if present:
            package.mkdir(exist_ok=True)
            (package / "__init__.py").write_text("")
            (package / "models.py").write_text("class Model:\n    installed = True\n")
        elif package.exists():
            shutil.rmtree(package)
        assert python(code, VEOMNI_PATCHES=CONFIG).result is present
