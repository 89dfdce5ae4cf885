"""A model whose forward is captured as a CUDA graph: nothing is read, nothing is sent, and replays are right."""

from __future__ import annotations

import pytest
import torch

from tests.processes import facts, started

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

SCRIPT = """
import json, sys
import veomni_hook.install
import torch
from transformers import AutoConfig, AutoModelForCausalLM

sizes = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, vocab_size=128,
             num_key_value_heads=2, head_dim=16, use_cache=False, sliding_window=8)
config = AutoConfig.for_model(sys.argv[1], **sizes)
torch.manual_seed(0)
model = AutoModelForCausalLM.from_config(config).to("cuda", torch.bfloat16).eval()
ids, others = torch.randint(3, 128, (2, 2, 12), device="cuda")
with torch.no_grad():
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        for _ in range(3):
            model(ids)
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = model(ids).logits
    ids.copy_(others)
    graph.replay()
    expected = model(others).logits
print(json.dumps(torch.equal(logits, expected)))
"""


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gpt2"])
def test_a_replay_has_the_logits_of_its_ids(family, tmp_path):
    assert facts(started("-c", SCRIPT, family, cache=tmp_path, VEOMNI_STRICT="1"))
