"""`families_gpu`: what its processes measure, on a CPU at a small size, and what is recorded."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import families_gpu
from benchmarks._families import FAMILIES, Family, shape

SMALL = Family("qwen3", shape(64, 96, 2, "4 2 16", 131), length=24)


@pytest.mark.slow
def test_sides_train_the_same_model_and_a_side_that_cannot_run_says_why(monkeypatch):
    monkeypatch.setattr(families_gpu, "ROUNDS", 1)
    monkeypatch.setattr(families_gpu, "STEPS", 2)
    kinds = {"upstream": "none", "hook": "torch", "liger": "none"}
    processes = {name: families_gpu.Process(kernels, "cpu") for name, kernels in kinds.items()}
    family = SMALL._replace(model_type="qwen3", decode=False)
    facts = families_gpu.measured(family, processes, ["eager", "floor", "ours", "liger"])
    again = families_gpu.measured(family._replace(model_type="absent"), processes, ["eager"])
    for process in processes.values():
        process.end()
    assert facts["ours"]["loss"] == pytest.approx(facts["eager"]["loss"], rel=1e-2)
    assert facts["ours"]["gradient_norm"] == pytest.approx(facts["eager"]["gradient_norm"], rel=1e-2)
    assert 0 < facts["eager"]["range_ms"][0] <= facts["eager"]["step_ms"] <= facts["eager"]["range_ms"][1]
    assert 0 < facts["floor"]["step_ms"] < facts["eager"]["range_ms"][1]
    assert "absent" in again["eager"]["error"]
    assert "loss" in families_gpu.line("small", facts) and "absent" in families_gpu.line("small", again)
    # It need not be installed, and its kernels are for GPUs.
    assert facts["liger"].get("error") or facts["liger"]["step_ms"] > 0


def test_the_floor_has_the_products_and_the_attention_of_both_passes():
    import torch

    from benchmarks._floor import Products

    x, weight = torch.randn(1, 2, 8, 16, requires_grad=True), torch.randn(16, 16, requires_grad=True)
    with Products() as products:
        y = torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
        (torch.nn.functional.silu(y) @ weight).sum().backward()
    assert len(products.calls) == 2 + 3
    with Products() as again:
        products.again()
    assert [call[0] for call in again.calls] == [call[0] for call in products.calls]


def test_families_are_chosen_by_the_beginning_of_their_names():
    assert list(families_gpu.chosen(["Seed", "Qwen3-8"])) == ["Seed-OSS", "Qwen3-8B"]
    assert list(families_gpu.chosen(["GPT-OSS-20B"])) == ["GPT-OSS-20B"]
    assert list(families_gpu.chosen([])) == list(FAMILIES)
    with pytest.raises(SystemExit, match="no family is called nothing; known: Qwen3-30B-A3B"):
        families_gpu.chosen(["nothing"])


@pytest.mark.parametrize("name", FAMILIES)
def test_each_family_is_a_config_that_transformers_takes(name):
    from transformers import CONFIG_MAPPING, AutoConfig

    family = FAMILIES[name]
    if family.model_type not in CONFIG_MAPPING:
        pytest.skip(f"this release has no {family.model_type}")
    config = AutoConfig.for_model(family.model_type, **family.fields)
    assert {key: getattr(config, key) for key in family.fields if key != "head_dim"} == {
        key: value for key, value in family.fields.items() if key != "head_dim"
    }
