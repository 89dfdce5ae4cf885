"""What two processes see that share the sequences of a model with linear attention."""

from __future__ import annotations

import types
from typing import Any

import torch
from transformers.models.olmo_hybrid import modeling_olmo_hybrid as modeling

import veomni_hook
from tests.parallel import small
from tests.parallel.facts_of_sequence import gradients
from tests.parallel.small import refusal
from veomni_hook.parallel import process


def refused(family: str, **changes: int) -> str:
    """What training answers a model whose value heads cannot be divided."""
    return refusal(lambda: small.model(family, **changes)(**small.batch("plain")))


def state() -> str:
    """A cache whose attention is empty, but not its states."""
    model = small.model("olmo_hybrid")
    ids = small.batch("plain")["input_ids"]
    with torch.no_grad():
        cache = model(input_ids=ids, use_cache=True).past_key_values
    cache.get_seq_length = lambda *_, **__: 0
    return refusal(lambda: model(input_ids=ids, past_key_values=cache))


def convolution() -> str:
    """A rule whose convolution goes another way."""
    model = small.model("olmo_hybrid")
    original = modeling.veomni_causal_conv.separated
    modeling.veomni_causal_conv = types.SimpleNamespace(separated=lambda slot, owner, upstream: upstream)
    try:
        return refusal(lambda: model(**small.batch("plain")))
    finally:
        modeling.veomni_causal_conv = types.SimpleNamespace(separated=original)


def layer() -> str:
    """A layer that does not ask any rule."""
    model = small.model("olmo_hybrid")
    inner = model.model.layers[2].linear_attn
    inner.forward = types.MethodType(lambda self, hidden_states, **_: hidden_states, inner)
    return refusal(lambda: model(**small.batch("plain")))


def mask() -> str:
    model = small.model("olmo_hybrid", "eager")
    four = torch.zeros(2, 1, 16, 16)
    masks = {"full_attention": four, "linear_attention": four}
    return refusal(lambda: model(input_ids=small.batch("plain")["input_ids"], attention_mask=masks))


def filled() -> str:
    model = small.model("olmo_hybrid")
    cache = model(input_ids=small.batch("plain")["input_ids"], use_cache=True).past_key_values
    return refusal(lambda: cache.update_conv_state(torch.zeros(1, 1, 1), 0))


def autocast() -> tuple[float, dict[str, Any]]:
    """How far gradients are with autocast, and what a rule gets."""
    seen: list[dict[str, Any]] = []
    model, batch = small.model("olmo_hybrid"), small.batch("plain", 15)
    original = modeling.torch_chunk_gated_delta_rule

    def chunk(query: Any, key: Any, value: Any, g: Any, beta: Any, **others: Any) -> Any:
        shapes = [list(each.shape) for each in (key, value, g)]
        seen.append({"shapes": shapes, "dtypes": [str(each.dtype) for each in (query, g)]})
        return original(query, key, value, g, beta, **others)

    def run() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(**batch).loss

    modeling.torch_chunk_gated_delta_rule = chunk
    try:
        one, split = gradients(model, "", run), gradients(model, "sp=2", run)
    finally:
        modeling.torch_chunk_gated_delta_rule = original
    norms = [torch.cat([each.flatten() for each in found.values()]).norm() for found in (one, split)]
    return small.relative(norms[1], norms[0]), seen[-1]


def facts() -> dict[str, Any]:
    """Return what each check found, in one process after the other."""
    refusals = {check.__name__: check() for check in (state, convolution, layer, mask, filled)}
    refusals["heads"] = refused("olmo_hybrid", linear_num_key_heads=1, linear_num_value_heads=3)
    # A rule with a decay for each channel, whose keys and values have the same heads.
    refusals["channels"] = refused("kimi_linear", linear_num_heads=3)
    process.tell("sp=2")
    far, seen = autocast()
    explained = [str(veomni_hook.explain(small.model(each))) for each in ("olmo_hybrid", "kimi_linear")]
    return {"refusals": refusals, "autocast": far, "seen": seen, "explain": explained}
