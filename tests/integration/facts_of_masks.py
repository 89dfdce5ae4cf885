"""Prints, as JSON, what attention got in compiled models, and how far they are from the same models uncompiled.

Run by `test_masks` with the hook ("hook"), and with the hook after ``masking_utils`` was imported ("late"); in its
own process without the hook ("plain").
"""

from __future__ import annotations

import json
import sys
from typing import Any

if __name__ == "__main__":
    if sys.argv[1] == "late":
        import transformers.masking_utils
    import veomni_hook.install  # noqa: F401

import torch
import transformers
from transformers import AutoConfig, AutoModel
from transformers.models.llama import modeling_llama

SIZES = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 32,
    "pad_token_id": 0, "attn_implementation": "sdpa",
}  # fmt: skip
LENGTH = 6
#: Short and long windows and chunks; positions that are learned; encoders.
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "gpt2": {"n_embd": 16, "n_head": 2, "n_layer": 2},
    "bert": {},
    "mistral": {"sliding_window": LENGTH + 1},
    "mistral, short window": {"sliding_window": LENGTH},
    "gemma3_text": {"sliding_window": LENGTH + 1, "layer_types": ["sliding_attention", "full_attention"]},
    "gemma3_text, short window": {
        "sliding_window": 2,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "llama4_text": {"attention_chunk_size": 64, "num_local_experts": 2, "intermediate_size_mlp": 16},
}
PACKED = torch.tensor([[0, 1, 2, 0, 1, 2], [0, 1, 0, 1, 2, 3]])


def attention(graphs: list[torch.fx.GraphModule]) -> list[bool]:
    """Whether each attention in the graphs gets a mask."""
    kernel = torch.nn.functional.scaled_dot_product_attention
    nodes = [node for graph in graphs for node in graph.graph.nodes if node.target is kernel]
    return [node.kwargs.get("attn_mask", (*node.args, None, None)[3]) is not None for node in nodes]


def run(model: Any, inputs: dict[str, Any]) -> list[torch.Tensor]:
    model.zero_grad()
    states = model(**inputs).last_hidden_state
    (states.float() * torch.linspace(-1, 1, states.numel()).view_as(states)).sum().backward()
    return [states.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def facts(name: str, **inputs: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    config = AutoConfig.for_model(name.partition(",")[0], **SIZES | MODELS[name])
    model = AutoModel.from_config(config).eval()
    cache = {} if name == "bert" else {"use_cache": False}
    inputs = {"input_ids": torch.randint(1, 32, (2, LENGTH)), **cache, **inputs}
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    expected = run(model, inputs)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    found = [run(compiled, inputs) for _ in range(2)][-1]
    pairs = zip(found, expected, strict=True)
    worst = max(((one - other).abs().max() / (1 + other.abs().max())).item() for one, other in pairs)
    return {"masks": attention(graphs), "graphs": len(graphs), "worst": worst}


#: What upstream's masks are compared with: one model shows what the patch is for.
ALONE = {"hook": list(MODELS), "plain": ["llama"], "late": ["llama"]}


def found(mode: str) -> dict[str, Any]:
    models = {"alone": {name: facts(name) for name in ALONE[mode]}}
    if mode != "late":
        models["packed"] = facts("llama", position_ids=PACKED)
        models["padded"] = facts("llama", attention_mask=torch.tensor([[0, 0, 1, 1, 1, 1], [1] * LENGTH]))
    return models | {
        "shared": modeling_llama.create_causal_mask is transformers.masking_utils.create_causal_mask,
        "file": transformers.masking_utils.__file__,
    }


if __name__ == "__main__":
    print(json.dumps(found(sys.argv[1])))
