"""Loops over the layers of towers: split by image, or left alone with a reason."""

import pytest

from tests.patches.idioms.layer_loops import sites
from tests.patches.idioms.test_layer_loop import MODELS, patched
from veomni_hook.patches.site import Status

TOWER = """\
import torch
from torch import nn

from ...modeling_flash_attention_utils import is_flash_attention_requested
from ...modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel

def eager_attention_forward(module, query, key, value, attention_mask, scaling, **kwargs):
    weights = torch.matmul(query, key.transpose(2, 3)) * scaling
    return torch.matmul(weights, value).transpose(1, 2), weights

class SightAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.num_heads = config.num_heads
        self.qkv = nn.Linear(config.hidden_size, config.hidden_size * 3)
        self.proj = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden_states, cu_seqlens, position_embeddings=None, **kwargs):
        seq_length = hidden_states.shape[0]
        query, key, value = self.qkv(hidden_states).reshape(seq_length, 3, self.num_heads, -1).permute(1, 0, 2, 3).unbind(0)
        cos, sin = position_embeddings
        query = query * cos.unsqueeze(-2) + sin.unsqueeze(-2)
        query = query.transpose(0, 1).unsqueeze(0)
        key = key.transpose(0, 1).unsqueeze(0)
        value = value.transpose(0, 1).unsqueeze(0)
        attention_interface = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        if is_flash_attention_requested(self.config):
            max_seqlen = (cu_seqlens[1:] - cu_seqlens[:-1]).max()
            attn_output, _ = attention_interface(
                self, query, key, value, attention_mask=None, scaling=1.0,
                cu_seq_lens_q=cu_seqlens, cu_seq_lens_k=cu_seqlens,
                max_length_q=max_seqlen, max_length_k=max_seqlen, is_causal=False, **kwargs,
            )
        else:
            lengths = cu_seqlens[1:] - cu_seqlens[:-1]
            splits = [torch.split(tensor, lengths.tolist(), dim=2) for tensor in (query, key, value)]
            attn_outputs = [
                attention_interface(self, q, k, v, attention_mask=None, scaling=1.0, is_causal=False, **kwargs)[0]
                for q, k, v in zip(*splits)
            ]
            attn_output = torch.cat(attn_outputs, dim=1)
        attn_output = attn_output.reshape(seq_length, -1).contiguous()
        return self.proj(attn_output)

class SightBlock(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.norm = nn.LayerNorm(config.hidden_size)
        self.attn = SightAttention(config)
        self.mlp = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden_states, cu_seqlens, position_embeddings=None, **kwargs):
        hidden_states = hidden_states + self.attn(
            self.norm(hidden_states), cu_seqlens=cu_seqlens, position_embeddings=position_embeddings, **kwargs
        )
        return hidden_states + self.mlp(hidden_states)

class SightModel(PreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.blocks = nn.ModuleList([SightBlock(config) for _ in range(config.depth)])
        self.mergers = nn.ModuleList([nn.Linear(config.hidden_size, 1) for _ in range(config.depth)])
        self.full = config.full

    def forward(self, hidden_states, grid_thw, **kwargs):
        cu_seqlens, cu_windows = boundaries(grid_thw)
        position_embeddings = tables(grid_thw)
        hidden_states = self.patch_embed(hidden_states)
        features = []
        for index, block in enumerate(self.blocks):
            now = cu_seqlens if index in self.full else cu_windows
            hidden_states = block(
                hidden_states, cu_seqlens=now, position_embeddings=position_embeddings, **kwargs
            )
            if index in self.full:
                features.append(self.mergers[index](hidden_states))
        return hidden_states, features
"""


def changed(old, new):
    assert TOWER.count(old) == 1, old
    return TOWER.replace(old, new)


def test_the_loop_runs_on_a_share_of_the_images_and_features_on_all():
    (site,) = sites(TOWER)
    assert (site.status, site.part, site.variant) == (Status.ROUTED, "tower", "split")
    text = patched(TOWER)
    assert "share, hidden_states, cu_seqlens, cu_windows, position_embeddings = veomni_towers.shard(" in text
    assert "self, hidden_states, (cu_seqlens, cu_windows), position_embeddings" in text
    assert "self.mergers[index](veomni_towers.gather(share, hidden_states))" in text
    before, _, after = text.partition("        hidden_states = veomni_towers.gather(share, hidden_states)\n")
    assert "for index, block" in before and after.lstrip().startswith("return hidden_states, features")


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("hidden_states + self.mlp(hidden_states)", "hidden_states - hidden_states.mean(0)", "along the positions"),
        ("self.mlp(hidden_states)", "self.mlp(hidden_states).flip(0)", "flip"),
        ("for tensor in (query, key, value)]", "for tensor in (query, value, value)]", "other operands"),
        ("cu_seq_lens_q=cu_seqlens, cu_seq_lens_k=cu_seqlens,", "", "no boundaries"),
        ("cu_seq_lens_k=cu_seqlens", "cu_seq_lens_k=None", "other operands"),
        ("lengths.tolist(), dim=2", "lengths.tolist(), dim=1", "in place of SPLITS"),
        ("cu_seqlens=now,", "cu_seqlens=torch.zeros(2),", "boundaries of its attention are not those of the tower"),
        ("return hidden_states, features", "return hidden_states[cu_windows], features", "cu_windows is used beside"),
        ("features.append(self.mergers[index](hidden_states))", "features.append(position_embeddings[0] * hidden_states)", "position_embeddings is used beside"),
        ("features.append(self.mergers[index](hidden_states))", "features.append(now + hidden_states.sum())", "now is used beside"),
        ("features.append(self.mergers[index](hidden_states))", "features.append(self.blocks[0](hidden_states))", "called beside the loop"),
        ("features.append(self.mergers[index](hidden_states))", "hidden_states = hidden_states - hidden_states.mean(0)", "along the positions"),
        ("            if index in self.full:\n                features.append(self.mergers[index](hidden_states))\n", "            features.append(hidden_states)\n", "append"),
    ],
)  # fmt: skip
def test_other_loops_run_as_a_whole_and_raise_nothing(old, new, reason):
    (site,) = sites(changed(old, new))
    assert (site.status, site.part, site.edits) == (Status.REFUSED, "tower", ())
    assert (
        site.reason.startswith("a tower that runs at full length on every rank: ") and reason in site.reason
    )


def test_arguments_are_used_behind_the_loop_unless_the_loop_changes_them():
    text = changed("return hidden_states, features", "return hidden_states, features, end(kwargs)")
    (site,) = sites(text)
    assert site.status is Status.ROUTED
    for change in ("kwargs = {'states': hidden_states}", "kwargs['states'] = hidden_states"):
        (site,) = sites(
            text.replace("            if index in", f"            {change}\n            if index in")
        )
        assert site.status is Status.REFUSED


def test_a_class_with_other_layers_that_inherits_the_forward():
    other = (
        "\n\nclass OtherBlock(SightBlock):\n    def forward(self, hidden_states, cu_seqlens, **kwargs):\n"
        "        return hidden_states.cumsum(0)\n\n\nclass OtherModel(SightModel):\n"
        "    def __init__(self, config):\n        super().__init__(config)\n"
        "        self.blocks = nn.ModuleList([OtherBlock(config) for _ in range(config.depth)])\n"
    )
    (site,) = sites(TOWER + other)
    assert site.status is Status.REFUSED and "along the positions" in site.reason


FAMILIES = (
    "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "glm4v", "qwen2_5_omni",
    "qwen3_omni_moe",
)  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_towers_of_the_installed_release(family):
    text = (MODELS / family / f"modeling_{family}.py").read_text(encoding="utf-8")
    found = [site for site in sites(text) if site.part == "tower"]
    sight = [site for site in found if "Audio" not in site.target and "Vision" in site.target]
    assert sight and all(site.status is Status.ROUTED for site in sight)
    if "cu_window_seqlens" in text:
        assert all("cu_window_seqlens" in site.captures for site in sight)
