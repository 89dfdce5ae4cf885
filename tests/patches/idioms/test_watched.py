"""Slots compare every definition of a module that their kernels skip: read from the patched text, without idioms."""

import ast
import importlib.metadata
import importlib.util
from functools import cache
from pathlib import Path

import pytest
import transformers

from tests.patches.idioms.watched import Module, misses
from veomni_hook.patches.engine import Origin, patch_source

MODELS = Path(transformers.__file__).parent / "models"
#: Families with guards of all forms, and with helpers of every kind.
FAMILIES = (
    "qwen3_next", "kimi_linear", "gemma3", "qwen3_moe", "gpt_oss", "deepseek_v4", "muse_spark", "lfm2",
)  # fmt: skip


def names(families=("*",)):
    found = [path for family in families for path in sorted(MODELS.glob(f"{family}/modeling_*.py"))]
    return [f"transformers.models.{path.parent.name}.{path.stem}" for path in found]


@cache
def patched(module):
    path = importlib.util.find_spec(module).origin
    origin = Origin(module, path, "transformers", importlib.metadata.version("transformers"))
    return patch_source(Path(path).read_text(encoding="utf-8"), [], origin, idioms=True).text


@pytest.mark.parametrize("module", names(FAMILIES))
def test_every_skipped_definition_is_compared(module):
    text = patched(module)
    assert "VeomniSlot(" in text and misses(text) == []


@pytest.mark.slow
def test_every_skipped_definition_of_every_family_is_compared():
    found, slots = {}, 0
    for module in names():
        text = patched(module)
        slots += text.count(" = VeomniSlot(")
        if missed := misses(text):
            found[module] = missed
    assert slots > 500 and found == {}


@pytest.mark.parametrize("family", FAMILIES)
def test_each_comparison_is_missed_where_it_is_left_out(family):
    if not (MODELS / family).is_dir():
        pytest.skip(f"this release has no {family}")
    (module,) = names((family,))
    text = patched(module)
    for slot, skips in Module(text).slots.items():
        for place, compared in skips.items():
            for name in compared:
                left = {**skips, place: [each for each in compared if each != name]}
                found = misses(with_skips(text, slot, left))
                assert found and {(miss.slot, miss.name) for miss in found} == {(slot, name)}, (
                    slot,
                    place,
                    name,
                )


def with_skips(text, slot, skips):
    """The text of a module with other definitions to compare."""
    tree = ast.parse(text)
    made = next(
        node for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == slot
    )
    for keyword in made.value.keywords:
        if keyword.arg == "skips":
            keyword.value = ast.parse(repr(skips), mode="eval").body
    return ast.unparse(tree)
