"""Prints, as JSON, what provenance says of models made in many ways, and what their experts ran.

Run by `test_experts_implementation`, with transformers imported ``before`` or ``after`` the hook.
"""

from __future__ import annotations

import contextlib
import copy
import json
import pickle
import sys
import tempfile
from pathlib import Path
from typing import Any

if sys.argv[1] == "late":
    import transformers.modeling_utils

import veomni_hook.install  # noqa: F401, I001
import torch
import transformers
from transformers import MixtralConfig, MixtralForCausalLM, MixtralModel

from veomni_hook import Kernel, register_kernel
from veomni_hook.kernels.moe_experts import reference
from veomni_hook.kernels.moe_experts.provenance import users_choice
from veomni_hook.kernels.selection.process_choice import set_choice

SIZES = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 32, "num_local_experts": 4, "head_dim": 8, "pad_token_id": 0,
}  # fmt: skip
TEXT = {
    **SIZES, "moe_intermediate_size": 8, "num_experts": 2, "num_experts_per_tok": 1,
    "rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e4},
}  # fmt: skip
VISION = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 16,
    "deepstack_visual_indexes": [0],
}  # fmt: skip


def config(**options: Any) -> Any:
    return MixtralConfig(**SIZES, **options)


def causal_lm(**options: Any) -> Any:
    return MixtralForCausalLM(config(**options))


def nested(**options: Any) -> Any:
    made = transformers.Qwen3VLMoeConfig(text_config=dict(TEXT), vision_config=dict(VISION), **options)
    return transformers.Qwen3VLMoeForConditionalGeneration(made)


def experts(model: Any) -> Any:
    return next(module for module in model.modules() if type(module).__name__.endswith("Experts"))


def choice(model: Any) -> str | None:
    return users_choice(experts(model))


def models() -> dict[str, Any]:
    """Reasons by how the model was made; ``value`` is what its config ends up with."""
    plain, requested, inner, generating, wrong = (causal_lm() for _ in range(5))
    explicit = MixtralForCausalLM._from_config(
        copy.deepcopy(plain.config), experts_implementation="grouped_mm"
    )
    requested.set_experts_implementation("grouped_mm")
    inner.model.set_experts_implementation("eager")
    generating.generate(torch.tensor([[1, 2]]), max_new_tokens=2, do_sample=False)
    with contextlib.suppress(ValueError):
        wrong.set_experts_implementation("nonsense")
    by_name, of_part, other = nested(), nested(), nested()
    by_name.set_experts_implementation({"text_config": "eager"})
    of_part.model.language_model.set_experts_implementation("grouped_mm")
    other.config._experts_implementation = {"vision_config": "eager"}
    made = {
        "default": plain,
        "inner base model": plain.model,
        "second model of the config": MixtralModel(plain.config),
        "model of a deep copy": MixtralModel(copy.deepcopy(plain.config)),
        "pickled": pickle.loads(pickle.dumps(plain)),
        "generated": generating,
        "refused request": wrong,
        "nested": nested(),
        "nested, another part chosen": other,
        "explicit, the default's value": explicit,
        "explicit, second model": MixtralModel(explicit.config),
        "explicit, deep copy": MixtralModel(copy.deepcopy(explicit.config)),
        "explicit, pickled": pickle.loads(pickle.dumps(explicit)),
        "explicit, in the config": causal_lm(experts_implementation="eager"),
        "explicit, requested": requested,
        "explicit, of the inner model": inner,
        "explicit, nested, by name": by_name,
        "explicit, nested, of the part": of_part,
        "explicit, nested, in the config": nested(experts_implementation="eager"),
    }
    with tempfile.TemporaryDirectory() as folder:
        explicit.save_pretrained(folder)
        saved = Path(folder, "config.json").read_text(encoding="utf-8")
        load, auto = MixtralForCausalLM.from_pretrained, transformers.AutoModelForCausalLM.from_pretrained
        made |= {
            "loaded": load(folder),
            "loaded with a used config": load(folder, config=plain.config),
            "explicit, loaded": load(folder, experts_implementation="batched_mm"),
            "explicit, by auto": auto(folder, experts_implementation="eager"),
        }
    return {
        "value": plain.config._experts_implementation,
        "saved": "veomni" in saved or "veomni" in repr(explicit.config),
        **{name: choice(model) for name, model in made.items()},
    }


def runs() -> dict[str, Any]:
    """What ran under ``auto`` and by name, where a kernel exists."""
    register_kernel(
        Kernel(
            op="moe_experts", variant="gated", backend="tried", load="facts_of_experts_implementation:kernel"
        )
    )
    ids = torch.arange(8)[None]
    default, explicit = causal_lm(), causal_lm(experts_implementation="grouped_mm")
    eager = causal_lm(experts_implementation="eager")
    found = {}
    for setting in ("auto", "moe_experts=tried", "eager"):
        set_choice(setting)
        for name, model in (("default", default), ("explicit", explicit), ("eager", eager)):
            CALLS.clear()
            model(ids)
            found[f"{setting}, {name}"] = len(CALLS)
    if sys.argv[1] == "late":
        return found
    set_choice("eager")
    compile_whole(default, ids)
    set_choice("auto")
    CALLS.clear()
    torch._dynamo.reset()
    torch.compile(default, backend="eager", fullgraph=True)(ids)
    found["compiled"] = len(CALLS)
    return found


def compile_whole(model: torch.nn.Module, ids: torch.Tensor) -> None:
    """Compile in the first dtype that transformers' grouped matmul takes: 5.2 none but bfloat16, 5.9 float32."""
    try:
        torch.compile(model, backend="eager", fullgraph=True)(ids)
    except torch._dynamo.exc.TorchDynamoException:
        torch._dynamo.reset()
        torch.compile(model.to(torch.bfloat16), backend="eager", fullgraph=True)(ids)


CALLS: list[int] = []


def kernel(*operands: Any) -> Any:
    CALLS.append(1)
    return reference.of("gated")(*operands)


if __name__ == "__main__":
    sys.modules["facts_of_experts_implementation"] = sys.modules["__main__"]
    transformers.logging.disable_progress_bar()
    facts = {"models": models() if sys.argv[1] == "early" else {"default": choice(causal_lm())}}
    facts["runs"] = runs()
    print(json.dumps(facts))
