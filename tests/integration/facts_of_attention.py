"""Prints, as JSON, what the attention of real models runs, and how far it is from upstream's.

Run by `test_attention`, with transformers imported ``before`` or ``after`` the hook. The backend ``flex`` is
made to run on this CPU.
"""

from __future__ import annotations

import copy
import json
import pickle
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

if sys.argv[1] == "late":
    import transformers.modeling_utils

import veomni_hook.install  # noqa: I001
import torch
import transformers
from torch import nn
from torch._dynamo import lookup_backend

import veomni_hook
from tests.kernels.attention.flexible import on_a_cpu
from tests.veomni.configurations import CONFIGURATIONS
from veomni_hook.kernels.selection.declaration import Requirement
from veomni_hook.kernels.selection.process_choice import set_choice
from veomni_hook.kernels.selection.registry import registry

SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 64, "sliding_window": 12, "pad_token_id": 0,
    "max_position_embeddings": 256,
}  # fmt: skip
LENGTH, BATCH = 41, 2
LABELS = "labels"


def seeded(kind: str, config: Any) -> Any:
    """A causal model of a class, with other sinks than zeros."""
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    for module in attentions(model):
        if hasattr(module, "sinks"):
            nn.init.normal_(module.sinks)
    return model


def gpt_oss(layers: int = 2, **options: Any) -> Any:
    sizes = {
        **SIZES, "num_hidden_layers": layers, "num_local_experts": 4, "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        "layer_types": ["sliding_attention", "full_attention"][:layers],
    }  # fmt: skip
    return seeded("GptOss", transformers.GptOssConfig(**sizes, **options))


def gemma2(**options: Any) -> Any:
    sizes = {**SIZES, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 16}
    return seeded("Gemma2", transformers.Gemma2Config(**sizes, **options))


def gemma3() -> Any:
    return seeded("Gemma3", transformers.Gemma3TextConfig(**SIZES))


def deepseek_v4() -> Any:
    _, _, sizes = CONFIGURATIONS["deepseek_v4"]
    return seeded("DeepseekV4", transformers.DeepseekV4Config(**sizes)).train()


def attentions(model: Any) -> list[Any]:
    return [module for module in model.modules() if type(module).__name__.endswith("Attention")]


def runs(model: Any) -> list[str]:
    """The backends, and where it is upstream's code the reasons, of the last calls."""
    rows = [row for row in veomni_hook.explain(model).rows if row.op == "attention"]
    found = (row.backend if row.backend != "eager" else f"eager: {row.reason}" for row in rows)
    return sorted(set(found))


def inputs() -> dict[str, dict[str, torch.Tensor]]:
    torch.manual_seed(3)
    ids = torch.randint(1, 64, (BATCH, LENGTH))
    left, right = torch.ones_like(ids), torch.ones_like(ids)
    left[0, :9] = 0
    right[1, 30:] = 0
    positions = torch.cat([torch.arange(20), torch.arange(LENGTH - 20)]).expand(BATCH, -1)
    return {
        "plain": {"input_ids": ids, LABELS: ids},
        "ones": {"input_ids": ids, LABELS: ids, "attention_mask": torch.ones_like(ids)},
        # The last position of padding predicts the first token. It sees no key, and upstream lets gradients into
        # scores of a softcap that it has rounded away.
        "left": {
            "input_ids": ids,
            LABELS: ids.masked_fill(left.roll(1, 1) * left == 0, -100),
            "attention_mask": left,
        },
        "right": {"input_ids": ids, LABELS: ids.masked_fill(right == 0, -100), "attention_mask": right},
        "packed": {"input_ids": ids, LABELS: ids, "position_ids": positions},
    }


def step(model: Any, batch: dict[str, torch.Tensor], backend: str) -> dict[str, torch.Tensor]:
    veomni_hook.bind(model, "eager", attention=backend)
    model.zero_grad()
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    found = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
    with torch.no_grad():
        logits = model(**{n: v for n, v in batch.items() if n != LABELS}, use_cache=False).logits
    seen = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
    return found | {"loss": loss.detach(), "logits": logits[seen]}


def distance(
    model: Any, batch: dict[str, torch.Tensor], backend: str = "flex", least: float = 1e-8
) -> dict[str, Any]:
    """The largest difference from upstream's, relative to the largest of its tensor, or to ``least``."""
    expected = step(model, batch, "eager")
    found = step(model, batch, backend)
    assert expected.keys() == found.keys()
    worst = max(
        ((found[n] - e).abs().max() / e.abs().max().clamp_min(least)).item() for n, e in expected.items()
    )
    return {"worst": worst, "runs": runs(model), "gradients": len(expected) - 2}


def equality(create: Callable[..., Any]) -> dict[str, Any]:
    model = create(attn_implementation="eager").train()
    found = {name: distance(model, batch) for name, batch in inputs().items()}
    model.gradient_checkpointing_enable({"use_reentrant": False})
    found["checkpointed"] = distance(model, inputs()["ones"])
    model.gradient_checkpointing_enable({"use_reentrant": True})
    found["checkpointed, reentrant"] = distance(model, inputs()["ones"])
    return found


def generated(create: Callable[..., Any]) -> dict[str, Any]:
    model = create(attn_implementation="eager").eval()
    prompt = inputs()["left"]
    found = {}
    for cache in ("dynamic", "static"):
        tokens = []
        for backend in ("eager", "flex"):
            veomni_hook.bind(model, "eager", attention=backend)
            how = {"cache_implementation": "static", "disable_compile": True} if cache == "static" else {}
            tokens.append(
                model.generate(
                    prompt["input_ids"],
                    attention_mask=prompt["attention_mask"],
                    max_new_tokens=6,
                    do_sample=False,
                    **how,
                )
            )
        found[cache] = {"equal": torch.equal(*tokens), "new": tokens[0].shape[1] - LENGTH}
        calls = [
            (each.backend, each.reason)
            for row in veomni_hook.explain(model).rows
            if row.op == "attention"
            for each in row.evaluation
        ]
        found[cache]["calls"] = sorted(
            {backend if backend == "flex" else reason for backend, reason in calls}
        )
    return found


class Graphs:
    """A backend for ``torch.compile`` that counts graphs, and calls of flex_attention in them."""

    def __init__(self) -> None:
        self.calls = self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        self.graphs += 1
        inner = [each for each in graph.modules() if isinstance(each, torch.fx.GraphModule)]
        nodes = [node for each in inner for node in each.graph.nodes]
        self.calls += sum("flex_attention" in str(node.target) for node in nodes)
        return lookup_backend("aot_eager")(graph, inputs)


def compiled(create: Callable[..., Any]) -> dict[str, Any]:
    """Compiled models beside the same ones with upstream's code, for lengths that change."""
    found = {}
    for name, lengths in {"plain": (LENGTH, 150, 170), "checkpointed": (LENGTH,)}.items():
        torch._dynamo.reset()
        model = create(attn_implementation="eager").train()
        if name == "checkpointed":
            model.gradient_checkpointing_enable({"use_reentrant": False})
        graphs = Graphs()
        run = torch.compile(model, backend=graphs, fullgraph=True)
        worst = []
        for length in lengths:
            ids = torch.randint(1, 64, (BATCH, length))
            batch = {"input_ids": ids, LABELS: ids}
            expected = step(model, batch, "eager")
            veomni_hook.bind(model, "eager", attention="flex")
            model.zero_grad()
            loss = run(**batch, use_cache=False).loss
            loss.backward()
            named = {"loss": loss.detach()} | {n: each.grad for n, each in model.named_parameters()}
            worst += [
                ((named[n] - expected[n]).float().norm() / expected[n].float().norm().clamp_min(1e-8)).item()
                for n in named
            ]
        found[name] = {
            "worst": max(worst),
            "runs": runs(model),
            "graphs": graphs.graphs,
            "calls": graphs.calls,
        }
    return found


def weights_of_compiled() -> list[Any]:
    """What a compiled model returns as attentions, and what it runs after it was asked for them."""
    torch._dynamo.reset()
    model = gpt_oss(attn_implementation="eager")
    veomni_hook.bind(model, "eager", attention="flex")
    run = torch.compile(model, backend="eager")
    ids = inputs()["plain"]["input_ids"]
    run(input_ids=ids, use_cache=False)
    before = runs(model)
    wanted = run(input_ids=ids, use_cache=False, output_attentions=True).attentions
    return [before, [list(each.shape) for each in wanted], runs(model)]


def choices() -> dict[str, Any]:
    """What models that are made in many ways run under auto, in bfloat16."""
    batch = inputs()["plain"]

    def run(model: Any, **more: Any) -> list[str]:
        model.bfloat16().train()
        model(input_ids=batch["input_ids"], **more)
        return runs(model)

    plain = gpt_oss()
    found = {"default": run(plain), "value": plain.config._attn_implementation}
    found["second model of the config"] = run(transformers.GptOssForCausalLM(plain.config))
    found["deep copy"] = run(copy.deepcopy(plain))
    found["pickled"] = run(pickle.loads(pickle.dumps(plain)))
    found["explicit eager"] = run(explicit := gpt_oss(attn_implementation="eager"))
    found["explicit, deep copy"] = run(transformers.GptOssForCausalLM(copy.deepcopy(explicit.config)))
    requested = gpt_oss()
    requested.set_attn_implementation("eager")
    found["requested eager"] = run(requested)
    assigned = gpt_oss()
    assigned.config._attn_implementation = "eager"
    found["assigned eager"] = run(assigned)
    wanting = gpt_oss()
    found["output_attentions"] = run(wanting, output_attentions=True)
    wanted = wanting(input_ids=batch["input_ids"], output_attentions=True).attentions
    found["attentions"] = [list(each.shape) for each in wanted]
    found["afterwards"] = run(wanting)
    replaced = gpt_oss()
    modeling = sys.modules[type(replaced).__module__]
    original = modeling.eager_attention_forward
    modeling.eager_attention_forward = lambda *args, **kwargs: original(*args, **kwargs)
    found["replaced"] = run(replaced)
    modeling.eager_attention_forward = original
    return found | other_implementations(batch)


def other_implementations(batch: dict[str, torch.Tensor]) -> dict[str, Any]:
    """What upstream does with other names stays; and saving does not know of ours."""
    found: dict[str, Any] = {}
    found["gemma3, whose default is sdpa"] = runs(gemma3())
    flexible = gpt_oss(attn_implementation="flex_attention")
    try:
        flexible(input_ids=batch["input_ids"])
    except ValueError as error:
        found["flex_attention"] = str(error)
    found["flex_attention runs"] = runs(flexible)
    try:
        gpt_oss(attn_implementation="sdpa")
    except ValueError as error:
        found["sdpa"] = "does not support" in str(error)
    with tempfile.TemporaryDirectory() as folder:
        gpt_oss(attn_implementation="eager").save_pretrained(folder)
        saved = Path(folder, "config.json").read_text(encoding="utf-8")
        found["saved"] = "veomni" in saved or "attn_implementation" in saved
        for name, how in (("loaded", {}), ("loaded as eager", {"attn_implementation": "eager"})):
            model = transformers.GptOssForCausalLM.from_pretrained(folder, **how).bfloat16()
            model(input_ids=batch["input_ids"])
            found[name] = runs(model)
    for name, padded, whole in (
        ("compiled", False, True),
        ("compiled, padded", True, True),
        ("compiled layers", False, False),
    ):
        model = gpt_oss(layers=1).bfloat16()
        for part in [model] if whole else model.model.layers:
            part.compile(backend="eager")
        model(**(inputs()["left"] if padded else {"input_ids": batch["input_ids"]}), use_cache=False)
        found[name] = runs(model)
    return found


def in_tiles() -> dict[str, Any]:
    """DeepSeek-V4, whose masks hold chosen keys, with the backend ``tiles`` in Triton's interpreter."""
    with registry.restored():
        for kernel in registry.kernels():
            if kernel.backend == "tiles":
                registry.replace(replace(kernel, requires=Requirement(triton=True)))
        model = deepseek_v4()
        batches = {name: batch for name, batch in inputs().items() if name in {"plain", "left", "right"}}
        # Gradients of a router that chooses by the token alone are 0 but for rounding.
        compare = partial(distance, model, backend="tiles", least=1e-6)
        found = {name: compare(batch) for name, batch in batches.items()}
        model.gradient_checkpointing_enable({"use_reentrant": False})
        return found | {"checkpointed": compare(inputs()["ones"])}


def main() -> None:
    if sys.argv[1] == "tiles":
        print(json.dumps(in_tiles()))
        return
    with on_a_cpu():
        if sys.argv[1] == "late":
            set_choice("auto")
            model = gpt_oss().bfloat16()
            model(input_ids=inputs()["plain"]["input_ids"])
            facts: dict[str, Any] = {"runs": runs(model)}
        elif sys.argv[1] == "compiled":
            models = {"gpt_oss": compiled(gpt_oss), "gemma2": compiled(gemma2)}
            facts = {"models": models, "weights": weights_of_compiled()}
        elif sys.argv[1] == "choices":
            set_choice("auto")
            facts = choices()
        else:
            model = {"gpt_oss": gpt_oss, "gemma2": gemma2}[sys.argv[1]]
            facts = {"trained": equality(model), "generated": generated(model)}
    print(json.dumps(facts))


main()
