"""Attention with an indexer, or with keys that windows of positions make: what is proven, and lookalikes."""

import pytest

from tests.patches.idioms.applied import in_lines, spliced
from tests.patches.idioms.layer_loops import changed, sites
from veomni_hook.patches.site import Status

INDEXER = """\
class TinyIndexer(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.layer_idx = layer_idx
        self.top_k = config.index_topk
        self.q_proj = nn.Linear(config.hidden_size, config.hidden_size)
        self.k_proj = nn.Linear(config.hidden_size, config.index_head_dim)

    @torch.no_grad()
    def forward(self, hidden_states, mask, past_key_values=None):
        rows, length, _ = hidden_states.shape
        query = self.q_proj(hidden_states).view(rows, length, -1, 8)
        key = self.k_proj(hidden_states)
        last = length
        if past_key_values is not None:
            key = past_key_values.update_indexer(key, self.layer_idx)
            last = past_key_values.layers[self.layer_idx].get_seq_length()
        places = last - length + torch.arange(length, device=key.device)
        scores = torch.matmul(query, key.transpose(-1, -2).unsqueeze(1)).relu().sum(2)
        scores = scores.masked_fill(torch.arange(key.shape[1]) > places[:, None], -1.0) + mask
        if length == 1:
            return torch.full((rows, length, self.top_k), 0)
        return scores.topk(min(self.top_k, scores.shape[-1]), dim=-1).indices

"""
MADE = "        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size)\n\n    def"
CALLED = "        attention_interface = ALL"
CHOICE = """\
        chosen = self.indexer(hidden_states, attention_mask[:, 0], past_key_values=past_key_values)
        hidden = chosen.new_ones((*input_shape, key.shape[2]), dtype=torch.bool).scatter(-1, chosen, False)
        attention_mask = attention_mask.masked_fill(hidden.unsqueeze(1), -1.0)
"""


def indexed(*changes):
    """The decoder with an indexer, after changes of which each must apply."""
    return changed(
        ("class TinyAttention", f"{INDEXER}class TinyAttention"),
        (MADE, MADE.replace("\n\n", "\n        self.indexer = TinyIndexer(config, layer_idx)\n\n")),
        (CALLED, CHOICE + CALLED),
        *changes,
    )


def test_attention_gets_its_own_queries_and_the_keys_of_all_positions():
    text = indexed()
    model, attention = sites(text)
    assert (model.status, model.reason) == (Status.ROUTED, "")
    assert (attention.target, attention.variant, attention.counted) == (
        "TinyAttention.forward",
        "whole_keys",
        False,
    )
    names = "past_key_values, attention_mask, kwargs"
    code = f"{names} = veomni_keys.whole_keys(self, hidden_states, {names})"
    assert code in in_lines(spliced(text, [model, attention]))


def test_token_ids_that_layers_look_up_are_those_of_this_process():
    table = "        self.table = nn.Buffer(torch.zeros(config.vocab_size, 4))\n"
    text = indexed(
        ("        self.act_fn =", f"{table}        self.act_fn ="),
        ("    def forward(self, x):\n        return", "    def forward(self, x, ids):\n        x = x + self.table[ids.reshape(-1)].view(*ids.shape, -1)\n        return"),
        ("position_embeddings=None, **kwargs):\n        residual", "position_embeddings=None, ids=None, **kwargs):\n        residual"),
        ("self.mlp(hidden_states)", "self.mlp(hidden_states, ids)"),
        ("                position_ids=position_ids,\n", "                position_ids=position_ids,\n                ids=input_ids,\n"),
    )  # fmt: skip
    model, _ = sites(text)
    assert (model.status, model.reason) == (Status.ROUTED, "")
    assert "\n        input_ids = veomni_sequence.part_of_rows(self, input_ids)\n" in spliced(text, [model])


@pytest.mark.parametrize(
    "changes",
    [
        # Scores of other queries, other keys, or as many keys as a process has.
        [("key.transpose(-1, -2).unsqueeze(1)).relu()", "key.transpose(-1, -2).unsqueeze(1)).cumsum(1)")],
        [("key = past_key_values.update_indexer(key, self.layer_idx)", "pass")],
        [("past_key_values.update_indexer(key", "past_key_values.remember(key")],
        [("past_key_values.update_indexer(key", "past_key_values.update_indexer(key.transpose(1, 2)")],
        # The first query is not at position 0.
        [("last - length + torch", "torch")],
        [("last = past_key_values.layers[self.layer_idx].get_seq_length()", "pass")],
        [("if length == 1", "if length > 2")],
        # What a process keeps is a part of the keys.
        [("        scores = torch.mat", "        self.kept = query\n        scores = torch.mat")],
        # The implementation would get the keys of a part, or the mask of all queries.
        [("key, value = past_key_values.update(key, value, self.layer_idx)", "pass")],
        [("attention_mask.masked_fill(hidden.unsqueeze(1), -1.0)", "kwargs['all_queries']")],
        [("past_key_values=past_key_values)\n        hidden", "past_key_values=None)\n        hidden")],
    ],
    ids=lambda changes: changes[0][1],
)
def test_lookalikes_are_refused(changes):
    (model,) = sites(indexed(*changes))
    assert model.status is Status.REFUSED and model.reason
