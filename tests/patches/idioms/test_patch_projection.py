"""Calls of torch's convolutions over disjoint blocks: what is routed, and what it computes."""

import textwrap
from functools import partial

import pytest

from tests.patches.idioms.applied import (
    assert_missed,
    assert_routed,
    compared,
    in_lines,
    part_changes,
    sites_of,
    spliced,
)  # fmt: skip
from veomni_hook.kernels.selection.process_choice import set_choice
from veomni_hook.patches.idioms import nn_layer_norm, patch_projection
from veomni_hook.patches.site import Status

HEAD = """
import torch
from torch import nn
from torch.nn import Conv2d
"""
LAYER = """

class Layer(nn.Module):
    def __init__(self, patch_size=2, flag=True):
        super().__init__()
        self.patch_size = patch_size
        kernel_size = [patch_size, patch_size]
        self.proj = {proj}
        self.norm = nn.LayerNorm(4)
        self.flag = flag

    def forward(self, x):
"""
CALL = "veomni_patch_projection_disjoint_blocks.call"
USUAL = "nn.Conv2d(3, 4, kernel_size=patch_size, stride=patch_size)"
BODY = "return self.proj(x).flatten(2).transpose(1, 2)"


@pytest.fixture(autouse=True)
def _by_name():
    set_choice("patch_projection=torch,nn_layer_norm=reference")


def module(body=BODY, proj=USUAL):
    return HEAD + LAYER.format(proj=proj) + textwrap.indent(body, "        ") + "\n"


sites = partial(sites_of, patch_projection)


def outcome_of(text, change=lambda layer: None, size=(2, 3, 2, 2)):
    found = [*sites(text), *sites_of(nn_layer_norm, text)]
    return compared(text, found, "Layer", [size], change=change, every=3e-6)["patch_projection"]


#: The body of forward(self, x), and what takes the place of the call.
CALLS = {
    "a statement": ("x = self.proj(x)\nreturn x.flatten(2)", "x = {call}(self, self.proj, x)"),
    "converted before": (
        "dtype = self.proj.weight.dtype\nreturn self.proj(x.to(dtype=dtype)).view(-1, 4)",
        "return {call}(self, self.proj, x.to(dtype=dtype)).view(-1, 4)",
    ),
    "inside an expression": (
        "return self.norm(self.proj(x).flatten(2).transpose(1, 2)) * 2",
        "self.norm, {call}(self, self.proj, x).flatten(2).transpose(1, 2)) * 2",
    ),
    "on several lines": ("return self.proj(\n    x  # first\n    * 2\n)", "return {call}(self, self.proj, x * 2)"),
    "in a branch": ("if self.flag:\n    x = self.proj(x)\nreturn x * 2", "x = {call}(self, self.proj, x)"),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_every_call_is_routed_and_computes_the_same(name):
    body, said = CALLS[name]
    text = module(body)
    site = assert_routed(patch_projection, text, "disjoint_blocks", "Layer.forward")
    patched = spliced(text, [site, *sites_of(nn_layer_norm, text)])
    assert said.format(call=CALL) in in_lines(patched)
    assert outcome_of(text) == ("torch", "chosen")


@pytest.mark.parametrize(
    ("proj", "size"),
    [
        ("nn.Conv2d(3, 4, patch_size, patch_size)", (2, 3, 4, 6)),
        ("nn.Conv2d(3, 4, kernel_size, stride=kernel_size, bias=False)", (2, 3, 4, 6)),
        ("Conv2d(3, 4, stride=self.patch_size, kernel_size=self.patch_size, padding='valid')", (2, 3, 5, 7)),
        ("torch.nn.Conv2d(3, 4, (2, 3), (2, 3), padding=0, dilation=1, groups=1)", (2, 3, 2, 3)),
        ("nn.Conv1d(3, 4, patch_size, stride=patch_size)", (2, 3, 9)),
        ("nn.Conv3d(3, 4, (2, 3, 3), stride=(2, 3, 3), padding=(0, 0, 0))", (5, 3, 2, 3, 3)),
        ("nn.Conv2d(3, 4, 2, 2) if flag else nn.Identity()", (2, 3, 2, 2)),
        ("nn.Conv2d(3, 4, 2, 2) if flag else nn.Conv2d(3, 4, 3, 2)", (2, 3, 2, 2)),
        ("nn.Conv2d(3, 4, 2, 2, padding=1) if not flag else nn.Conv2d(3, 4, 2, 2)", (2, 3, 2, 2)),
    ],
)
def test_every_construction(proj, size):
    text = module("return self.proj(x)", proj)
    (site,) = sites(text)
    assert site.status is Status.ROUTED and not site.reason, site.reason
    assert outcome_of(text, size=size) == ("torch", "chosen")


def test_what_the_text_does_not_show_is_refused_at_the_call():
    text = module("return self.proj(x)", "nn.Conv2d(3, 4, 3, 2) if flag else nn.Conv2d(3, 4, 2, 2)")
    (site,) = sites(text)
    assert site.status is Status.ROUTED
    backend, reason = outcome_of(text, size=(2, 3, 7, 7))
    assert backend == "eager" and "stride is (2, 2), its kernel (3, 3)" in reason


@pytest.mark.parametrize(("size", "backend"), [((2, 3, 2, 2), "torch"), ((2, 3, 4, 2), "eager")])
def test_without_a_choice_the_product_runs_where_nothing_is_rearranged(size, backend):
    set_choice("auto")
    found, reason = outcome_of(module(), size=size)
    assert found == backend and ("several blocks" in reason) == (backend == "eager")


def test_classes_of_one_file():
    text = module()
    derived = text + "\n\nclass Derived(Layer):\n    def forward(self, x):\n        return self.proj(x)\n"
    assert [site.target for site in sites(derived)] == ["Layer.forward", "Derived.forward"]
    other = (
        text
        + "\n\nclass Embed(nn.Module):\n    def __init__(self):\n        self.conv = nn.Conv2d(3, 4, 2, 2)\n"
    )
    found = {site.target: site for site in sites(other)}
    assert found["Layer.forward"].status is Status.ROUTED
    assert "Embed does not call self.conv itself" in found["Embed.__init__"].reason
    called_below = other + "\n\nclass Below(Embed):\n    def forward(self, x):\n        return self.conv(x)\n"
    assert [site.target for site in sites(called_below)] == ["Layer.forward", "Below.forward"]


#: The construction, the body, and why it is missed.
MISSED = {
    "padding": ("nn.Conv2d(3, 4, 2, 2, padding=1)", BODY, "has padding=1"),
    "dilation": ("nn.Conv2d(3, 4, 2, 2, dilation=2)", BODY, "has dilation=2"),
    "two operands": (USUAL, "return self.proj(x, x)", "more than one operand"),
    "a keyword": (USUAL, "return self.proj(input=x)", "more than one operand"),
    "another self": (USUAL, "self = self.proj\nreturn self.proj(x)", "self is not the method's module"),
    "in brackets": (USUAL, "return (self.proj)(x)", "the convolution is in brackets"),
}


@pytest.mark.parametrize("name", MISSED)
def test_calls_that_are_missed(name):
    proj, body, reason = MISSED[name]
    site = assert_missed(patch_projection, module(body, proj), reason)
    assert site.target == "Layer.forward" and f"line {site.lineno}" in site.reason


@pytest.mark.parametrize(
    "line",
    [
        "self.proj = nn.Sequential(nn.Conv2d(3, 4, 2, 2), nn.GELU())",
        "proj = nn.Conv2d(3, 4, 2, 2)",
    ],
)
def test_constructions_in_another_expression_are_missed(line):
    text = module("return x").replace(f"self.proj = {USUAL}", line)
    site = assert_missed(patch_projection, text, "part of another expression here")
    assert site.target == "Layer.__init__"


#: What is a candidate only in a class that is named so, and why it is missed.
NAMED = {
    "nn.Conv2d(3, 4, kernel_size=patch_size, stride=flag)": "stride is flag, its kernel patch_size",
    "nn.Conv2d(3, 4, 3, padding=1)": "stride is 1, its kernel 3",
    "nn.Conv2d(*[3, 4, 2])": "kernel is not written at the call",
    "nn.Conv2d(3, 4, **dict(kernel_size=2, stride=2))": "kernel is not written at the call",
    "nn.Sequential(nn.Conv2d(3, 4, 3, 2))": "stride is 2, its kernel 3",
}


@pytest.mark.parametrize("proj", NAMED)
def test_convolutions_of_classes_that_are_named_so_count(proj):
    text = module(proj=proj)
    assert sites(text) == []
    assert_missed(patch_projection, text.replace("class Layer", "class SomePatchEmbeddings"), NAMED[proj])


@pytest.mark.parametrize(
    "proj",
    [
        "nn.Conv2d(3, 4, 1, 1)",
        "nn.Conv2d(3, 4, patch_size)",
        "nn.ConvTranspose2d(3, 4, 2, 2)",
    ],
)
def test_no_candidates(proj):
    own = "class Own(nn.Conv2d):\n    pass\n\nclass Layer"
    assert sites(module(proj=proj).replace("class Layer", own)) == []


@part_changes
def test_a_convolution_whose_call_matters_is_called(change, reason):
    backend, why = outcome_of(module(), lambda layer: change(layer, "proj"), (2, 3, 4, 4))
    assert backend == "eager" and reason in why
