"""Run small models whole and in two parts of the positions, with attention that does not mix positions.

In a process of its own, with VEOMNI_PARALLEL set. Arguments: families, then what is left whole by mistake
(``others``: rotary tables), or an empty string. Prints, by family, the largest difference relative to the
largest value, and how often positions were cut and joined.
"""

import importlib
import json
import sys
from typing import Any

import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import veomni_hook.install  # noqa: F401
from veomni_hook.parallel import sequence

SMALL = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 64, "moe_intermediate_size": 16, "num_experts": 4,
    "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "first_k_dense_replace": 1, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
LENGTH, BORDER = 8, 3
NAMES = {
    "llama": "LlamaModel", "qwen3": "Qwen3Model", "qwen3_moe": "Qwen3MoeModel", "gemma3": "Gemma3TextModel",
    "gpt_oss": "GptOssModel", "deepseek_v3": "DeepseekV3Model",
}  # fmt: skip


class Parts:
    """In place of the runtime: the positions that the layers get."""

    def __init__(self, broken: str) -> None:
        self.broken = broken
        self.first, self.last = 0, LENGTH
        self.cut = self.joined = 0

    def shard(
        self, module: Any, hidden_states: torch.Tensor, *others: Any, cache: Any = None
    ) -> tuple[Any, ...]:
        self.cut += 1
        if self.broken:
            # As many positions, but the wrong ones.
            width = self.last - self.first
            return hidden_states[:, self.first : self.last], *(self.taken(each, 0, width) for each in others)
        return hidden_states[:, self.first : self.last], *(
            self.taken(each, self.first, self.last) for each in others
        )

    def taken(self, value: Any, first: int, last: int) -> Any:
        if isinstance(value, dict):
            return {name: self.taken(each, first, last) for name, each in value.items()}
        if isinstance(value, tuple | list):
            return type(value)([self.taken(each, first, last) for each in value])
        return value if value is None else value[..., first:last, :]

    def gather(self, module: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        self.joined += 1
        return hidden_states


def by_position(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any = None, **kwargs: Any
) -> Any:
    """Attention of each position to itself: turned queries and keys cancel, so their sum is compared too."""
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    value = value.repeat_interleave(query.shape[1] // value.shape[1], 1)
    score = torch.tanh(query.sum(-1, keepdim=True) + key.sum(-1, keepdim=True))
    return (value * (0.5 + score)).transpose(1, 2).contiguous(), None


def main(families: list[str], broken: str) -> None:
    ALL_ATTENTION_FUNCTIONS.register("by_position", by_position)
    ALL_MASK_ATTENTION_FUNCTIONS.register("by_position", eager_mask)
    facts = {}
    for family in families:
        parts = Parts(broken)
        sequence.shard, sequence.gather = parts.shard, parts.gather
        module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
        made = getattr(module, NAMES[family])
        default = made.config_class()
        small = {name: value for name, value in SMALL.items() if hasattr(default, name)}
        if isinstance(getattr(default, "layer_types", None), list):
            small["layer_types"] = [default.layer_types[0], default.layer_types[-1]]
        config = made.config_class(**small)
        config._attn_implementation = "by_position"
        torch.manual_seed(0)
        model = made(config).eval()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        ids = torch.randint(3, 60, (2, LENGTH))
        results = []
        with torch.no_grad():
            for parts.first, parts.last in ((0, LENGTH), (0, BORDER), (BORDER, LENGTH)):
                results.append(model(input_ids=ids, use_cache=False).last_hidden_state)
        whole, joined = results[0], torch.cat(results[1:], 1)
        error = (joined - whole).abs().max() / whole.abs().max()
        facts[family] = (float(error), parts.cut, parts.joined)
    print(json.dumps(facts))


if __name__ == "__main__":
    main(sys.argv[1:-1], sys.argv[-1])
