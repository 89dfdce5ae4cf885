"""Cross-attention that is not used, and other ways to attend: refused when they are used, and lookalikes."""

import pytest

from tests.patches.idioms.applied import in_lines, spliced
from tests.patches.idioms.layer_loops import changed, sites
from veomni_hook.patches.site import Status

#: Attention with a second way, and a layer that also attends to another model's output.
WAY = """\
        if self.config.reorder and hasattr(self, "scale"):
            query = torch.cumsum(query, 2)
"""
CALLED = "        attention_interface = ALL"
CROSS = """\
        if encoder_hidden_states is not None:
            hidden_states = hidden_states + encoder_hidden_states.mean(1, keepdim=True)
        return hidden_states + self.mlp"""
TAKEN = "inputs_embeds=None, encoder_hidden_states=None, **kwargs"
PASSED = "                past_key_values=past_key_values,\n                encoder_hidden_states=encoder_hidden_states,\n"
OPTIONAL = (
    ("position_embeddings=None, **kwargs", "position_embeddings=None, encoder_hidden_states=None, **kwargs"),
    ("        return hidden_states + self.mlp", CROSS),
    ("inputs_embeds=None, **kwargs", TAKEN),
    ("                past_key_values=past_key_values,\n", PASSED),
)


def test_layers_without_another_models_output_are_split_and_with_one_refused():
    text = changed(*OPTIONAL)
    (site,) = sites(text)
    assert (site.status, site.reason) == (Status.ROUTED, "")
    lines = in_lines(spliced(text, [site]))
    check = "veomni_sequence.absent(self, encoder_hidden_states, "
    assert f'{check}"cross attention: the layers also attend to another model\'s output")' in lines


@pytest.mark.parametrize(
    "change",
    [
        pytest.param((TAKEN, TAKEN.replace("=None, **", "=make(), **")), id="it has another default"),
        pytest.param(
            ("        hidden_states = inputs_embeds\n", "        hidden_states = inputs_embeds\n        encoder_hidden_states = None\n"),
            id="the forward forgets it",
        ),
        pytest.param(
            ("            position_embeddings=position_embeddings,\n            **kwargs", "            position_embeddings=position_embeddings,\n            encoder_hidden_states=self.table,\n            **kwargs"),
            id="something else is passed on under its name",
        ),
    ],
)  # fmt: skip
def test_lookalikes_of_cross_attention_are_refused(change):
    (site,) = sites(changed(*OPTIONAL, change))
    assert site.status is Status.REFUSED
    assert "cross attention: the layers also attend to another model's output" in site.reason


def test_another_way_to_attend_is_refused_when_it_is_used():
    text = changed((CALLED, WAY + CALLED))
    model, attention = sites(text)
    assert (model.status, model.reason) == (Status.ROUTED, "")
    assert (attention.target, attention.variant) == ("TinyAttention.forward", "refused_inside")
    before, _, _ = in_lines(spliced(text, [model, attention])).partition("query = torch.cumsum(query, 2)")
    assert before.splitlines()[-2].strip() == (
        "veomni_sequence.refused_inside(self, 'a cumulative sum along the positions (line 67)')"
    )


@pytest.mark.parametrize(
    "way",
    [
        pytest.param("        query = torch.cumsum(query, 2)\n", id="no other way"),
        pytest.param(WAY.replace("self.config.reorder", "attention_mask is not None"), id="with each mask"),
        pytest.param(f"{WAY}        else:\n            key = torch.cumsum(key, 2)\n", id="both ways"),
        pytest.param(
            "        if self.mode:\n            pass\n        elif query.cumsum(2):\n            pass\n",
            id="an elif that asks",
        ),
    ],
)
def test_lookalikes_of_other_ways_are_refused(way):
    (site,) = sites(changed((CALLED, way + CALLED)))
    assert site.status is Status.REFUSED
    assert "a cumulative sum along the positions" in site.reason


def test_layers_have_no_other_ways_beside_their_attention():
    way = WAY.replace("query", "hidden_states").replace("2", "1")
    (site,) = sites(
        changed(("        residual = hidden_states\n", f"{way}        residual = hidden_states\n"))
    )
    assert site.status is Status.REFUSED


def test_functions_that_attention_calls_have_no_other_ways():
    helper = f"    def scaled(self, query):\n{WAY}        return query\n\n"
    attention = "    def forward(self, hidden_states, position_embeddings"
    text = changed((attention, helper + attention), (CALLED, f"        query = self.scaled(query)\n{CALLED}"))
    (site,) = sites(text)
    assert site.status is Status.REFUSED
