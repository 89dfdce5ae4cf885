"""What `cache warm --kernels` finds and does, in a process with the hook: `python -m …facts_of_warming FOLDER`.

Prints JSON: the numbers of layers by model type, what small models ran, and the text of every error.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import veomni_hook.install  # isort: skip # noqa: F401

import torch
from transformers import LlamaConfig, Qwen3Config, Qwen3NextConfig, ViTConfig

from veomni_hook.errors import VeomniHookError
from veomni_hook.tools.cli.cache import warming
from veomni_hook.tools.cli.cache.fewer_layers import nodes, shortened
from veomni_hook.tools.compare.kernels import kernels_of

TYPES = (
    *("qwen3", "llama", "gemma3_text", "gemma3", "gpt_oss", "qwen3_next", "deepseek_v3", "jamba"),
    *("gpt_neo", "gpt_neox_japanese", "longcat_flash", "t5", "bert"),
)
SMALL = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "max_position_embeddings": 48,
}  # fmt: skip


def layers(config: Any) -> dict[str, object]:
    before = config.to_json_string()
    fewer, numbers = shortened(config, lambda each: warming.built(each, "meta"))
    kinds = [len(vars(node)["layer_types"]) for node in nodes(fewer) if vars(node).get("layer_types")]
    short = warming.built(fewer, "meta")
    lengths = [len(short.get_submodule(name)) for name in numbers]
    return {
        "numbers": numbers,
        "lengths": lengths,
        "kinds": kinds,
        "unchanged": config.to_json_string() == before,
    }


def ran(config: Any, tokens: list[int]) -> dict[str, object]:
    """The report of a step, and what ran in the model that took it."""
    models: list[Any] = []
    build = warming.built

    def built(config: Any, device: str) -> Any:
        models.append(build(config, device))
        return models[-1]

    warming.built = built
    try:
        report = warming.compiled(config, tokens, "cpu")
    finally:
        warming.built = build
    rows = kernels_of(models[-1])
    return {
        **report,
        "ran": sorted({row["op"] for row in rows if row["ran"] and row["backend"] not in ("eager", "not called")}),
        "calls": sum(row["calls"] for row in rows if row["op"] == "linear_cross_entropy"),
        "dtype": str(models[-1].dtype),
        "built": len(models[-1].model.layers),
        "use_cache": models[-1].config.use_cache,
        "gradients": any(one.grad is not None for one in models[-1].parameters()),
    }  # fmt: skip


def error(call: Callable[[], object]) -> str:
    try:
        call()
    except VeomniHookError as raised:
        return f"{type(raised).__name__}: {raised}"
    return ""


def without_memory(config: Any) -> str:
    step = warming._step

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError

    warming._step = full
    try:
        return error(lambda: warming.compiled(config, [16, 32], "cpu"))
    finally:
        warming._step = step


def main(folder: Path) -> None:
    small = Qwen3Config(**SMALL, num_hidden_layers=3)
    small.save_pretrained(folder / "saved")
    sliding = Qwen3Config(
        **SMALL, num_hidden_layers=4, use_sliding_window=True, sliding_window=8, max_window_layers=2
    )
    hybrid = Qwen3NextConfig(
        **SMALL, num_hidden_layers=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
        shared_expert_intermediate_size=16, linear_num_key_heads=2, linear_num_value_heads=4,
        linear_key_head_dim=8, linear_value_head_dim=8,
    )  # fmt: skip
    (folder / "empty").mkdir()
    (folder / "odd").mkdir()
    (folder / "odd" / "config.json").write_text('{"model_type": "of_nobody"}')
    impossible = LlamaConfig(**SMALL)
    vars(impossible)["hidden_size"] = "wide"
    facts = {
        "types": {name: layers(warming.config_of(name)) for name in TYPES},
        "saved": {
            name: layers(warming.config_of(str(folder / name))) for name in ("saved", "saved/config.json")
        },
        "sliding": layers(sliding),
        "small": ran(small, [16, 32]),
        "hybrid": ran(hybrid, []),
        "errors": {
            "unknown": error(lambda: warming.config_of("qwen33")),
            "empty": error(lambda: warming.config_of(str(folder / "empty"))),
            "odd": error(lambda: warming.config_of(str(folder / "odd"))),
            "no text": error(lambda: warming.built(ViTConfig(), "meta")),
            "two texts": error(lambda: warming.compiled(warming.config_of("musicgen_melody"), [], "cpu")),
            "impossible": error(lambda: warming.compiled(impossible, [], "cpu")),
            "memory": without_memory(small),
        },
    }
    print(json.dumps(facts))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
