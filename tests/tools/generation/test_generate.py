"""`generate`: the text of `dump`, and the command in it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.processes import outputs, started
from veomni_hook import PatchConfig, generate
from veomni_hook.errors import ConfigError
from veomni_hook.finders.build import stored_form
from veomni_hook.patches.engine import PatchedSource
from veomni_hook.patches.report import PatchReport, Remark
from veomni_hook.settings import Settings
from veomni_hook.tools.generation.generate import Recipe

LLAMA = "transformers.models.llama.modeling_llama"


def doubled() -> PatchConfig:
    config = PatchConfig(LLAMA, label="package.of_mine:config", device="npu")

    @config.override_method("LlamaMLP.forward")
    def forward(self, x):
        return 2 * self.down_proj(x)

    return config


def test_a_config_is_applied_alone() -> None:
    text = generate(doubled())
    assert "return 2 * self.down_proj(x)" in text and "VeomniSlot" not in text
    assert f"\n# Made by:    veomni-hook dump {LLAMA} --config package.of_mine:config --device npu\n" in text
    recipe = Recipe.of(text)
    assert recipe == Recipe(LLAMA, "package.of_mine:config", "npu")


def test_a_module_is_patched_as_an_import_would_and_nothing_is_imported() -> None:
    code = f"import sys, veomni_hook; print(veomni_hook.generate({LLAMA!r})); print('torch' in sys.modules)"
    printed, _ = outputs(started("-c", code))
    *lines, heavy = printed.splitlines()
    assert heavy == "False" and any(
        line.endswith('VeomniSlot("gated_mlp", "product", __name__)') for line in lines
    )
    assert printed == generate(LLAMA) + "\nFalse\n"


def test_a_config_for_many_modules_is_no_recipe() -> None:
    with pytest.raises(ConfigError, match=r"is for every module that transformers\.\* matches"):
        generate(PatchConfig("transformers.*"))


@pytest.mark.parametrize("standalone", [False, True])
def test_the_command_says_the_settings_that_count(standalone: bool) -> None:
    settings = Settings(
        patches=("mine", "yours"), idioms=False, parallel="sp=2", kernels="rms_norm=torch", strict=True,
        device="npu",
    )  # fmt: skip
    recipe = Recipe(LLAMA, standalone=standalone)
    alone = " --standalone" if standalone else ""
    more = "" if standalone else " VEOMNI_PARALLEL=sp=2 VEOMNI_KERNELS=rms_norm=torch"
    command = f"VEOMNI_PATCHES=mine,yours VEOMNI_IDIOMS=0{more} veomni-hook dump {LLAMA} --device npu{alone}"
    assert recipe.command(settings) == command
    read = Recipe.of(f"# A line.\n# Made by:    {command}\n")
    assert read == replace(recipe, device="npu", variables=recipe.variables_of(settings))
    assert f"dump {LLAMA} --device gpu" in recipe.command(replace(settings, device="gpu"))
    assert Recipe(LLAMA, "mine").variables_of(settings) == ()
    assert Recipe.of("# Made by:    hand\n") is None and Recipe.of("x = 1\n") is None


def test_the_hash_is_the_same_on_every_machine() -> None:
    def named(where: str, what: str = "it is odd") -> str:
        report = PatchReport("m", "1", remarks=(Remark("package:config", "f", what, where, "change it"),))
        return stored_form(PatchedSource("x = 1\n", "x = 1\n", report)).patch_hash

    assert (
        named("/one/config.py:3") == named("/another/config.py:3") != named("/one/config.py:3", "it is even")
    )
