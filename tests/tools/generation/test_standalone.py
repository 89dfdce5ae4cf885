"""Files that do without this package: what they compute, and what is in them."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests import processes
from tests.tools.generation.without_package import FAMILIES
from veomni_hook import PatchConfig, generate
from veomni_hook.errors import ConfigError
from veomni_hook.settings import Settings
from veomni_hook.tools.cli.inputs.sources import source_tree
from veomni_hook.tools.generation.formulas import is_plain, written
from veomni_hook.tools.generation.generate import Recipe

#: What the file of each family calls, without the beginning of the names.
MLP, NORM, SCALE = "gated_mlp_product", "rms_norm_cast_before_weight", "rms_norm_normalised"
CALLED = {
    "llama": {MLP, NORM, SCALE},
    "qwen3": {MLP, NORM, SCALE},
    "qwen3_moe": {MLP, NORM, SCALE, "moe_router_softmax_topk"},
    "qwen3_5": {MLP, NORM, SCALE, "rms_norm_one_plus_weight", "rms_norm_cast_before_weight_gated"},
    "qwen2_5_vl": {MLP, NORM, SCALE},
}


def modeling(family: str) -> str:
    return f"transformers.models.{family}.modeling_{family}"


def test_its_models_compute_what_upstreams_do_where_the_package_is_not_installed(tmp_path: Path) -> None:
    for family in FAMILIES:
        (tmp_path / f"{family}.py").write_text(generate(modeling(family), standalone=True), encoding="utf-8")
    facts = processes.facts(processes.started("-m", "tests.tools.generation.without_package", tmp_path))
    assert facts.keys() == FAMILIES.keys()
    for family, fact in facts.items():
        assert fact["same"] and fact["numbers"] > 20 and fact["far"] < 1e-5, (family, fact)
        # Not every release makes models inside a model by their config.
        assert {name.removeprefix("veomni_") for name in fact["called"]} - {"from_config"} == CALLED[family]


#: Not every release has the second.
SOME = [
    name
    for name in ("chameleon", "deepseek_v4", "gpt_oss", "mamba2", "seamless_m4t")
    if find_spec(f"transformers.models.{name}") is not None
]


@pytest.mark.parametrize("families", [SOME, pytest.param([], marks=pytest.mark.slow)])
def test_every_module_can_be_such_a_file(families: list[str]) -> None:
    called = 0
    for module in source_tree().files(families):
        found, text = Recipe(module, standalone=True).made(Settings())
        names = {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
        slots = found.report.slots if found.report is not None else ()
        assert {slot.name for slot in slots} <= names and "VeomniSlot" not in names, module
        assert not [
            line for line in text.splitlines() if line.startswith(("from veomni_hook", "import veomni_hook"))
        ]
        called += len(slots)
    assert called > 4


def test_the_patches_of_configs_are_in_it_and_what_they_need_of_this_package_is_refused() -> None:
    config = PatchConfig(modeling("llama"))

    @config.override_method("LlamaMLP.forward")
    def forward(self, x):
        return self.down_proj(x)

    text = generate(config, standalone=True)
    assert "return self.down_proj(x)" in text and "def veomni_" not in text
    config.add_import("veomni_hook", names=["bind"])
    with pytest.raises(ConfigError, match=r"modeling_llama uses this package: from veomni_hook import bind"):
        generate(config, standalone=True)


def test_formulas_that_hold_for_some_calls_or_need_more_than_torch_are_not_plain() -> None:
    assert is_plain("rms_norm", "gate_before_norm") and is_plain("moe_router", "softmax_topk")
    assert not is_plain("log_decay", "channels"), "what no kernel can take is upstream's"
    assert not is_plain("moe_experts", "gated"), "its layout is data of this package"
    assert not is_plain("add_rms_norm", "cast_before_weight")
    assert not is_plain("rms_norm", "absent")


def test_names_of_the_file_are_not_bound_anew() -> None:
    upstream = "import torch\nfrom typing import Callable\n\nfunctional = 1\n"
    text = written([("rms_norm", "gate_before_norm"), ("gated_mlp", "product")], ast.parse(upstream))
    module: dict[str, object] = {}
    exec(upstream + text, module)
    assert module["functional"] == 1 and "import torch\n" not in text
    assert text.startswith("from collections.abc import Callable as veomni_Callable\n")
    x, gate, weight = torch.randn(3, 8), torch.randn(3, 8), torch.randn(8)
    gated = x * torch.nn.functional.silu(gate)
    expected = torch.nn.functional.rms_norm(gated, (8,), weight, 1e-6)
    torch.testing.assert_close(module["veomni_rms_norm_gate_before_norm"](x, gate, weight, 1e-6), expected)
