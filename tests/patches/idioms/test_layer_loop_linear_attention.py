"""Loops over layers of linear attention: what is proven of them, and lookalikes that mix positions."""

import pytest

from tests.patches.idioms.applied import spliced
from tests.patches.idioms.layer_loops import DECODER, changed, sites
from veomni_hook.patches.code.document import Document
from veomni_hook.patches.routes.view import ModuleView
from veomni_hook.patches.site import Status

FUNCTIONS = """
@use_kernel_func_from_hub_with_fallback("causal_conv1d_fn", "causal_conv1d")
def causal_conv1d_fn(hidden_states, weight, bias=None, activation=None, **kwargs):
    return hidden_states.cumsum(2)

@use_kernel_func_from_hub_with_fallback("chunk_gated_delta_rule", "fla")
def chunk_gated_delta_rule(
    query, key, value, g, beta, chunk_size=64, initial_state=None, output_final_state=False,
    use_qk_l2norm_in_kernel=False, **kwargs,
):
    return value.cumsum(1), None

def without_padding(hidden_states, attention_mask):
    if attention_mask is not None:
        hidden_states = hidden_states * attention_mask[:, :, None]
    return hidden_states

"""
BODY = """\
    def forward(self, hidden_states, position_embeddings, attention_mask=None, past_key_values=None, **kwargs):
        hidden_states = without_padding(hidden_states, attention_mask)
        rows, length, _ = hidden_states.shape
        known = past_key_values is not None and past_key_values.has_previous_state(self.layer_idx)
        state = past_key_values.get_recurrent_state(self.layer_idx) if past_key_values is not None else None
        x = self.q_proj(hidden_states).transpose(1, 2)
        if known and length == 1:
            x = causal_conv1d_update(x)
        else:
            if past_key_values is not None:
                x = past_key_values.update_conv_state(x, self.layer_idx)
            x = causal_conv1d_fn(x, self.weight, activation="silu", **kwargs)
            x = x[:, :, -length:]
        x = x.transpose(1, 2)
        query = x.reshape(rows, length, -1, self.head_dim)
        beta = self.k_proj(hidden_states).sigmoid()
        x, state = chunk_gated_delta_rule(
            query, query, query, g=-beta, beta=beta, initial_state=state,
            cu_seqlens=kwargs.pop("cu_seq_lens_q", None), **kwargs,
        )
        if past_key_values is not None:
            past_key_values.update_recurrent_state(state, self.layer_idx)
        return self.o_proj(x.reshape(rows, length, -1)), None

"""


def mixer(*changes):
    """The decoder with linear attention, after changes of which each must apply."""
    start = DECODER.index("    def forward(self, hidden_states, position_embeddings")
    text = DECODER[:start] + BODY + DECODER[DECODER.index("class TinyMLP") :]
    text = text.replace("class TinyAttention", FUNCTIONS + "class TinyAttention", 1)
    return changed(*changes, text=text)


def test_linear_attention_is_proven_and_gets_its_part_of_the_mask():
    text = mixer()
    model, layer = sites(text)
    assert (model.target, model.status, model.reason) == ("TinyModel.forward", Status.ROUTED, "")
    assert (layer.target, layer.status, layer.counted) == ("TinyAttention.forward", Status.ROUTED, False)
    part = "without_padding(hidden_states, veomni_sequence.part_of_rows(self, attention_mask))"
    assert part in spliced(text, [layer])
    assert spliced(text, [model, layer]).count("veomni_sequence.") == 3


QUERY = "query = x.reshape(rows, length, -1, self.head_dim)"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ([("= causal_conv1d_fn(x,", "= causal_conv1d_fn(x.transpose(1, 2),")], "the hidden_states of its convolution is not [batch"),
        ([("self.weight, activation", "self.weight, bias=x, activation")], "takes a part of the positions as bias"),
        ([("query, query, query, g", "query.transpose(1, 2), query, query, g")], "the query of its rule is not"),
        ([("g=-beta", "g=-beta.transpose(1, 2)")], "the g of its rule is not"),
        ([("g=-beta", "chunk_size=beta, g=-beta")], "its rule takes a part of the positions as chunk_size"),
        ([("past_key_values.update_recurrent_state(state", "x = x + (state * 2)  # ")], "it uses the state of a rule"),
        ([("x[:, :, -length:]", "x[:, :, -4:]")], "takes a part of the positions"),
        ([("x[:, :, -length:]", "x[:, :, :-length]")], "with the number of positions"),
        ([("if known and", "if not known and")], "computes with the number of positions"),
        ([(QUERY, f"{QUERY} + attention_mask")], "computes with causal_mask, which holds all positions"),
        ([("* attention_mask[:, :, None]", "* attention_mask.cumsum(1)[:, :, None]")], "without_padding"),
        ([('_with_fallback("chunk', '_with_fallback("other_chunk')], "a cumulative sum along the positions"),
    ],
)  # fmt: skip
def test_what_mixes_positions_around_a_rule_is_refused(changes, reason):
    (site,) = sites(mixer(*changes))
    assert site.status is Status.REFUSED
    # The kind of layer is named; what could not be proven is found below it.
    assert "recurrent layers: TinyAttention" in site.reason
    assert reason in unproven(mixer(*changes))


def unproven(text):
    """What could not be proven of the loop."""
    from veomni_hook.patches.idioms.layer_loop.loop import decided, loops
    from veomni_hook.patches.site import Missed

    view = ModuleView(Document(text, "transformers.models.tiny.modeling_tiny"))
    owner, forward = next(each for each in view.forwards() if each[0].name == "TinyModel")
    try:
        decided(view, owner, forward, list(loops(forward)))
    except Missed as error:
        return str(error)
    return ""


IMPORTED = """
if available():
    from causal_conv1d import causal_conv1d_fn
    from fla.modules import FusedRMSNormGated
    from fla.ops import chunk_gated_delta_rule as packaged
else:
    causal_conv1d_fn = packaged = FusedRMSNormGated = None

"""
#: Layers that hold functions of packages, and what 5.9 does beside them.
HELD = [
    ("import torch\n", f"import torch\nimport torch.nn.functional as F\n{IMPORTED}"),
    ("self.head_dim = config.head_dim\n", """self.head_dim = config.head_dim
        self.causal_conv1d_fn = causal_conv1d_fn
        self.chunk_of_delta = packaged or chunk_gated_delta_rule
        self.gated = TinyNorm(8) if FusedRMSNormGated is None else FusedRMSNormGated(8)
"""),
    ("attention_mask is not None:\n", "attention_mask is not None and attention_mask.shape[1] > 1:\n"),
    ("x = past_key_values.update_conv_state(x, self.layer_idx)", """\
kept = F.pad(x, (self.taps - x.shape[-1], 0))
                past_key_values.update_conv_state(kept, self.layer_idx)"""),
    ('x = causal_conv1d_fn(x, self.weight, activation="silu", **kwargs)', """\
if self.causal_conv1d_fn is not None:
                x = self.causal_conv1d_fn(
                    x=x, weight=self.conv.weight.squeeze(1), bias=self.conv.bias, seq_idx=kwargs.get("seq_idx")
                )
            else:
                x = F.silu(self.conv(x)[:, :, : x.shape[-1]])"""),
    ("= chunk_gated_delta_rule(\n", "= self.chunk_of_delta(\n"),
    ('cu_seqlens=kwargs.pop("cu_seq_lens_q", None), **kwargs,', 'cu_seqlens=kwargs.get("cu_seq_lens_q"),'),
    ("x.reshape(rows, length, -1)", "self.gated(x).reshape(rows, length, -1)"),
]  # fmt: skip


def test_functions_that_layers_hold_are_proven():
    model, layer = sites(mixer(*HELD))
    assert (model.status, model.reason, layer.variant) == (Status.ROUTED, "", "part_of_rows")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (("x=x, weight", "x=x.transpose(1, 2), weight"), "causal_conv1d_fn"),
        (("shape[1] > 1", "shape[1] > 2"), "with the number of positions"),
        (("self.taps - x.shape[-1], 0", "0, self.taps - x.shape[-1]"), "with the number of positions"),
        (("past_key_values.update_conv_state(kept,", "x = x + kept\n                past_key_values.other("), "the state of a rule"),
        (("import FusedRMSNormGated", "import FusedShift as FusedRMSNormGated"), "made in several ways"),
    ],
)  # fmt: skip
def test_what_mixes_positions_around_held_functions_is_refused(change, reason):
    assert reason in unproven(mixer(*HELD, change))


CHANNELS = [
    ('"chunk_gated_delta_rule", "fla"', '"chunk_kda", "fla"'),
    ("g=-beta", "g=-query"),
    (
        "past_key_values.update_recurrent_state(state,",
        "past_key_values.update_recurrent_state(state.to(x.dtype),",
    ),
    (QUERY, "query, _, _ = [each.view(rows, length, -1, 8) for each in torch.split(x, [4] * 3, dim=-1)]"),
]


def test_a_decay_for_each_channel_is_proven():
    model, layer = sites(mixer(*CHANNELS))
    assert (model.status, model.reason, layer.variant) == (Status.ROUTED, "", "part_of_rows")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (("g=-query", "g=-query.transpose(1, 2)"), "the g of its rule is not"),
        (("g=-query", "g=-query[..., None]"), "the g of its rule is not"),
        (("state.to(x.dtype)", "state.sum()"), "it uses the state of a rule"),
        (("state.to(x.dtype)", "(state.float() + 1)"), "it uses the state of a rule"),
        (("[4] * 3, dim=-1", "[4] * 3, dim=1"), "a split along the positions"),
    ],
)
def test_what_mixes_channels_with_positions_is_refused(change, reason):
    assert reason in unproven(mixer(*CHANNELS, change))


FULL = DECODER[DECODER.index("class TinyAttention") : DECODER.index("class TinyMLP")].replace(
    "TinyAttention", "Full"
)
MADE = "self.self_attn = TinyAttention(config, layer_idx)"
CALLED = DECODER[
    DECODER.index("        hidden_states, _ = self.self_attn(") : DECODER.index(
        "        hidden_states = residual +"
    )
]
CHOSEN = MADE.replace("= ", '= Full(config, layer_idx) if config.kinds[layer_idx] == "full" else ')
PASSED = "hidden_states=given, attention_mask=attention_mask, **kwargs"
#: Attention in one layer, linear attention in another, under one name; parts of positions in `**kwargs`.
CHOICE = [
    ("def forward(self, hidden_states, position_embeddings, attention_mask=None, past", "def forward(self, hidden_states, attention_mask=None, past"),
    ("return self.o_proj(x.reshape(rows, length, -1)), None", "return self.o_proj(x.reshape(rows, length, -1))"),
    ("class TinyLayer", f"{FULL}class TinyLayer"),
    (MADE, f"self.kind = config.kinds[layer_idx]\n        {CHOSEN}"),
    ("def forward(self, hidden_states, attention_mask=None, position_embeddings=None, **kwargs)", "def forward(self, hidden_states, attention_mask=None, **kwargs)"),
    (CALLED, f"""\
        given = self.norm(hidden_states)
        if self.kind == "linear":
            hidden_states = self.self_attn({PASSED})
        else:
            hidden_states, _ = self.self_attn({PASSED})
"""),
]  # fmt: skip


NEGATED = CHOSEN.replace("Full(config, layer_idx)", "TinyAttention(config, layer_idx)").replace("==", "!=")
NESTED = f"""\
        given = self.norm(hidden_states)
        if self.training:
            if self.kind == "linear":
                return given
        hidden_states, _ = self.self_attn({PASSED})
"""


@pytest.mark.parametrize(
    "more", [[], [(CHOSEN, NEGATED[: NEGATED.rindex("else")] + "else Full(config, layer_idx)")]]
)
def test_a_setting_chooses_one_of_two_layers(more):
    model, _ = sites(mixer(*CHOICE, *more))
    assert (model.status, model.reason) == (Status.ROUTED, "")


def test_what_one_branch_knows_of_a_choice_does_not_hold_after_it():
    assert "a value that is unpacked is not known" in unproven(mixer(*CHOICE[:-1], (CALLED, NESTED)))


@pytest.mark.parametrize(
    "change",
    [
        ("self.kind = config.kinds[layer_idx]", "self.kind = config.kinds[layer_idx + 1]"),
        ("self.kind = config.kinds[layer_idx]", "layer_idx = 0\n        self.kind = config.kinds[layer_idx]"),
        ("self.kind = config.kinds[layer_idx]", "self.kind = self.kind = config.kinds[layer_idx]"),
        ('if self.kind == "linear":', 'self.kind = "full"\n        if self.kind == "linear":'),
        ('if self.kind == "linear":', 'if self.kind != "linear":'),
        ('if self.kind == "linear":', 'if self.mode == "linear":'),
        ('if config.kinds[layer_idx] == "full"', 'if config.kinds[layer_idx] != "full"'),
    ],
)
def test_a_choice_that_may_be_another_one_is_refused(change):
    assert unproven(mixer(*CHOICE, change))


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("cos = kwargs.get('other')", ""),
        ("cos = kwargs['position_embeddings'][0]", ""),
        ("kwargs.items()", "it reads a part of the positions from **kwargs"),
        ("beyond(**kwargs)", "it calls beyond, which is not followed"),
        ("beyond(kwargs)", "it calls beyond, which is not followed"),
        ("beyond(**{**kwargs})", "keyword arguments that are not known"),
    ],
)
def test_parts_of_positions_among_keyword_arguments(code, reason):
    at = "        rows, length, _ = hidden_states.shape\n"
    imported = ("import torch\n", "import torch\nfrom elsewhere import beyond\n")
    found = unproven(mixer(*CHOICE, imported, (at, f"{at}        {code}\n")))
    assert reason in found and bool(reason) is bool(found)


IN_MLP = "        return self.down_proj(self.act_fn(self.up_proj(x)))\n"


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("part = slice(0, 4, 2)\n        x[..., part] = x[..., part] * 2", ""),
        ("x[..., 1] = 0", ""),
        ("x = x[:, slice(0, 4)]", "takes a part of the positions"),
        ("x[:, 0] = 0", "picks positions by an index"),
        ("x[..., 0:1] = x[..., 0]", "TinyMLP.forward: "),
        ("x[..., 0] = x.cumsum(1)[..., 0]", "a cumulative sum along the positions"),
        ("if isinstance(x, tuple):\n            x = x.cumsum(1)", ""),
        ("if isinstance(x, list):\n            x = x.cumsum(1)", "a cumulative sum along the positions"),
        ("x = x * ACT2FN['silu'](x)", ""),
    ],
)
def test_parts_that_are_written_and_slices_that_are_kept(code, reason):
    text = DECODER.replace(IN_MLP, f"        {code}\n{IN_MLP}", 1)
    (site,) = sites(text)
    assert site.status is (Status.REFUSED if reason else Status.ROUTED), site.reason
    assert reason in site.reason
