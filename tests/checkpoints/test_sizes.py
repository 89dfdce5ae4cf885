import re
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

from veomni_hook.checkpoints.sizes import COUNT_KEYS, OWN_LAYOUT, ExpertSizes
from veomni_hook.errors import CheckpointError

WANTED = ExpertSizes(8, 64, 16)
FLAT = {"hidden_size": 64, "moe_intermediate_size": 16, "intermediate_size": 48}


@pytest.mark.parametrize("key", COUNT_KEYS)
@pytest.mark.parametrize("kind", [dict, lambda d: SimpleNamespace(**d)])
def test_flat_and_nested_objects_and_mappings(key, kind):
    flat = kind(FLAT | {key: 8})
    assert ExpertSizes.of(flat) == WANTED
    assert ExpertSizes.of(kind({"text_config": flat, "hidden_size": 1})) == WANTED
    omni = kind({"thinker_config": kind({"text_config": flat}), "talker_config": kind({"num_experts": 2})})
    assert ExpertSizes.of(omni) == WANTED


def test_the_inner_config_counts():
    assert ExpertSizes.of({"text_config": FLAT | {"num_experts": 8}, "num_experts": 2}) == WANTED
    assert ExpertSizes.of({"text_config": {"hidden_size": 1}} | FLAT | {"num_experts": 8}) == WANTED


def test_the_plain_intermediate_size_where_there_is_no_other():
    config = {"hidden_size": 64, "intermediate_size": 16, "num_local_experts": 8}
    assert ExpertSizes.of(config) == WANTED
    assert ExpertSizes.of(config | {"moe_intermediate_size": None}) == WANTED


def test_sizes_are_taken_as_they_are():
    assert ExpertSizes.of(WANTED) is WANTED


@pytest.mark.parametrize(
    ("config", "match"),
    [
        (FLAT, "has no number of routed experts"),
        (FLAT | {"num_experts": 8, "n_routed_experts": 9}, "num_experts=8, n_routed_experts=9"),
        (FLAT | {"num_experts": [8, 8]}, "num_experts of experts is"),
        (FLAT | {"num_experts": 0}, "num_experts of experts is 0"),
        ({"num_experts": 8, "hidden_size": 64}, "intermediate_size of experts is None"),
        ({"num_experts": 8, "intermediate_size": 16}, "hidden_size of experts is None"),
        (FLAT | {"num_experts": 8, "moe_intermediate_size": [16, 16]}, "intermediate_size of experts is"),
        (FLAT | {"num_local_experts": 8, "model_type": "gpt_oss"}, "experts of gpt_oss are"),
        (
            {"text_config": FLAT | {"num_local_experts": 8, "model_type": "llama4_text"}},
            "experts of llama4_text",
        ),
    ],
)
def test_configs_that_do_not_tell(config, match):
    with pytest.raises(CheckpointError, match=re.escape(match)):
        ExpertSizes.of(config)


def test_two_keys_may_agree():
    assert ExpertSizes.of(FLAT | {"num_experts": 8, "num_local_experts": 8}) == WANTED


def test_every_model_with_a_transposed_layout_in_memory_is_known():
    """Held against the installed release: gate_up_proj is declared with the hidden size before 2I."""
    spec = find_spec("transformers")
    assert spec is not None and spec.origin is not None
    declared = re.compile(r"self\.gate_up_proj = nn\.Parameter\(\s*torch\.\w+\(([^()]*)\)", re.DOTALL)
    found = set()
    for path in Path(spec.origin).parent.glob("models/*/modeling_*.py"):
        for shape in declared.findall(path.read_text(encoding="utf-8")):
            sizes = [each.strip() for each in shape.split(",") if each.strip()]
            if len(sizes) == 3 and "2 *" in sizes[2]:
                found.add(path.parent.name)
    known = {name.removesuffix("_text") for name in OWN_LAYOUT}
    assert found and found <= known
