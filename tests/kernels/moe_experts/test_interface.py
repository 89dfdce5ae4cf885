"""Ours in transformers' list of experts' implementations."""

import warnings

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import Qwen3MoeConfig
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.qwen3_moe import modeling_qwen3_moe

from tests.kernels.matching import DEVICE, close
from veomni_hook.errors import KernelError, VeomniHookWarning
from veomni_hook.kernels.moe_experts import interface
from veomni_hook.kernels.moe_experts.provenance import OURS
from veomni_hook.kernels.selection.process_choice import set_choice
from veomni_hook.tools.report.explanation import explain

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 16,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "num_experts": 4,
    "num_experts_per_tok": 2,
}  # fmt: skip


@pytest.fixture
def patched_moe(modules):
    return modules("qwen3_moe")[1]


@pytest.fixture
def model(patched_moe):
    if Version(transformers.__version__) < Version("5.3"):
        pytest.skip("this release takes only its own names")
    torch.manual_seed(0)
    found = patched_moe.Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES)).to(DEVICE)
    found.set_experts_implementation(OURS)
    return found


def ids():
    return torch.arange(12, device=DEVICE).view(2, 6)


def taken(model):
    (line,) = (each for each in str(explain(model)).splitlines() if "moe_experts/" in each)
    return line.partition("moe_experts/gated: ")[2]


def test_transformers_lists_it(patched_moe):
    assert ALL_EXPERTS_FUNCTIONS[OURS] is interface.run_upstream


def test_who_chooses_it_has_it_also_where_upstream_is_as_fast(model):
    upstream = modeling_qwen3_moe.Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES)).to(DEVICE)
    upstream.load_state_dict(model.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("error", VeomniHookWarning)
        found = model(ids()).logits
    close(found, upstream(ids()).logits, 1e-4)
    assert taken(model).startswith(("torch", "triton"))
    model.set_experts_implementation("eager")
    close(model(ids()).logits, found, 1e-4)
    assert taken(model).startswith("eager")


def test_a_kernel_asked_for_by_name_wins_over_the_list(model):
    for name in ("eager", "reference"):
        set_choice(f"moe_experts={name}")
        with warnings.catch_warnings():
            warnings.simplefilter("error", VeomniHookWarning)
            model(ids())
        assert taken(model).startswith(name)


def test_what_a_kernel_refuses_is_upstreams_with_a_warning(model):
    model.model.layers[0].mlp.experts.act_fn = torch.nn.Hardtanh()
    with pytest.warns(VeomniHookWarning, match=r"Qwen3MoeExperts runs upstream's loop.*[Hh]ardtanh"):
        model(ids())


def test_where_no_kernel_can_run_it_is_an_error(model, monkeypatch):
    experts = model.model.layers[0].mlp.experts
    monkeypatch.delitem(interface._SLOTS, type(experts))
    experts.act_fn = torch.nn.Hardtanh()
    with pytest.raises(KernelError, match=r"no kernel supports Qwen3MoeExperts"):
        model(ids())


def test_it_survives_a_copy_of_the_config_and_is_saved_by_no_name(model, tmp_path):
    model.save_pretrained(tmp_path)
    assert OURS not in (tmp_path / "config.json").read_text()


def test_explain_says_what_a_backend_by_name_overrides(patched_moe):
    # A GPU's grouped products are in bfloat16.
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    made = patched_moe.Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES)).to(DEVICE, dtype)
    vars(made.config)["_veomni_experts_choice"] = "grouped_mm"  # what patched transformers notes of a choice
    set_choice("moe_experts=torch")
    said = "torch, chosen by name, overrides experts_implementation='grouped_mm'"
    assert said in taken(made)  # before the first call as after it
    made(ids())
    assert said in taken(made) and taken(made).startswith("torch (chosen")
    for choice in ("auto", "moe_experts=eager"):
        set_choice(choice)
        assert "overrides" not in taken(made)


def test_explain_says_that_eager_by_name_overrides_ours(model):
    set_choice("moe_experts=eager")
    assert "eager, chosen by name, overrides experts_implementation='veomni'" in taken(model)
