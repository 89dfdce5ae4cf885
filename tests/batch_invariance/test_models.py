"""Bits of whole models in the batch-invariant mode: a trainer's forward pass against rollouts."""

from pathlib import Path

import pytest
import torch

from tests.processes import facts, outputs, started

FAMILIES = ("qwen3", "llama", "qwen3_moe", "deepseek_v3")


def bits(dtype, mode, *families):
    return facts(started(Path(__file__).with_name("bits.py"), dtype, mode, *families))


@pytest.mark.parametrize(
    "dtype", ["float32", *(pytest.param(each, marks=pytest.mark.slow) for each in ("bfloat16", "float16"))]
)
def test_a_row_has_the_same_bits_in_any_batch(dtype):
    for family, found in bits(dtype, "batch_invariant", *FAMILIES).items():
        assert all(found.values()), (family, found)


@pytest.mark.slow
def test_another_attention_is_named():
    script = """
import warnings, torch, veomni_hook
veomni_hook.activate(deterministic="batch_invariant")
from transformers import Qwen3Config, Qwen3Model
config = Qwen3Config(hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=32)
for name in ("sdpa", "eager"):
    config._attn_implementation = name
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        Qwen3Model(config)(torch.ones(1, 3, dtype=torch.long))
    print(name, [str(one.message) for one in said if "batch" in str(one.message)])
"""
    fused, eager = outputs(started("-c", script))[0].splitlines()[-2:]
    assert fused == "sdpa []"
    assert "attn_implementation='eager' is not batch-invariant" in eager


@pytest.mark.slow
def test_without_the_mode_bits_differ():
    found = bits("float32", "none", "qwen3")
    assert not all(found["qwen3"].values()), "then the test above could not fail"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_on_a_gpu(dtype):
    for family, found in bits(dtype, "batch_invariant", *FAMILIES).items():
        assert all(found.values()), (family, found)
