"""The setting ``precision`` in unchanged scripts: models with adapters, checkpoints, compiled; and adopted ones."""

import pytest

pytest.importorskip("peft")

from tests.once import once
from tests.processes import facts, outputs, started

FORMATS = "float8", "mxfp8"
formats = pytest.mark.parametrize("form", [FORMATS[0], pytest.param(FORMATS[1], marks=pytest.mark.slow)])
LAYER = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def not_in(form, what):
    return f"precision: not in {form}: 1 experts: {what} was chosen"


def told(factory, value):
    def make():
        return facts(started("-m", "tests.kernels.float8.facts_of_models", VEOMNI_PRECISION=value))

    return once(factory, f"float8-{value}", make)


@formats
def test_a_script_trains_in_float8(tmp_path_factory, form):
    plain, ours = told(tmp_path_factory, ""), told(tmp_path_factory, form)
    assert plain["modules"] == plain["notes"] == []
    assert len(ours["modules"]) == 2 * len(LAYER)
    assert ours["notes"][0].startswith(f"precision: in {form}: 14 linear layers: 2 q_proj, 2 k_proj, ")
    assert ours["loss"] != plain["loss"]
    assert ours["loss"] == pytest.approx(plain["loss"], rel=2e-2)
    assert ours["checkpointed"] == pytest.approx(ours["loss"], rel=1e-5)
    assert ours["compiled"] == pytest.approx(ours["loss"], rel=1e-3)
    assert ours["deactivated"] == pytest.approx(plain["deactivated"], rel=1e-5)
    assert ours["later"] == []


@formats
def test_adapters_on_a_base_in_float8(tmp_path_factory, form):
    plain, ours = told(tmp_path_factory, ""), told(tmp_path_factory, form)
    modules, loss = ours["adapted"]
    assert len(modules) == 2 * len(LAYER)
    assert all(name.endswith("base_layer") for name in modules)
    assert loss == pytest.approx(plain["adapted"][1], rel=2e-2)
    assert loss != plain["adapted"][1]
    assert ours["trained"] == plain["trained"] == ["lora_A", "lora_B"]
    assert ours["ran"] == plain["ran"]


@formats
def test_experts(tmp_path_factory, form):
    plain, ours = (told(tmp_path_factory, value)["experts"] for value in ("", form))
    assert plain["notes"] == []
    assert ours["ran"] == [form] != plain["ran"]
    assert ours["notes"][1:] == [f"precision: in {form}: 1 experts, on a GPU from 1,024 rows of an expert on"]
    assert ours["loss"] == pytest.approx(plain["loss"], rel=1e-2)
    assert ours["loss"] != plain["loss"]
    assert ours["copied"] == [ours["loss"], [form]]
    assert ours["compiled"] == pytest.approx(ours["loss"], rel=1e-5)
    assert ours["checkpointed"] == pytest.approx(ours["loss"], rel=1e-5)
    assert ours["none"] == [plain["loss"], plain["ran"]]
    for told_ in (plain, ours):
        loss, backends, (_, reason) = told_["left out"]
        assert loss != ours["loss"] and backends == plain["ran"] and "1 experts" in reason
        assert told_["bound"][1:] == [
            ["torch"],
            [*told_["bound"][2][:1], not_in(form if told_ is ours else FORMATS[0], "moe_experts=torch")],
        ]
        assert told_["chosen"][2][1] == not_in(
            form if told_ is ours else FORMATS[0], "experts_implementation='grouped_mm'"
        )


@formats
def test_adapters_of_experts_in_float8(tmp_path_factory, form):
    plain, ours = (told(tmp_path_factory, value)["experts"] for value in ("", form))
    loss, backends, fused = ours["adapted"]
    assert backends == [form] and fused
    assert loss != plain["adapted"][0]
    assert loss == pytest.approx(plain["adapted"][0], rel=1e-2)
    assert ours["trained"] == ["lora_A", "lora_B"]


ADOPTED = """
import torch
from tests.adopt.small import make, step
model = make("llama")
before, _ = step(model)
import veomni_hook
veomni_hook.activate(banner=False, precision="float8", kernels="eager")
report = veomni_hook.adopt(model)
linear = [type(module).__name__ for module in model.modules()].count("Float8Linear")
after, _ = step(model)
report.undo()
again, _ = step(model)
print(linear, before != after, before == again)
"""


def test_an_adopted_model():
    assert outputs(started("-W", "ignore", "-c", ADOPTED))[0].split() == ["14", "True", "True"]


IMPORT = "import veomni_hook; veomni_hook.activate({}); import transformers.models.llama.modeling_llama"
TWO = "precision='float8', deterministic='batch_invariant'"


def test_rows_in_float8_are_not_batch_invariant():
    process = started("-c", IMPORT.format(TWO))
    assert "products in float8 are not batch-invariant" in process.communicate()[1]


def test_a_misspelt_setting_is_refused():
    process = started("-c", IMPORT.format(""), VEOMNI_PRECISION="float 8")
    errors = process.communicate()[1]
    assert "VEOMNI_PRECISION has the illegal value 'float 8'" in errors
    assert "float8,skip=k_proj+v_proj" in errors
