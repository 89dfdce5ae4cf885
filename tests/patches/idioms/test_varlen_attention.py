"""Attention by segment: forms that upstream writes, look-alikes with other names, and near misses."""

import pytest
import torch
from torch.nn import functional

from tests.patches.idioms.applied import changed, executed, sites_of, spliced
from veomni_hook.patches.idioms import varlen_attention as idiom
from veomni_hook.patches.site import Status

HEAD = '''
import torch

class Tower:
    is_causal = False
    def forward(self, x, cu_seqlens, **kwargs):
        """Docstring."""
        q, k, v = x
        attend = self.table.get_interface("sdpa", None)
        if self.flash:
            out = attend(self, q, k, v, cu=cu_seqlens)
        else:
            # By segment.
            sizes = cu_seqlens[1:] - cu_seqlens[:-1]
            parts = [torch.split(each, sizes.tolist(), dim=2) for each in (q, k, v)]
'''
BODIES = {
    "a comprehension": """
            outs = [attend(self, a, b, c, scaling=0.5, **kwargs)[0] for a, b, c in zip(*parts)]
            out = torch.cat(outs, dim=1)
        return out * 2
""",
    "inline": """
            out = torch.cat(
                [attend(self, a, b, c, scaling=0.5, **kwargs)[0] for a, b, c in zip(*parts)], dim=1
            )
        return out * 2
""",
    "a loop": """
            outs, weights = [], []
            for a, b, c in zip(*parts):
                one, weight = attend(self, a, b, c, scaling=0.5, **kwargs)
                outs.append(one)
                weights.append(weight)
            out = torch.cat(outs, dim=1)
            weights = None if weights[0] is None else tuple(weights)
        return out * 2
""",
    "pairs": """
            pairs = [attend(self, a, b, c, scaling=0.5, **kwargs) for a, b, c in zip(*parts)]
            out = torch.cat([pair[0] for pair in pairs], dim=1)
            weights = None
            if pairs[0][1] is not None:
                weights = [pair[1] for pair in pairs]
        return out * 2
""",
}
RETURNS_WEIGHTS = """
            outs, weights = [], []
            for a, b, c in zip(*parts):
                one, weight = attend(self, a, b, c, attention_mask=None, scaling=0.5)
                outs.append(one)
                weights.append(weight)
            out = torch.cat(outs, dim=1)
        return out, weights
"""
#: What is wrong with a form, as a replacement of text, and the reason that is reported.
NEAR_MISSES = {
    "dim=2": ("dim=2) for each", "dim=1) for each", "dim=1) for each in (q, k, v)] in place of SPLITS ="),
    "another length": ("cu_seqlens[:-1]", "cu_seqlens[:1]", "it does not split query, key and value"),
    "another order": ("attend(self, a, b, c", "attend(self, b, a, c", "attend(self, b, a, c, scaling=0.5, **kwargs)[0]"),
    "not a local": ("[attend(", "[self.attend(", "self.attend(self, a, b, c, scaling=0.5, **kwargs)[0]"),
    "a mask of its own": ("scaling=0.5", "scaling=a.mean()", "depends on the segment"),
    "another join": ("torch.cat(outs, dim=1)", "torch.cat(outs, dim=0)", "torch.cat(outs, dim=0) in place of"),
    "a condition": ("zip(*parts)]", "zip(*parts) if a is not b]", "if a is not b] in place of"),
    "something else": ("outs = [", "print(x)\n            outs = [", "print(x) in place of"),
}  # fmt: skip


def found(body):
    [site] = sites_of(idiom, HEAD + body.lstrip("\n"), "lookalike")
    return site


@pytest.mark.parametrize("form", BODIES)
def test_every_form_is_routed(form):
    site = found(BODIES[form])
    assert (site.status, site.variant, site.reason) == (Status.ROUTED, "full", "")
    assert dict(site.captures) == {"query": "q", "key": "k", "value": "v", "cu_seqlens": "cu_seqlens"}
    text = spliced(HEAD + BODIES[form].lstrip("\n"), [site])
    assert "        # By segment.\n" in text
    assert text.count(".kernel(self, *operands)") == 1


@pytest.mark.parametrize("miss", NEAR_MISSES)
def test_a_near_miss_says_where_it_differs(miss):
    old, new, reason = NEAR_MISSES[miss]
    source = HEAD + BODIES["a comprehension"].lstrip("\n")
    [site] = sites_of(idiom, changed(source, (old, new)), "lookalike")
    assert site.status is Status.MISSED
    assert reason in site.reason


def test_code_that_reads_what_a_kernel_does_not_compute_is_a_miss():
    site = found(BODIES["a comprehension"].replace("return out * 2", "return outs"))
    assert site.status is Status.MISSED
    assert "reads more than the output" in site.reason


def test_a_method_without_boundaries_is_no_candidate():
    source = (HEAD + BODIES["inline"]).replace("cu_seqlens", "ends")
    assert not sites_of(idiom, source, "lookalike")


class Table:
    """What `attend` is taken from."""

    def __init__(self, function):
        self.function = function

    def get_interface(self, name, default):
        return self.function


@pytest.mark.parametrize("chosen", ["sdpa", "own"])
@pytest.mark.parametrize("form", [*BODIES, "weights returned"])
def test_patched_forms_compute_the_same(form, chosen):
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    calls = []

    def own(module, q, k, v, scaling=None, attention_mask=None):
        calls.append(q.shape[2])
        return functional.scaled_dot_product_attention(q, k, v, scale=scaling).transpose(1, 2), None

    source = HEAD + BODIES.get(form, RETURNS_WEIGHTS).lstrip("\n")
    site = found(BODIES.get(form, RETURNS_WEIGHTS))
    tower, upstream = (executed(source, sites)["Tower"]() for sites in ([site], []))
    tower.table = upstream.table = Table(sdpa_attention_forward if chosen == "sdpa" else own)
    tower.flash = upstream.flash = False
    torch.manual_seed(0)
    x = torch.randn(3, 1, 2, 9, 8)
    bounds = torch.tensor([0, 4, 6, 9], dtype=torch.int32)
    options: dict[str, None] = {"attention_mask": None} if form in BODIES else {}
    ours = tower.forward(x, bounds, **options)
    called = list(calls)
    theirs = upstream.forward(x, bounds, **options)
    assert called == ([4, 2, 3] if chosen == "own" else [])
    if form == "weights returned":
        assert ours[1] == theirs[1] == [None] * 3
        ours, theirs = ours[0], theirs[0]
    torch.testing.assert_close(ours, theirs)
