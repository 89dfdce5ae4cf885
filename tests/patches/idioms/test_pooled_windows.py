"""Attention to keys that a module pools from windows of positions, and its model: what is routed, and what is not."""

import ast

import pytest

from tests.patches.idioms.applied import sites_of, spliced
from veomni_hook.patches.idioms import pooled_windows, sample_boundaries
from veomni_hook.patches.site import Status

TEXT = """
import torch
from transformers.cache_utils import Cache, DynamicCache

class Chooser(nn.Module):
    def forward(self, x, cache):
        full = (x.shape[1] // self.width) * self.width
        return x[:, :full].topk(2).indices

class Pool(nn.Module):
    def __init__(self, config):
        self.width = config.width
        self.chooser = Chooser(config)

    def forward(self, x, cache):
        full = (x.shape[1] // self.width) * self.width
        chosen = self.chooser(x, cache)
        return x[:, :full], chosen

KINDS = {"pooled": Pool, "plain": None}

class Attention(nn.Module):
    def __init__(self, config):
        self.pool = KINDS[config.kind](config) if config.kind != "plain" else None

    def forward(self, x, attention_mask, cache: Cache | None = None, **rest):
        kv, added = x, None
        if self.pool is not None:
            pooled, added = self.pool(x, cache)  # few
            kv = torch.cat([kv, pooled], dim=2)
        if added is not None:
            attention_mask = torch.cat([attention_mask, added.to(attention_mask.dtype)], dim=-1)
        return attend(x, kv, attention_mask)

class Layer(nn.Module):
    def __init__(self, config):
        self.attention = Attention(config)

    def forward(self, x, **rest):
        return self.attention(x, **rest)

class Model(nn.Module):
    def __init__(self, config):
        self.layers = nn.ModuleList([Layer(config) for _ in range(2)])

    def forward(self, input_ids, attention_mask=None, position_ids=None, cache=None, inputs_embeds=None, **rest):
        if cache is None:
            cache = DynamicCache(config=self.config)
        mask = create_causal_mask(inputs_embeds, attention_mask, cache, position_ids)
        for layer in self.layers:
            inputs_embeds = layer(inputs_embeds, attention_mask=mask, cache=cache, **rest)
        return inputs_embeds
"""
#: What is wrong: a replacement of text, and the reason.
NEAR_MISSES = {
    "no pair": ("return x[:, :full], chosen", "return x[:, :full]", "Pool return no keys with a bias"),
    "other keys": ("[kv, pooled], dim=2", "[kv, pooled], dim=1", "does not append keys and their bias"),
    "another mask": ("[attention_mask, added", "[rest['mask'], added", "does not append keys and their bias"),
    "twice": ("pooled, added = self.pool(x, cache)", "pooled, added = self.pool(x, cache), self.pool(x, cache)", "does not call the module once"),
    "by name": ("self.pool(x, cache)", "self.pool(x, cache=cache)", "with arguments alone"),
    "no other arguments": ("cache: Cache | None = None, **rest", "cache: Cache | None = None", "all other arguments"),
}  # fmt: skip


def test_calls_and_the_model_are_routed():
    (pooled,) = sites_of(pooled_windows, TEXT)
    (model,) = sites_of(sample_boundaries, TEXT)
    assert (pooled.target, pooled.status) == ("Attention.forward", Status.ROUTED)
    assert (model.target, model.status, model.variant) == ("Model.forward", Status.ROUTED, "found_once")
    text = spliced(TEXT, [pooled, model])
    written = ast.unparse(ast.parse(text))
    assert (
        "pooled, added = veomni_windows.separated(self, rest, self.pool, attention_mask, cache, 'width')(x, cache)"
        in written
    )
    assert "rest.get('use_cache'), pools=True)\n" in written
    assert "if cache is None and veomni_boundaries.makes_cache(rest, position_ids):\n" in written
    assert "  # few" in text


def test_a_cache_that_is_asked_for_is_made():
    asked = TEXT.replace("if cache is None:", "if rest['use_cache'] and cache is None:")
    assert "makes_cache" not in spliced(asked, sites_of(sample_boundaries, asked))


@pytest.mark.parametrize("near_miss", NEAR_MISSES)
def test_near_misses_are_missed_and_refuse_packed_samples(near_miss):
    old, new, reason = NEAR_MISSES[near_miss]
    assert TEXT.count(old) == 1
    text = TEXT.replace(old, new)
    (site,) = sites_of(pooled_windows, text)
    assert site.status is Status.MISSED and not site.edits
    assert reason in site.reason
    (model,) = sites_of(sample_boundaries, text)
    assert model.variant == "refused" and "(Attention, ())" in spliced(text, [model])


@pytest.mark.parametrize("rows", ["(x.shape[1] // self.width) * 2", "x.shape[1] // self.width"])
def test_windows_are_known_by_what_fills_none(rows):
    text = TEXT.replace("(x.shape[1] // self.width) * self.width", rows)
    assert sites_of(pooled_windows, text) == sites_of(sample_boundaries, text) == []
