import textwrap

import pytest
import torch

from tests.patches.idioms.applied import (
    assert_missed,
    assert_routed,
    compared,
    part_changes,
    site_of,
    sites_of,
    spliced,
)
from veomni_hook.kernels.selection.process_choice import set_choice
from veomni_hook.patches.idioms import add_rms_norm
from veomni_hook.patches.site import Status

NORM = """
import torch
from torch import nn

class SomeNorm(nn.Module):
    def __init__(self, size, eps=1e-3):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(size))
        self.eps = eps

    def forward(self, x):
        dtype = x.dtype
        x = x.to(torch.float32)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * x.to(dtype)

class SameNorm(SomeNorm):
    pass

class OneNorm(SomeNorm):
    def forward(self, x):
        y = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return (y * (1.0 + self.weight.float())).type_as(x)

class OtherNorm(SomeNorm):
    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

class LikeRMSNorm(SomeNorm):
    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.abs().mean(-1, keepdim=True) + self.eps)

class Checked(SomeNorm):
    def forward(self, x):
        if x.ndim != 3:
            raise ValueError(x.shape)
        y = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * y.to(x.dtype)
"""
LAYER = """

class Layer(nn.Module):
    def __init__(self, size=6):
        super().__init__()
        self.norm = {norm}
        self.mlp = nn.Linear(size, size)
        self.scale = 0.5

    def forward(self, x, h):
"""
# The body of forward(self, x, h), and the text of the guard.
FORMS = {
    "copied": (
        "h = x + h\n# Fully connected\nx = h\nh = self.norm(h)\nreturn x + self.mlp(h)",
        "x, h = kernel(x, h, norm.weight, norm.eps)",
    ),
    "copied to another": ("h = x + h\nr = h\nh = self.norm(h)\nreturn r + self.mlp(h) + x", "r, h = kernel(x, h, norm.weight, norm.eps)"),
    "not copied": ("h = x + h\ny = self.norm(h)\nreturn h + self.mlp(y)", "h, y = kernel(x, h, norm.weight, norm.eps)"),
    "copied for nothing": (
        "s = h + x\nr = s\ny = self.norm(s)\nreturn r * s + self.mlp(y)",
        "s, y = kernel(h, x, norm.weight, norm.eps)\n        r = s",
    ),
    "the copy is normalised": ("h = x + h\ny = h\ny = self.norm(h)\nreturn h + self.mlp(y)", "h, y = kernel(x, h, norm.weight, norm.eps)"),
    "the sum is used up": ("h = x + h\nh = self.norm(h)\nreturn self.mlp(h)", "h = kernel(x, h, norm.weight, norm.eps)[1]"),
    "scaled": (
        "h = x + self.mlp(h) * self.scale\nx = h\nh = self.norm(h)\nreturn x * h",
        "x, h = kernel(x, self.mlp(h) * self.scale, norm.weight, norm.eps)",
    ),
    "in a branch": (
        "if self.scale:\n    h = x + h\n    x = h\n    h = self.norm(h)\nreturn x * h",
        "x, h = kernel(x, h, norm.weight, norm.eps)",
    ),
    "names that are taken": (
        "kernel, norm = 2, 3\nh = x + h\nx = h\nh = self.norm(h)\nreturn x * h * kernel * norm",
        "x, h = veomni_kernel(x, h, veomni_norm.weight, veomni_norm.eps)",
    ),
    "twice": (
        "h = x + h\nx = h\nh = self.norm(h)\nh = x + h\nx = h\nh = self.norm(h)\nreturn x * h",
        "x, h = kernel(x, h, norm.weight, norm.eps)",
    ),
}  # fmt: skip
NORMS = {
    "SomeNorm(size)": "cast_before_weight",
    "SomeNorm(size, eps=1e-2)": "cast_before_weight",
    "SameNorm(size)": "cast_before_weight",
    "OneNorm(size)": "one_plus_weight",
}


def module(body, norm="SomeNorm(size)"):
    return NORM + LAYER.format(norm=norm) + textwrap.indent(body, "        ") + "\n"


COPIED = module(FORMS["copied"][0])


@pytest.fixture(autouse=True)
def _references():
    set_choice("add_rms_norm=reference")


def outcome_of(text, change=lambda layer: None, dtype=torch.float32):
    found = sites_of(add_rms_norm, text)
    return compared(text, found, "Layer", [(2, 3, 6)] * 2, change=change, dtype=dtype)["add_rms_norm"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FORMS)
def test_every_form_is_routed_and_computes_the_same(name, dtype):
    body, said = FORMS[name]
    site = assert_routed(add_rms_norm, module(body), "cast_before_weight", "Layer.forward", said)
    assert "SomeNorm.forward" in site.relies_on
    assert outcome_of(module(body), dtype=dtype).backend == "reference"


@pytest.mark.parametrize("norm", NORMS)
def test_the_class_of_the_norm_decides_the_formula(norm):
    text = module(FORMS["copied"][0], norm)
    said = f":= self.norm, {norm.partition('(')[0]})"
    assert_routed(add_rms_norm, text, NORMS[norm], "Layer.forward", said)
    assert outcome_of(text).backend == "reference"


def test_upstreams_lines_stay_as_they_are():
    patched = spliced(COPIED, sites_of(add_rms_norm, COPIED))
    lines = "h = x + h\n# Fully connected\nx = h\nh = self.norm(h)\n"
    assert textwrap.indent(lines, " " * 8) in patched
    assert f"    else:\n{textwrap.indent(lines, ' ' * 8)}    return x + self.mlp(h)\n" in patched


MISSED = {
    "in place": ("h += x\nx = h\nh = self.norm(h)\nreturn x * h", "in place"),
    "a sum in place": ("h += x + h\nx = h\nh = self.norm(h)\nreturn x * h", "in place"),
    "inside an expression": ("h = x + h\nx = h\nh = self.mlp(self.norm(h))\nreturn x * h", "an expression"),
    "of itself": ("h = x + h\nx = h\nh = self.norm(self.norm(h))\nreturn x * h", "an expression"),
    "returned": ("h = x + h\nreturn self.norm(h)", "an expression"),
    "more operands": ("h = x + h\nx = h\nh = self.norm(h, 1)\nreturn x * h", "more than the sum"),
    "numbers": ("h = 1 + 2\nx = h\nh = self.norm(h)\nreturn x * h", "known before the sum"),
    "a local class": ("SomeNorm = 1\nh = x + h\nx = h\nh = self.norm(h)\nreturn x * h", "a local hides"),
}


@pytest.mark.parametrize("name", MISSED)
def test_what_is_counted_and_not_routed(name):
    body, reason = MISSED[name]
    assert_missed(add_rms_norm, module(body), reason)


@pytest.mark.parametrize(
    ("norm", "reason"),
    [
        ("OtherNorm(size)", "OtherNorm is without_cast, which has no form with an addition"),
        ("LikeRMSNorm(size)", "LikeRMSNorm has no formula of rms_norm"),
        ("Checked(size)", "Checked checks its arguments"),
    ],
)
def test_norms_without_a_form_here(norm, reason):
    assert_missed(add_rms_norm, module(FORMS["copied"][0], norm), reason)


def test_one_of_two_classes_is_known_at_the_call_alone():
    text = COPIED.replace(
        "self.scale = 0.5", "self.scale = 0.5\n        if size > 6:\n            self.norm = OneNorm(size)"
    )
    assert "may be one of OneNorm, SomeNorm" in site_of(add_rms_norm, text).reason


@pytest.mark.parametrize(
    "body",
    [
        "h = x - h\nx = h\nh = self.norm(h)\nreturn x * h",
        "h = x + h\nx = self.mlp(h)\nh = self.norm(h)\nreturn x * h",
        "h = x + h\nreturn h",
        "h = x + h\nx = h\nh = self.norm(x)\nreturn x * h",
        "h = x + h\nx = h\nh = self.mlp(h)\nreturn x * h",
    ],
)
def test_no_candidates(body):
    assert sites_of(add_rms_norm, module(body)) == []


def test_a_norm_of_another_file_is_no_candidate():
    for norm in ("nn.RMSNorm(size)", "nn.Linear(size, size)"):
        assert sites_of(add_rms_norm, module(FORMS["copied"][0], norm)) == []


def test_a_layer_that_inherits_its_init():
    derived = COPIED + "\n\nclass Derived(Layer):\n" + COPIED.partition("self.scale = 0.5\n")[2]
    found = sites_of(add_rms_norm, derived)
    assert [(site.target, site.status) for site in found] == [
        ("Layer.forward", Status.ROUTED), ("Derived.forward", Status.ROUTED)
    ]  # fmt: skip


@part_changes
def test_a_norm_whose_call_matters_is_called(change, reason):
    outcome = outcome_of(COPIED, lambda layer: change(layer, "norm"))
    assert outcome.backend == "eager" and reason in outcome.reason


def test_a_class_whose_forward_was_replaced_is_called():
    def change(layer):
        type(layer.norm).forward = lambda self, x: x * self.weight

    outcome = outcome_of(COPIED, change)
    assert outcome.backend == "eager" and "which a kernel would not call" in outcome.reason
