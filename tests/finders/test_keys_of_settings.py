"""Whatever setting changes the patched text of a module changes its key in the cache."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields, replace

import pytest

from veomni_hook.finders.applicable import config_names
from veomni_hook.finders.prepare import prepare
from veomni_hook.finders.process_cache import stage1
from veomni_hook.finders.upstream import read_upstream
from veomni_hook.kernels.selection.declaration import Kernel
from veomni_hook.kernels.selection.registry import registry
from veomni_hook.locate import locate
from veomni_hook.settings import Settings

#: Another value than the default, of settings that are not booleans.
OTHER = {
    "cache_dir": "elsewhere",
    "deterministic": "batch_invariant",
    "device": "npu",
    "dump_dir": "elsewhere",
    "kernels": "nn_layer_norm=triton",
    "memory": "checkpoint,tiles",
    "parallel": "sp=2,ep=2",
    "patches": ("an_extra_patch",),
    "plugins": "none",
    "precision": "float8",
    "traceback": "full",
}  # fmt: skip
#: Modules of which each of these settings changes one.
MODULES = (
    "transformers.models.qwen2_5_omni.modeling_qwen2_5_omni",
    "transformers.dynamic_module_utils",
    "accelerate.data_loader",
    "transformers.modeling_utils",
)
EXTRA = """
from veomni_hook import PatchConfig

config = PatchConfig(source_module="accelerate.data_loader")
config.add_post_import_block("ADDED = 1")
"""
CHANGES = {
    "idioms", "kernels", "memory", "parallel", "precision", "speech", "remote_code", "host_values", "patches",
}  # fmt: skip
#: No setting among these changes text: one case for all of them.
OTHERS = [one.name for one in fields(Settings) if one.name not in {*CHANGES, "enabled"}]


def text_and_key(module, settings):
    spec = locate(module)
    assert spec is not None
    upstream, _ = read_upstream(module, spec)
    assert upstream is not None
    key = stage1(upstream, settings, config_names(module, settings))
    return prepare(module, settings, publish=False).stored_text, key


@pytest.fixture(scope="module")
def plain():
    return {module: text_and_key(module, Settings()) for module in MODULES}


@pytest.mark.parametrize("names", [[name] for name in sorted(CHANGES)] + [OTHERS], ids=lambda names: names[0])
def test_a_setting_that_changes_text_changes_the_key(names, plain, tmp_path, monkeypatch):
    (tmp_path / "an_extra_patch.py").write_text(EXTRA)
    monkeypatch.syspath_prepend(tmp_path)
    values = {name: OTHER[name] if name in OTHER else not getattr(Settings(), name) for name in names}
    seen: Counter[tuple[bool, bool]] = Counter()
    for module in MODULES:
        text, key = text_and_key(module, replace(Settings(), **values))
        seen[text != plain[module][0], key != plain[module][1]] += 1
    assert not seen[True, False], "its text would be taken from the cache of the other value"
    assert bool(seen[True, True]) is not (names == OTHERS)


@pytest.mark.parametrize("module", MODULES)
def test_settings_that_change_one_module_change_it_together(module, plain):
    values = {name: value for name, value in OTHER.items() if name in CHANGES - {"patches"}}
    together, _ = text_and_key(module, replace(Settings(), **values))
    for name, value in values.items():
        alone, _ = text_and_key(module, replace(Settings(), **{name: value}))
        added = {line for line in alone.splitlines() if "veomni" in line} - {*plain[module][0].splitlines()}
        assert added <= {*together.splitlines()}, name


@pytest.mark.parametrize("kernels", ["eager", "torch", "rms_norm=torch,rotary=eager", "nn_layer_norm=eager"])
def test_a_choice_among_kernels_that_auto_may_take_changes_nothing(
    kernels: str, plain: dict[str, tuple[str, str]]
) -> None:
    module = MODULES[0]
    assert text_and_key(module, Settings(kernels=kernels)) == plain[module]


def test_a_kernel_that_is_added_for_auto_changes_text_and_key(plain: dict[str, tuple[str, str]]) -> None:
    module = MODULES[0]
    with registry.restored():
        registry.add(Kernel("nn_layer_norm", "rounded_once", "mine", "a.b:c"))
        text, key = text_and_key(module, Settings())
        assert "veomni_nn_layer_norm_rounded_once" in text and key != plain[module][1]
    assert text_and_key(module, Settings()) == plain[module]
