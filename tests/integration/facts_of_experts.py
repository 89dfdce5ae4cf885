"""Runs small mixtures of experts; `python facts_of_experts.py FOLDER` does it with the hook and prints JSON.

Without the hook `plain` saves models and what they compute; with it `patched` loads these, compares and saves them
back; without it `all_again` loads what that saved.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    import veomni_hook.install  # noqa: F401

import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

SIZES = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
    "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2,
}  # fmt: skip
QWEN = {"moe_intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 2}
SHARED = {**QWEN, "shared_expert_intermediate_size": 24}
ROUTED = {"moe_intermediate_size": 24, "n_routed_experts": 8, "num_experts_per_tok": 2}
GROUPS = {**ROUTED, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
LATENT = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "num_key_value_heads": 4,
}  # fmt: skip
ATTENTION = {"layer_types": ["full_attention"] * 2}
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
MROPE = {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e4}}
VISION = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32,
    "deepstack_visual_indexes": [0],
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {**QWEN, "output_router_logits": True},
    "qwen2_moe": SHARED,
    "olmoe": {"num_experts": 6, "num_experts_per_tok": 2},
    "mixtral": {"num_local_experts": 6, "num_experts_per_tok": 2},
    "gpt_oss": {"num_local_experts": 6, "num_experts_per_tok": 2, **ATTENTION},
    "deepseek_v3": {**GROUPS, **LATENT},
    "deepseek_v4": {**ROUTED, "mlp_layer_types": ["hash_moe", "moe"]},
    "glm4_moe": GROUPS,
    "glm_moe_dsa": {**GROUPS, **LATENT, "index_head_dim": 16, "index_n_heads": 2, "index_topk": 8, "mlp_layer_types": ["dense", "sparse"]},
    "qwen3_5_moe_text": {**SHARED, **LINEAR},
    "qwen3_vl_moe": {**QWEN, **MROPE},
}  # fmt: skip
IDS = torch.randint(3, 61, (2, 12), generator=torch.Generator().manual_seed(1))


def config(family: str) -> Any:
    sizes = {**SIZES, **FAMILIES[family]}
    if family != "qwen3_vl_moe":
        return AutoConfig.for_model(family, **sizes)
    return AutoConfig.for_model(family, text_config=sizes, vision_config=VISION)


def class_of(family: str) -> Any:
    return (
        transformers.Qwen3VLMoeForConditionalGeneration if family == "qwen3_vl_moe" else AutoModelForCausalLM
    )


def computed(model: Any) -> dict[str, torch.Tensor]:
    """The loss, the logits and every gradient of a step."""
    found = model.train()(input_ids=IDS, labels=IDS)
    found.loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": found.loss.detach(), "logits": found.logits.detach(), **gradients}


def experts(model: Any) -> Iterator[Any]:
    return (each for each in model.modules() if type(each).__name__.endswith(("Experts", "NaiveMoe")))


def save(family: str, folder: Path) -> None:
    torch.manual_seed(0)
    model = class_of(family).from_config if family != "qwen3_vl_moe" else class_of(family)
    model = model(config(family)).to(torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn_like(parameter) * 0.1
    model.set_experts_implementation("eager")
    model.save_pretrained(folder / family, max_shard_size="40KB")
    torch.save(computed(model), folder / f"{family}.pt")


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    return {key: value for file in files for key, value in load_file(file).items()}


def compare(family: str, folder: Path) -> dict[str, Any]:
    """What a patched model, loaded from what the plain one saved, makes of it."""
    from veomni_hook import explain

    model, info = class_of(family).from_pretrained(
        folder / family, output_loading_info=True, dtype=torch.float32
    )
    model.save_pretrained(folder / "back" / family, max_shard_size="1GB")
    saved, back = tensors(folder / family), tensors(folder / "back" / family)
    expected, found = torch.load(folder / f"{family}.pt"), computed(model)
    # Gradients that are 0 but for rounding are compared with the others.
    floor = 1e-3 * max(truth.abs().max() for name, truth in expected.items() if ".layers." in name)
    errors = {
        name: ((found[name] - truth).abs().max() / torch.maximum(truth.abs().max(), floor)).item()
        for name, truth in expected.items()
    }
    torch.save(found, folder / "back" / f"{family}.pt")
    explained = explain(model).rows
    rows = [row for row in explained if row.op == "moe_experts"]
    return {
        "loading": {key: sorted(map(str, value)) for key, value in info.items() if value},
        "files": len(list((folder / family).glob("*.safetensors"))),
        "saved back": saved.keys() == back.keys()
        and all(torch.equal(saved[key], back[key]) for key in saved),
        "gradients": expected.keys() == found.keys(),
        "of experts": sum(".experts." in name for name in expected),
        "modules": len(list(experts(model))),
        "worst": max(errors.items(), key=lambda item: item[1]),
        "backends": sorted({f"{row.variant} {row.backend} {row.reason}" for row in rows}),
        "routers": sorted({f"{row.backend} {row.reason}" for row in explained if row.op == "moe_router"}),
    }


def again(family: str, folder: Path) -> bool:
    """Whether what a patched model saved is, loaded into a plain one, what was saved at first, bit for bit.

    What it computes is compared within rounding: bits of a product depend on where its operands lie in memory.
    """
    first, found = (
        class_of(family).from_pretrained(
            each / family, output_loading_info=True, dtype=torch.float32, experts_implementation="eager"
        )
        for each in (folder, folder / "back")
    )
    states = [model.state_dict() for model, _ in (first, found)]
    same = states[0].keys() == states[1].keys() and all(
        torch.equal(states[0][name], states[1][name]) for name in states[0]
    )
    expected, results = torch.load(folder / f"{family}.pt"), computed(found[0])
    close = all(
        torch.allclose(results[name], truth, rtol=1e-4, atol=1e-5 * truth.abs().max().item())
        for name, truth in expected.items()
    )
    return same and close and not any(found[1].values())


def known() -> list[str]:
    """The families that this release has."""
    return [family for family in CONFIG_MAPPING_NAMES if family in FAMILIES]


def plain(folder: Path) -> list[str]:
    for family in known():
        save(family, folder)
    return sorted(known())


def patched(folder: Path) -> dict[str, Any]:
    return {family: compare(family, folder) for family in known()}


def all_again(folder: Path) -> dict[str, bool]:
    return {family: again(family, folder) for family in known()}


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    print(json.dumps(patched(Path(sys.argv[1]))))
