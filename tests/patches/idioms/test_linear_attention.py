"""Linear attention, the convolutions in front of it, and the models that find the boundaries of samples."""

import ast

import pytest

from tests.patches.idioms.applied import changed, sites_of, spliced
from veomni_hook.patches.code.document import Document
from veomni_hook.patches.idioms import causal_conv, gated_delta_rule, sample_boundaries
from veomni_hook.patches.routes.view import ModuleView
from veomni_hook.patches.site import Status

COUNTED = """
class Layer:
    def forward(self, q, state=None, **kwargs):
        if state is not None:
            q = causal_conv1d_update(q, state)
            return torch_recurrent_gated_delta_rule(q)
        q = causal_conv1d_fn(q, **kwargs)
        return torch_chunk_gated_delta_rule(q, **kwargs) + torch_chunk_gated_delta_rule(q)

class Older:
    def mix(self, q):
        return self.chunk_gated_delta_rule(self.causal_conv1d_fn(q))

class PerChannel:
    def forward(self, q):
        return chunk_kimi_delta_attention(q)

class Decoding:
    def forward(self, q):
        return fused_recurrent_gated_delta_rule(self.causal_conv1d_update(q))
"""
ROUTED = '''
@use_kernel_func_from_hub_with_fallback("causal_conv1d_fn", "causal_conv1d")
def convolve_causal_conv1d(hidden_states, weight, bias=None, activation=None, **kwargs):
    return hidden_states

@use_kernel_func_from_hub_with_fallback("chunk_gated_delta_rule", "fla")
def rule_by_chunk_of_delta(
    query, key, value, g, beta, chunk_size=64, initial_state=None, output_final_state=False,
    use_qk_l2norm_in_kernel=False, **kwargs,
):
    return value, None

class Mixer:
    def forward(self, x, cache=None, **options):
        x = convolve_causal_conv1d(
            x, self.weight,  # of the layer
            **options,
        )
        y, state = rule_by_chunk_of_delta(x, x, x, g=x, beta=x, cu_seqlens=options.pop("ends", None), **options)
        return y

class Model:
    def forward(
        self, input_ids, attention_mask=None, position_ids=None, past_key_values=None, inputs_embeds=None, **options
    ):
        """Docstring."""
        x = inputs_embeds
        for layer in self.layers[:2]:
            x = layer(x, **options)
        return x
'''
#: What is wrong with a form: a replacement of text, which op misses it, and the reason.
NEAR_MISSES = {
    "another name": ('"chunk_gated_delta_rule", "fla"', '"chunk_rule", "fla"', "rule", "not declared as the chunk_gated"),
    "no decorator": ('@use_kernel_func_from_hub_with_fallback("chunk', '@other("chunk', "rule", "not declared as"),
    "other parameters": ("chunk_size=64", "size=64", "rule", "has other parameters"),
    "no boundaries": (', cu_seqlens=options.pop("ends", None), **options)', ")", "rule", "passes no boundaries"),
    "not self": ("def forward(self, x, cache", "def forward(this, x, cache", "rule", "self is not the method's module"),
    "an attribute": ("y, state = rule_by", "y, state = self.rule_by", "rule", "is not one function of the file"),
    "bound again": ("class Mixer:", "rule_by_chunk_of_delta = None\nclass Mixer:", "rule", "is not one function"),
    "no rule behind it": ("y, state = rule_by_chunk_of_delta", "y, state = state_scan", "conv", "nothing keeps samples apart"),
    "no inputs": ("inputs_embeds=None, ", "", "model", "it has no argument inputs_embeds"),
}  # fmt: skip
IDIOMS = {"rule": gated_delta_rule, "conv": causal_conv, "model": sample_boundaries}


def test_calls_for_whole_sequences_count_once_a_method():
    view = ModuleView(Document(COUNTED))
    assert [(each.target, each.lineno) for each in gated_delta_rule.find(view)] == [
        ("Layer.forward", 8),
        ("Older.mix", 12),
        ("PerChannel.forward", 16),
    ]
    assert [(each.target, each.lineno) for each in causal_conv.find(view)] == [
        ("Layer.forward", 7),
        ("Older.mix", 12),
    ]
    assert {each.status for each in (*gated_delta_rule.find(view), *causal_conv.find(view))} == {
        Status.MISSED
    }


def test_functions_are_known_by_what_they_are_declared_to_be():
    view = ModuleView(Document(ROUTED))
    sites = [site for idiom in IDIOMS.values() for site in idiom.find(view)]
    assert [(each.op, each.target, each.status.value, each.variant) for each in sites] == [
        ("gated_delta_rule", "Mixer.forward", "routed", "scalar_decay"),
        ("causal_conv", "Mixer.forward", "routed", "depthwise"),
        ("sample_boundaries", "Model.forward", "routed", "found_once"),
    ]
    text = spliced(ROUTED, sites)
    written = ast.unparse(ast.parse(text))
    assert (
        "x = veomni_causal_conv.separated(veomni_causal_conv_depthwise, self, convolve_causal_conv1d)"
        "(x, self.weight, **options)" in written
    )
    assert (
        "veomni_gated_delta_rule.separated(veomni_gated_delta_rule_scalar_decay, self, rule_by_chunk_of_delta)"
        "(x, x, x, g=x, beta=x, cu_seqlens=options.pop('ends', None), **options)" in written
    )
    assert (
        "options = veomni_boundaries.found(self, options, position_ids, attention_mask, past_key_values,"
        " input_ids if inputs_embeds is None else inputs_embeds, options.get('use_cache'), masks_positions=False)\n"
        "        x = inputs_embeds" in written
    )
    assert "# of the layer" in text


@pytest.mark.parametrize("name", ["create_causal_mask", "create_sliding_window_causal_mask"])
def test_masks_that_transformers_makes_are_of_positions(name):
    made = ROUTED.replace("        x = inputs_embeds\n", f"        x = {name}(inputs_embeds)\n")
    (site,) = sites_of(sample_boundaries, made)
    assert "masks_positions" not in spliced(made, [site])
    made = made.replace(name, "create_recurrent_attention_mask")
    (site,) = sites_of(sample_boundaries, made)
    assert "masks_positions=False" in spliced(made, [site])


@pytest.mark.parametrize("near_miss", NEAR_MISSES)
def test_near_misses_are_not_routed(near_miss):
    old, new, idiom, reason = NEAR_MISSES[near_miss]
    assert ROUTED.count(old) >= 1
    (site,) = sites_of(IDIOMS[idiom], ROUTED.replace(old, new, 1))
    assert site.status is Status.MISSED and not site.edits
    assert reason in site.reason


def test_the_rule_with_a_decay_for_each_channel_is_a_variant():
    text = ROUTED.replace('"chunk_gated_delta_rule", "fla"', '"chunk_kda", "fla"')
    text = text.replace('cu_seqlens=options.pop("ends", None), ', "")
    sites = [site for idiom in IDIOMS.values() for site in sites_of(idiom, text)]
    assert [(each.op, each.variant) for each in sites] == [
        ("gated_delta_rule", "channel_decay"),
        ("causal_conv", "depthwise"),
        ("sample_boundaries", "found_once"),
    ]


HELD = """
import torch.nn.functional as F

if available():
    from causal_conv1d import causal_conv1d_fn
    from fla.ops import chunk_gated_delta_rule as packaged
else:
    causal_conv1d_fn = packaged = None

def rule_of_chunk(
    query, key, value, g, beta, chunk_size=64, initial_state=None, output_final_state=False,
    use_qk_l2norm_in_kernel=False, **kwargs,
):
    return value, None

class Mixer:
    def __init__(self):
        self.causal_conv1d_fn = causal_conv1d_fn
        self.chunk_of_delta = packaged or rule_of_chunk

    def forward(self, x, **options):
        if self.causal_conv1d_fn is not None:
            x = self.causal_conv1d_fn(
                x=x, weight=self.conv.weight.squeeze(1), bias=self.conv.bias, activation=self.act,
                seq_idx=options.get("numbers"),
            )
        else:
            x = F.silu(self.conv(x)[:, :, : x.shape[-1]])
        return self.chunk_of_delta(x, x, x, g=x, beta=x, cu_seqlens=options.get("ends"))
"""


def test_functions_that_layers_hold_are_known_by_what_they_are_imported_as():
    sites = [site for idiom in (gated_delta_rule, causal_conv) for site in sites_of(idiom, HELD)]
    assert [(each.op, each.status.value, each.variant) for each in sites] == [
        ("gated_delta_rule", "routed", "scalar_decay"),
        ("causal_conv", "routed", "depthwise"),
    ]
    written = " ".join(ast.unparse(ast.parse(spliced(HELD, sites))).split())
    asked = "veomni_causal_conv.separated(veomni_causal_conv_depthwise, self, "
    assert f"x = {asked}self.causal_conv1d_fn, causal_conv1d_fn, options)(x=x, weight=" in written
    assert (
        f"x = {asked}veomni_causal_conv.called(self.conv, lambda x, *_, **__:"
        " F.silu(self.conv(x)[:, :, :x.shape[-1]])), None, options)"
        "(x, self.conv.weight.squeeze(1), self.conv.bias, 'silu')" in written
    )
    assert (
        "veomni_gated_delta_rule.separated(veomni_gated_delta_rule_scalar_decay, self, self.chunk_of_delta,"
        " packaged, options)(x, x, x, g=x, beta=x, cu_seqlens=options.get('ends'))" in written
    )
    assert sites[0].skips == {"Mixer.forward": ("rule_of_chunk",)}


@pytest.mark.parametrize(
    ("old", "new", "idiom", "reason"),
    [
        ("chunk_gated_delta_rule as packaged", "other_rule as packaged", "rule", "not declared as the chunk_gated"),
        ("import chunk_gated_delta_rule as", "import chunk_rule as", "rule", "not declared as"),
        ("from fla.ops", "from .ops", "rule", "not declared as"),
        ("packaged or rule_of_chunk", "packaged or other", "rule", "is not one function of the file"),
        ("packaged or rule_of_chunk", "rule_of_chunk", "rule", "is not one function of the file"),
        ("        self.causal", "        self.chunk_of_delta = other\n        self.causal", "rule", "is not one function"),
        ("chunk_size=64", "size=64", "rule", "has other parameters"),
        (', cu_seqlens=options.get("ends")', "", "rule", "passes no boundaries"),
        ("import causal_conv1d_fn", "import other as causal_conv1d_fn", "conv", "is not one function of the file"),
        ("F.silu(", "F.relu(", "conv", "is not one function of the file"),
        (": x.shape[-1]", ": length", "conv", "is not one function of the file"),
        ("bias=self.conv.bias", "bias=self.bias", "conv", "is not one function of the file"),
        (', cu_seqlens=options.get("ends")', "", "conv", "nothing keeps samples apart|does not pass all|do not hand on"),
    ],
)  # fmt: skip
def test_near_misses_of_held_functions_are_not_routed(old, new, idiom, reason):
    assert HELD.count(old) >= 1
    (site,) = sites_of(IDIOMS[idiom], HELD.replace(old, new, 1))
    assert site.status is Status.MISSED and not site.edits
    assert any(part in site.reason for part in reason.split("|")), site.reason


def model_site(text):
    """The variant of the model's site, and its code."""
    (site,) = sites_of(sample_boundaries, text)
    assert site.status is Status.ROUTED
    return site.variant, " ".join(ast.unparse(ast.parse(spliced(text, [site]))).split())


REFUSED = (
    "veomni_boundaries.refuse(self, options, position_ids, attention_mask, past_key_values, input_ids if"
)


def test_models_whose_layers_nothing_separates_raise_an_error():
    """A rule that is not routed, or boundaries that do not arrive at the layers."""
    for old, new in (
        ('"chunk_gated_delta_rule", "fla"', '"chunk_rule", "fla"'),
        ("x = layer(x, **options)", "x = layer(x)"),
        ('"causal_conv1d_fn", "causal_conv1d"', '"convolve", "causal_conv1d"'),
    ):
        variant, code = model_site(ROUTED.replace(old, new))
        assert variant == "refused" and "boundaries.found" not in code
        assert (
            f"{REFUSED} inputs_embeds is None else inputs_embeds, options.get('use_cache'), ((Mixer, ()),))"
            in code
        )


STATE_SPACE = """
@use_kernel_func_from_hub_with_fallback("shortcut", "mamba_ssm")
def split_conv1d_shortcut(x):
    return None

KINDS = {"mamba": Mixer}

class Layer:
    def __init__(self, kind):
        self.norm = Norm()
        kind = KINDS[kind]
        self.mixer = kind()

    def forward(self, x, **options):
        return self.mixer(x, **options)

class Held:
    def __init__(self):
        self.layers = [Layer("mamba")]

    def forward(self, input_ids, inputs_embeds=None, **options):
        for layer in self.layers:
            x = layer(x, **options)
        return x
"""


def test_layers_that_packages_keep_apart_are_named_with_what_they_need():
    text = """
class Mixer:
    def forward(self, x, **options):
        if split_conv1d_shortcut(x) is not None:
            return x
        x = causal_conv1d_fn(x, seq_idx=options.get("seq_idx"))
        return self.chunk_gated_delta_rule(x, cu_seqlens=options.get("cu_seq_lens_q"))
"""
    named = (
        "((Mixer, (('causal_conv1d_fn', 'seq_idx', 'seq_idx'),"
        " ('self.chunk_gated_delta_rule', 'cu_seq_lens_q', 'cu_seqlens'))),))"
    )
    assert named in model_site(text + STATE_SPACE)[1]
    for old, new in (
        ('seq_idx=options.get("seq_idx")', "seq_idx=None"),
        ("return self.mixer(x, **options)", "return self.mixer(x)"),
        ("kind = KINDS[kind]", "kind = elsewhere(kind)"),
        ("x = layer(x, **options)", "x = layer(x)"),
    ):
        assert "((Mixer, ()),))" in model_site(changed(text + STATE_SPACE, (old, new)))[1], new


def test_convolutions_alone_are_routed_where_boundaries_arrive():
    text = ROUTED.replace("y, state = rule_by_chunk_of_delta(", "y = linear(") + STATE_SPACE
    sites = [*sites_of(causal_conv, text)]
    assert [(each.target, each.status, each.variant) for each in sites] == [
        ("Mixer.forward", Status.ROUTED, "depthwise")
    ]
    for old, new, reason in (
        ("return self.mixer(x, **options)", "return self.mixer(x)", "do not hand on the boundaries"),
        ("            **options,\n", "            seq_idx=options[0],\n", "does not pass all arguments"),
    ):
        (site,) = sites_of(causal_conv, changed(text, (old, new)))
        assert site.status is Status.MISSED and reason in site.reason
