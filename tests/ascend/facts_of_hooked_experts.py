"""Trains a small Qwen3-MoE under the hook and `auto`, a CPU standing for an Ascend device; prints what ran."""

import json

if __name__ == "__main__":
    import veomni_hook.install  # before what it patches

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import veomni_hook
from tests.ascend import double
from tests.ascend.test_training import EXPERTS, SIZES, train
from veomni_hook.kernels.selection.registry import registry
from veomni_hook.kernels.selection.system import System

double.install()
torch.manual_seed(0)
config = Qwen3MoeConfig(**SIZES | EXPERTS)
model = Qwen3MoeForCausalLM(config).train()
state = {name: value.clone() for name, value in model.state_dict().items()}
with veomni_hook.use_kernels("eager"):
    expected = train(model).tolist()
model.load_state_dict(state)
System.detect = staticmethod(lambda device, names=(): System.named("ascend"))
registry.version += 1
losses = train(model).tolist()
rows = veomni_hook.explain(model).rows
print(
    json.dumps(
        {"expected": expected, "losses": losses, "ran": sorted({f"{r.op}: {r.backend}" for r in rows})}
    )
)
