"""Configs for modules that are not installed: said in a run, cold and warm, and an error under strict."""

import shutil

import pytest

from tests.finders.conftest import DATA, HERE, HOOK, SHOW, TINY, config_of
from veomni_hook.finders.absent_modules import problem

RUN = f"{HERE}{HOOK}{SHOW}\nimport transformers.models.still.modeling_still"


def misnamed(tmp_path, module):
    (tmp_path / "misnamed.py").write_text(config_of("config.add_post_import_block('X = 1')", module))


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "module", ["transformers.models.tinny.modeling_tiny", "transformers.models.tinny.modeling_*"]
)
def test_the_warning_comes_once_and_from_a_warm_cache_as_well(python, tmp_path, module):
    misnamed(tmp_path, module)
    for _ in range(2):
        ran = python(RUN, flags=("-W", "always"), VEOMNI_PATCHES="tiny_config,misnamed")
        assert ran.out.split() == ["103"], ran.err
        said = [line for line in ran.err.splitlines() if "misnamed:config patches nothing" in line]
        assert len(said) == 1, ran.err
        assert f"no installed module matches {module}; nearest: {TINY}" in said[0]
        assert "correct its source_module" in said[0]


def test_under_strict_it_is_an_error_each_time(python, tmp_path):
    misnamed(tmp_path, "transformers.models.tinny.modeling_tiny")
    python(RUN, VEOMNI_PATCHES="misnamed")  # warm: what is stored says it, too
    for _ in range(2):
        ran = python(RUN, VEOMNI_PATCHES="misnamed", VEOMNI_STRICT="1")
        assert ran.code == 1
        assert "ConfigError: no installed module matches transformers.models.tinny.modeling_tiny" in ran.err


def test_what_was_installed_since_is_not_warned_about(python, tmp_path):
    misnamed(tmp_path, "transformers.models.later.modeling_later")
    hub = shutil.copytree(DATA / "hub", tmp_path / "hub")
    code = f"import sys; sys.path.insert(0, 'hub')\n{RUN}\nprint(veomni_hook.install.handle.status())"
    first = python(code, VEOMNI_PATCHES="tiny_config,misnamed")
    assert "misnamed:config patches nothing" in first.err and f"{TINY}: patched (miss)" in first.out
    (hub / "transformers" / "models" / "later").mkdir()
    (hub / "transformers" / "models" / "later" / "modeling_later.py").write_text("import torch\n")
    second = python(code, VEOMNI_PATCHES="tiny_config,misnamed")
    # A miss: only now is it known that the other config is not for this module.
    assert "patches nothing" not in second.err and f"{TINY}: patched (miss)" in second.out


def test_registered_configs(python):
    code = (
        "import veomni_hook\n"
        "for module in ('nowhere.at_all', 'json.decoder', 'email.mime.*', 'transformers_modules.x.modeling_x', "
        "'*.modeling_tiny', 'json.dekoder', 'email.mim.*'):\n"
        "    veomni_hook.register(veomni_hook.PatchConfig(module))\n"
    )
    ran = python(code)
    assert ran.code == 0, ran.err
    said = [line.split("patches nothing: ")[1] for line in ran.err.splitlines() if "Warning: " in line]
    assert [line.split(". Fix")[0] for line in said] == [
        "no installed module matches nowhere.at_all",
        "no installed module matches json.dekoder; nearest: json.decoder, json.encoder",
        "no installed module matches email.mim.*; nearest: email.mime, email.mime.text, email.mime.base",
    ]
    strict = python(
        "import veomni_hook\nveomni_hook.register(veomni_hook.PatchConfig('a.b'))", VEOMNI_STRICT="1"
    )
    assert "ConfigError: no installed module matches a.b" in strict.err


MISSPELT = "transformers.models.qwen33.modeling_qwen33"


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("transformers.models.qwen3.modeling_qwen3", ""),
        ("transformers.modeling_utils", ""),
        ("transformers.models.*.modeling_*", ""),
        ("transformers.model*utils", ""),
        (
            MISSPELT,
            f"no installed module matches {MISSPELT}; nearest: transformers.models.qwen3.modeling_qwen3",
        ),
        ("transformers.models.qwen33*.modeling_*", "no installed module matches"),
        ("mytransformers.models.x.modeling_x", "no installed module matches mytransformers"),
    ],
)
def test_the_real_transformers(pattern, said):
    assert problem(pattern).startswith(said) and bool(problem(pattern)) == bool(said)


def test_a_module_that_is_no_target_is_patched_only_where_its_config_is_registered():
    assert "only where the text of a config" in problem("transformers.models.qwen3.configuration_qwen3")
    for module in ("transformers.pytorch_utils", "json.decoder"):
        assert "is not a modeling module of transformers" in problem(module)
        assert "veomni_hook.register(config)" in problem(module)
        assert problem(module, registered=True) == ""
