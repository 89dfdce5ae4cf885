"""Adopted models inside Trainer, DDP, FSDP2, torch.compile, PEFT and accelerate."""

import pytest

from tests.adopt.test_adopt import CLOSE, OPS, facts_of

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def facts(tmp_path_factory):
    return facts_of("facts_of_wrappers.py", tmp_path_factory.mktemp("wrapped") / "cache")


def test_the_callback_adopts_the_trainers_model(facts):
    trainer = facts["trainer"]
    assert trainer["losses"] < CLOSE and trainer["adopted"]
    assert set(trainer["ran"]) == OPS["qwen3"]
    assert trainer["activated"] == [True, False]
    assert trainer["model_init"] < CLOSE
    assert set(trainer["model_init ran"]) == OPS["qwen3"]


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2", "peft", "compiled"])
def test_the_model_inside_runs_on_kernels(facts, wrapper):
    assert facts[wrapper]["difference"] < CLOSE
    adapters = {"low_rank_linear/product_added"} if wrapper == "peft" else set()
    assert set(facts[wrapper]["ran"]) == OPS["qwen3"] | adapters


def test_an_undone_model_is_compiled_anew(facts):
    assert facts["compiled"]["adopted"]
    assert facts["compiled"]["undone"] < CLOSE


def test_classes_that_libraries_made_stay(facts):
    first = facts["fsdp2 first"]
    assert facts["fsdp2"]["names"] == ["FSDPQwen3ForCausalLM", "FSDPQwen3DecoderLayer"]
    assert first["refused"].keys() == {"FSDPQwen3ForCausalLM", "FSDPQwen3DecoderLayer"}
    assert all("torch.distributed.fsdp" in reason for reason in first["refused"].values())
    assert first["adopted"] == ["Qwen3Attention", "Qwen3MLP", "Qwen3Model", "Qwen3RMSNorm"]
    assert first["difference"] < CLOSE


def test_accelerates_forward_is_named(facts):
    ((kind, reason),) = facts["accelerate"]
    assert kind == "Qwen3MLP" and "accelerate.hooks" in reason
