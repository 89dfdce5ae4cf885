"""The finder: what is a target, every way of importing one, and the hooks beside ours."""

import zipfile

import pytest

from tests.finders.conftest import DATA, HERE, HOOK, SHOW, TINY, config_of
from veomni_hook.finders.finder import PatchFinder
from veomni_hook.finders.targets import is_target

PATCHED = "103"  # double(1) + bias 1 + 100


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("transformers.models.qwen3.modeling_qwen3", True),
        ("transformers.models.blip.modeling_blip_text", True),
        ("transformers.models.qwen3.configuration_qwen3", False),
        ("transformers.models.modeling_qwen3.configuration_x", False),
        ("transformers.modeling_layers", True),
        ("transformers.modeling_utils", True),
        ("transformers.dynamic_module_utils", True),
        ("transformers.masking_utils", True),
        ("transformers.modeling_outputs", False),
        ("peft.tuners.lora.layer", True),
        ("peft.tuners.lora.bnb", True),
        ("peft.tuners.lora.model", False),
        ("transformers_modules.repo.modeling_x", False),
        ("mytransformers.models.qwen3.modeling_qwen3", False),
        ("torch", False),
    ],
)
def test_targets_are_the_modeling_modules_of_transformers(name, expected):
    assert is_target(name) is expected


def test_an_unrelated_name_loads_nothing_of_the_pipeline(python):
    ran = python(
        "import sys, veomni_hook.install, json, textwrap, transformers.pytorch_utils\n"
        "print(json.dumps([m for m in sys.modules if m.startswith('veomni_hook.') and m.count('.') > 1]))"
    )
    assert ran.result == [
        "veomni_hook.finders.state",
        "veomni_hook.finders.targets",
        "veomni_hook.finders.finder",
        "veomni_hook.finders.handle",
    ]


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "statement",
    [
        "from transformers.models.tiny.modeling_tiny import TinyNorm",
        "from transformers import TinyNorm",
        "from transformers.models.tiny import TinyNorm",
        "import transformers.models.tiny.modeling_tiny as m; TinyNorm = m.TinyNorm",
        "import importlib; TinyNorm = importlib.import_module('transformers.models.tiny.modeling_tiny').TinyNorm",
        "import transformers; TinyNorm = type(transformers.TinyModel().norm)",
    ],
)
def test_every_way_of_importing_gives_the_patched_class(python, statement):
    ran = python(f"import veomni_hook.install\n{statement}\nprint(TinyNorm().forward(1))")
    assert ran.out.strip() == PATCHED, ran.err


def test_without_the_hook_nothing_is_patched(python):
    assert python(SHOW).out.strip() == "3"


IMPORTS = {
    "one end of a circle": "import transformers.models.pair_a.modeling_pair_a as m; got = m.both()",
    "its other end": "import transformers.models.pair_b.modeling_pair_b as m; got = m.both()",
    "a namespace package": "import transformers.models.namespaced.modeling_namespaced as m; got = m.which()",
    "a reload": (
        f"import importlib, {TINY} as m; m.TinyNorm.forward = None\n"
        "got = [importlib.reload(m) is m, m.TinyNorm().forward(1)]"
    ),
    "a target that nothing patches": (
        "import transformers.models.auto.modeling_auto as m\n"
        "got = [type(m.__loader__).__name__, m.__file__[-21:]]"
    ),
}
EXPECTED = [
    ["patched a", "patched b"],
    ["patched b", "patched a"],
    "patched",
    [True, 103],
    ["SourceFileLoader", "auto/modeling_auto.py"],
]


@pytest.mark.parametrize(("name", "expected"), [*zip(IMPORTS, EXPECTED, strict=True)], ids=[*IMPORTS])
def test_imports_of_other_kinds(python, name, expected):
    assert python(f"{HOOK}import json\n{IMPORTS[name]}\nprint(json.dumps(got))").result == expected


def test_many_threads_import_once_and_patched(python):
    ran = python(
        """
import json, threading, veomni_hook.install
# Of the circular pair one end only: CPython itself can raise _DeadlockError when threads enter a circle at both.
names = ["tiny.modeling_tiny", "pair_a.modeling_pair_a", "auto.modeling_auto", "namespaced.modeling_namespaced"]
start, got = threading.Barrier(16), []
def work(i):
    import importlib
    start.wait()
    got.append((names[i % 4], id(importlib.import_module("transformers.models." + names[i % 4]))))
threads = [threading.Thread(target=work, args=(i,)) for i in range(16)]
[t.start() for t in threads]; [t.join(60) for t in threads]
from veomni_hook.install import handle
print(json.dumps([len(got), len(set(got)), sum(o.patched for o in handle.status().modules.values())]))
"""
    )
    assert ran.result == [16, 4, 4], ran.err


@pytest.mark.sample(1)
@pytest.mark.parametrize("flags", [("-O",), ("-OO",), ("-X", "importtime"), ("-X", "dev"), ("-B",)])
def test_interpreter_flags(python, flags):
    for _ in range(2):  # cold, then from the cache
        ran = python(HOOK + SHOW, flags=flags)
        assert ran.out.strip() == PATCHED, ran.err
    assert python(HOOK + SHOW).out.strip() == PATCHED


def test_asserts_follow_the_interpreters_optimisation(python, tmp_path):
    override = "@config.override_method('TinyNorm.forward')\ndef forward(self, x):\n    assert x > 1, 'too small'\n    return x"
    (tmp_path / "asserting.py").write_text(config_of(override))
    code = HERE + HOOK + SHOW
    assert python(code, flags=("-O",), VEOMNI_PATCHES="asserting").out.strip() == "1"
    assert "too small" in python(code, VEOMNI_PATCHES="asserting").err


def test_a_zipped_transformers_is_left_alone_with_a_reason(python, tmp_path):
    archive = tmp_path / "hub.zip"
    with zipfile.ZipFile(archive, "w") as zipped:
        for path in (DATA / "hub").rglob("*.py"):
            zipped.write(path, path.relative_to(DATA / "hub"))
    code = f"import sys; sys.path[:] = [{str(archive)!r}] + [p for p in sys.path if not p.endswith('hub')]\n{HOOK}{SHOW}"
    ran = python(code)
    assert ran.out.strip() == "3"
    assert f"{TINY} is left unpatched: no source file: loaded by zipimporter" in ran.err
    strict = python(code, VEOMNI_STRICT="1")
    assert strict.code == 1 and "cannot be patched: no source file" in strict.err


def test_a_module_without_source_is_left_alone_with_a_reason(python, tmp_path):
    import compileall
    import shutil

    shutil.copytree(DATA / "hub", tmp_path / "hub", ignore=shutil.ignore_patterns("__pycache__"))
    folder = tmp_path / "hub" / "transformers" / "models" / "tiny"
    compileall.compile_dir(folder, quiet=2, legacy=True)
    (folder / "modeling_tiny.py").unlink()
    ran = python(
        f"import sys; sys.path.insert(0, {str(tmp_path / 'hub')!r}); import veomni_hook.install\n{SHOW}"
    )
    assert ran.out.strip() == "3", ran.err
    assert "is left unpatched: no source file: loaded by SourcelessFileLoader" in ran.err


@pytest.mark.parametrize("missing", ["nothing.modeling_nothing", "tiny.modeling_nothing"])
def test_a_missing_module_is_an_ordinary_import_error(python, missing):
    ran = python(f"{HOOK}import transformers.models.{missing}")
    named = missing.removesuffix(".modeling_nothing") if missing.startswith("nothing") else missing
    assert f"ModuleNotFoundError: No module named 'transformers.models.{named}'" in ran.err


def test_a_failing_patch_leaves_no_module_behind(python):
    ran = python(
        f"""
import sys, veomni_hook.install
for _ in range(2):
    try:
        import {TINY}
    except Exception as error:
        print(type(error).__name__, "forwrad" in str(error), "forward" in str(error), {TINY!r} in sys.modules)
""",
        VEOMNI_PATCHES="misspelt_config",
    )
    assert ran.out.splitlines() == ["PatchTargetError True True False"] * 2, ran.err


def test_an_editable_installs_finder_is_asked(python):
    """Editable installs put a finder of their own behind PathFinder."""
    ran = python(
        f"""
import sys, importlib.util, veomni_hook.install
class Editable:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "transformers.models.elsewhere.modeling_elsewhere":
            return importlib.util.spec_from_file_location(name, {str(DATA / "hub/transformers/models/tiny/modeling_tiny.py")!r})
        if name == "transformers.models.elsewhere":
            return importlib.machinery.ModuleSpec(name, None, is_package=True)
sys.meta_path.append(Editable)
from veomni_hook import PatchConfig, register
config = PatchConfig("transformers.models.elsewhere.modeling_elsewhere")
config.add_post_import_block("ADDED = 1")
register(config)
import transformers.models.elsewhere.modeling_elsewhere as m
print(m.ADDED)
"""
    )
    assert ran.out.strip() == "1", ran.err


def test_a_finder_that_knows_nothing_does_not_end_the_search(python):
    code = "class Nothing:\n    find_spec = staticmethod(lambda *arguments: None)\nimport sys, veomni_hook.install\n"
    for place in ("sys.meta_path.append(Nothing)", "sys.meta_path.insert(1, Nothing)"):
        assert python(f"{code}{place}\n{SHOW}").out.strip() == PATCHED


@pytest.mark.parametrize("ours_first", [True, False])
def test_beside_beartypes_claw(python, ours_first):
    hook = "import veomni_hook.install"
    claw = "from beartype.claw import beartype_packages; beartype_packages(['transformers.models.tiny'])"
    order = [hook, claw] if ours_first else [claw, hook]
    ran = python(
        "\n".join(order)
        + "\nfrom transformers.models.tiny.modeling_tiny import TinyModel\n"
        + "TinyModel.forward.__annotations__; m = TinyModel(); print(m.norm.forward(1))\n"
        + "try:\n    m.forward('not a TinyNorm')\nexcept Exception as e: print(type(e).__name__)"
    )
    assert ran.out.split() == [PATCHED, "BeartypeCallHintParamViolation"], ran.err


JAXTYPING = "from jaxtyping import install_import_hook\ninstall_import_hook({!r}, 'beartype.beartype')\n"


def test_beside_jaxtypings_hook(python):
    show = f"import tables, sys\n{SHOW}\nprint(type(sys.modules['tables'].__loader__).__name__)"
    ran = python(JAXTYPING.format("tables") + HOOK + show)
    assert ran.out.split() == [PATCHED, "_JaxtypingLoader"], ran.err


def test_a_hook_that_claims_a_target_before_ours_is_named(python):
    jaxtyping = JAXTYPING.format("transformers.models.tiny")
    ran = python(f"{HOOK}{jaxtyping}{SHOW}\nprint(veomni_hook.install.handle.status())")
    assert ran.out.split()[0] == "3" and "_JaxtypingFinder" in ran.out
    assert f"{TINY}: not patched: imported before the hook was active, or taken by a finder" in ran.out


def test_beside_pytests_rewriter(python, tmp_path):
    (tmp_path / "test_inside.py").write_text(
        f"import veomni_hook.install\n{SHOW}\ndef test_it():\n    assert TinyNorm().forward(1) == {PATCHED}\n"
        "def test_rewritten():\n    left = 1\n    assert left == 2\n"
    )
    ran = python(
        "import pytest, sys; sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', 'test_inside.py']))"
    )
    assert "1 failed, 1 passed" in ran.out, ran.out + ran.err
    assert "assert 1 == 2" in ran.out


def test_the_finder_answers_only_for_names_it_knows():
    finder = PatchFinder()
    assert finder.find_spec("json.decoder") is None
    assert "meta_path[None]" in repr(finder)
