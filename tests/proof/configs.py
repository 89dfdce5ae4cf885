"""Small configurations: a real one with its sizes shrunk, or a stand-in that answers by name."""

from __future__ import annotations

import re
from typing import Any

HIDDEN, INTERMEDIATE, VOCABULARY, HEADS, EXPERTS, TOP_K = 16, 24, 40, 4, 4, 2

#: Attribute names and their values, first match wins; sizes are small and differ, so that a swap is an error.
SIZES: tuple[tuple[str, Any], ...] = (
    (r"num_(local_|routed_|moe_)?experts$|n_routed_experts|moe_num_experts$|num_total_experts|total_experts", EXPERTS),
    (r"num_experts_per_tok|experts_per_token|(moe_)?top_?k(_experts)?$|moe_topk|num_selected_experts", TOP_K),
    (r"group_size$", 8),
    (r"n_group$|num_groups$|num_expert_groups?|n_groups$", 2),
    (r"topk_group", 1),
    (r"(moe_)?(num_|n_)?shared_experts$", 2),
    (r"num_(fwd_)?mem_blocks$", 2),
    (r"intermediate_size$|ffn_dim|n_inner|(^|_)d_ff$|mlp_dim|ffn_hidden_size|_intermediate_dim|feed_forward_dim", INTERMEDIATE),
    (r"additional_vocab_size$", 0),
    (r"vocab_size$", VOCABULARY),
    (r"num_(attention_|key_value_|kv_)?heads|n_heads?$|num_query_heads|num_attention_heads", HEADS),
    (r"head_dim$|d_kv$|kv_channels|head_size", 8),
    (r"num_hidden_layers|num_layers|n_layers?$", 2),
    (r"^(num_labels|downsample_factor)$", 2),
    (r"max_position", 64),
    (
        r"hidden_size|(in|out)put_size|embedding_size|d_model|n_embd|embed_dim|hidden_dim|dim$|emb_dim|width|lora_rank|hidden_channels|channels|normalized_shape",
        HIDDEN,
    ),
)  # fmt: skip

#: What a stand-in answers where neither the real configuration nor a size says anything.
NAMES: tuple[tuple[str, Any], ...] = (
    (r"act(ivation)?(_fn|_function)?$|hidden_act", "silu"),
    (r"bias|dropout_in|^tie_|^use_(cache|bias)", False),
    (r"dropout|drop_", 0.0),
    (r"eps(ilon)?$|variance", 1e-6),
    (r"norm_topk_prob", True),
    (r"softcap", 5.0),
    (r"scal|multiplier|alpha", 1.5),
    (r"limits", (0.7,) * 8),
    (r"limit", 0.7),
    (r"pad_token_id", 0),
    (r"drop", 0.0),
    (r"token_id", 1),
)


class Small:
    """Answers attributes like a configuration with small sizes.

    Args:
        real: a configuration whose other values are used; its sizes are not.
        values: attributes that win over everything, also in its parts.
    """

    def __init__(self, real: Any = None, **values: Any) -> None:
        self.__dict__["_real"] = real
        self.__dict__["_values"] = values

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in self._values:
            return self._values[name]
        if name == "get_text_config":
            return lambda *_, **__: self if self._real is None else getattr(self, "text_config", self)
        found = _of(self._real, name)
        if found is None or (isinstance(found, int | float) and not isinstance(found, bool)):
            size = _first(SIZES, name)
            if size is not None:
                return size
        if hasattr(found, "to_dict"):
            return Small(found, **self._values)
        if name.endswith("limits") and not any(found or ()):
            return _first(NAMES, name)
        if found is not None or _has(self._real, name):
            return found
        return Small() if name.endswith("_config") else _first(NAMES, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._values[name] = value

    def get(self, name: str, default: Any = None) -> Any:
        """As a mapping would answer."""
        found = getattr(self, name)
        return default if found is None else found


def _of(real: Any, name: str) -> Any:
    """What a configuration says; where it is silent, the first of its parts that says something."""
    parts = [part for key, part in sorted(getattr(real, "__dict__", {}).items()) if key.endswith("_config")]
    for one in (real, *parts):
        if _has(one, name):
            return getattr(one, name)
    return None


def _has(real: Any, name: str) -> bool:
    try:
        return hasattr(real, name)
    except Exception:  # it differs between layers
        return False


def _first(table: tuple[tuple[str, Any], ...], name: str) -> Any:
    return next((value for pattern, value in table if re.search(pattern, name)), None)
