"""Trains a small Qwen3 for a step with the hook and a user's patch, and writes the page about it."""

import sys

import veomni_hook.install

# isort: split
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

torch.manual_seed(0)
sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
model = Qwen3ForCausalLM(Qwen3Config(**sizes, num_attention_heads=4, num_key_value_heads=2)).train()
ids = torch.randint(0, 61, (2, 12))
model(input_ids=ids, labels=ids).loss.backward()
explanation = veomni_hook.explain(model)
assert explanation.to_html(sys.argv[1]) is None
assert explanation.to_html().startswith("<!doctype html>")
