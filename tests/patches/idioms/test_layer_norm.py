"""LayerNorm as a model's file may write it, not copied from upstream; near misses; upstream's own classes."""

import textwrap

import pytest
import torch

from tests.kernels.matching import TOLERANCE
from tests.patches.idioms.applied import assert_missed, assert_routed, changed, compared, sites_of
from veomni_hook.kernels.layer_norm.variants import OP
from veomni_hook.kernels.selection.process_choice import set_choice
from veomni_hook.patches.idioms import layer_norm

HEAD = """
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.functional import layer_norm

class SomeLayerNorm(nn.Module):
    def __init__(self, size, eps=1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(size))
        self.bias = self.shift = nn.Parameter(torch.rand(size))
        self.eps, self.normalized_shape = eps, (size,)
"""
FORMULAS: dict[str, list[str]] = {
    "weight_before_cast": [
        """
        def forward(self, h):
            kind = h.dtype
            h = h.to(torch.float32)
            centre = h.mean(-1, keepdim=True)
            spread = (h - centre).pow(2).mean(-1, keepdim=True)
            h = (h - centre) * torch.rsqrt(spread + self.eps)
            return (self.weight.to(torch.float32) * h).to(kind)
        """,
        """
        def _centred(self, v):
            return v - torch.mean(v, dim=-1, keepdim=True)

        def forward(self, v):
            centred = self._centred(v.float())
            scale = (torch.mean(centred * centred, -1, True) + self.eps).rsqrt()
            return torch.mul(scale * centred, self.weight).type_as(v)
        """,
    ],
    "cast_before_weight_and_bias": [
        """
        def forward(self, h):
            kind = h.dtype
            h = h.float()
            centre = h.mean(-1, keepdim=True)
            h = h - centre
            h = h / torch.sqrt(h.square().mean(-1, keepdim=True) + self.eps)
            return self.shift + h.to(kind) * self.weight
        """
    ],
    "operator_before_weight_and_bias": [
        """
        def forward(self, h):
            h = F.layer_norm(h, self.normalized_shape, eps=self.eps)
            return h * self.weight + self.bias
        """
    ],
    "weight_and_bias_before_cast": [
        """
        def forward(self, h):
            done = layer_norm(h.float(), self.normalized_shape, self.weight, bias=self.bias, eps=self.eps)
            return done.to(h.dtype)
        """
    ],
    "unweighted": [
        """
        def forward(self, h):
            kind = h.dtype
            return F.layer_norm(h.to(dtype=torch.float32), self.normalized_shape, None, None, self.eps).to(kind)
        """
    ],
}
CASES = [(variant, number) for variant, spellings in FORMULAS.items() for number in range(len(spellings))]
NEAR = {
    "the variance of the input itself": ("spread = (h - centre).pow(2).mean(-1, keepdim=True)", "spread = h.pow(2).mean(-1, keepdim=True)"),
    "another dimension": ("centre = h.mean(-1, keepdim=True)", "centre = h.mean(1, keepdim=True)"),
    "an unbiased variance": ("(h - centre).pow(2).mean(-1, keepdim=True)", "h.var(-1, keepdim=True)"),
    "eps outside the root": ("torch.rsqrt(spread + self.eps)", "(torch.rsqrt(spread) + self.eps)"),
    "a cast before the weight": ("(self.weight.to(torch.float32) * h).to(kind)", "self.weight * h.to(kind)"),
    "no cast": ("h = h.to(torch.float32)", "h = h * 1.0"),
}  # fmt: skip


def module(text):
    return HEAD + "\n" + textwrap.indent(textwrap.dedent(text).strip("\n"), "    ") + "\n"


def test_every_variant_is_here():
    assert set(FORMULAS) == set(OP.variants)


@pytest.mark.parametrize(("variant", "number"), CASES)
def test_every_formula_is_routed(variant, number):
    text = module(FORMULAS[variant][number])
    site = assert_routed(layer_norm, text, variant, "SomeLayerNorm.forward")
    assert site.captures["eps"] == "self.eps"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("variant", "number"), CASES)
def test_the_reference_has_upstreams_bits(variant, number, dtype):
    set_choice("layer_norm=reference")
    text = module(FORMULAS[variant][number])
    wide = variant == "weight_and_bias_before_cast"  # its parameters are of float32
    outcomes = compared(
        text, sites_of(layer_norm, text), "SomeLayerNorm", [(torch.randn(2, 3, 8) * 3 + 1).to(dtype)], arguments=(8,),
        dtype=torch.float32 if wide else dtype, cast=not wide,
        tolerance=TOLERANCE[dtype],  # parts of gradients are summed in another order
    )  # fmt: skip
    assert outcomes["layer_norm"].backend == "reference"


@pytest.mark.parametrize("change", NEAR)
def test_a_near_miss_is_not_routed(change):
    before, after = NEAR[change]
    text = FORMULAS["weight_before_cast"][0]
    assert_missed(layer_norm, module(changed(text, (before, after))), "nearest is")


def test_a_name_for_what_is_subtracted():
    named = "def forward(self, h):\n    kept = h.mean(-1, keepdim=True)\n    mean = kept\n    return h - mean"
    assert_missed(layer_norm, module(named))


def test_what_is_no_candidate():
    scaled = "def forward(self, h):\n    return h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)"
    assert not sites_of(layer_norm, module(scaled)), "no mean is subtracted"
    assert not sites_of(layer_norm, module("def forward(self, h):\n    return self.layer_norm(h) + 1.0")), (
        "a module of its own"
    )
    assert not sites_of(layer_norm, module(FORMULAS["unweighted"][0]).replace("SomeLayerNorm", "SomeNorm"))


def test_an_overridden_helper_is_missed():
    text = module(FORMULAS["weight_before_cast"][1])
    text += "\nclass Other(SomeLayerNorm):\n    def _centred(self, v):\n        return v\n"
    assert_missed(layer_norm, text)
