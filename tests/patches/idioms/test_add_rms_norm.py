from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from tests.kernels.matching import gradients
from tests.patches.idioms.applied import executed, spliced
from veomni_hook.kernels.selection.process_choice import get_choice, set_choice
from veomni_hook.patches.code.document import Document
from veomni_hook.patches.idioms import add_rms_norm
from veomni_hook.patches.routes.view import ModuleView
from veomni_hook.patches.site import Site, Status

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
    "copied to another": (
        "h = x + h\nr = h\nh = self.norm(h)\nreturn r + self.mlp(h) + x",
        "r, h = kernel(x, h, norm.weight, norm.eps)",
    ),
    "not copied": (
        "h = x + h\ny = self.norm(h)\nreturn h + self.mlp(y)",
        "h, y = kernel(x, h, norm.weight, norm.eps)",
    ),
    "copied for nothing": (
        "s = h + x\nr = s\ny = self.norm(s)\nreturn r * s + self.mlp(y)",
        "s, y = kernel(h, x, norm.weight, norm.eps)\n        r = s",
    ),
    "the copy is normalised": (
        "h = x + h\ny = h\ny = self.norm(h)\nreturn h + self.mlp(y)",
        "h, y = kernel(x, h, norm.weight, norm.eps)",
    ),
    "the sum is used up": (
        "h = x + h\nh = self.norm(h)\nreturn self.mlp(h)",
        "h = kernel(x, h, norm.weight, norm.eps)[1]",
    ),
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
}
NORMS = {
    "SomeNorm(size)": "cast_before_weight",
    "SomeNorm(size, eps=1e-2)": "cast_before_weight",
    "SameNorm(size)": "cast_before_weight",
    "OneNorm(size)": "one_plus_weight",
}


def module(body: str, norm: str = "SomeNorm(size)") -> str:
    return NORM + LAYER.format(norm=norm) + textwrap.indent(body, "        ") + "\n"


def sites(text: str) -> list[Site]:
    return list(add_rms_norm.find(ModuleView(Document(text))))


@pytest.fixture(autouse=True)
def _references() -> Iterator[None]:
    before = get_choice()
    set_choice("add_rms_norm=reference")
    yield
    set_choice(before)


def compared(text: str, backend: str, change: Any = lambda layer: None, dtype: torch.dtype = torch.float32):
    """Check that upstream's and the patched text compute equal bits; return the slot's answer."""
    found = sites(text)
    results = []
    for scope in (executed(text), executed(text, found)):
        torch.manual_seed(0)
        layer = scope["Layer"]().to(dtype)
        change(layer)
        given = [torch.randn(2, 3, 6).to(dtype) for _ in "xh"]
        outputs, grads = gradients(layer, given, [True, True])
        results.append([*outputs, *grads, *(p.grad for p in layer.parameters())])
    for got, expected in zip(*results, strict=True):
        assert (got is None and expected is None) or torch.equal(got, expected)
    (slot,) = (value for name, value in scope.items() if name.startswith("veomni_add_rms_norm"))
    outcome = slot.outcome(layer)
    assert outcome.backend == backend, outcome
    return outcome.reason


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FORMS)
def test_every_form_is_routed_and_computes_the_same(name, dtype):
    body, said = FORMS[name]
    (site,) = sites(module(body))
    assert (site.op, site.status, site.variant, site.target) == (
        "add_rms_norm",
        Status.ROUTED,
        "cast_before_weight",
        "Layer.forward",
    ), site.reason
    assert said in spliced(module(body), [site])
    assert "SomeNorm.forward" in site.relies_on
    compared(module(body), "reference", dtype=dtype)


@pytest.mark.parametrize("norm", NORMS)
def test_the_class_of_the_norm_decides_the_formula(norm):
    text = module(FORMS["copied"][0], norm)
    (site,) = sites(text)
    assert site.variant == NORMS[norm]
    assert f":= self.norm, {norm.partition('(')[0]})" in spliced(text, [site])
    compared(text, "reference")


def test_upstreams_lines_stay_as_they_are():
    text = module(FORMS["copied"][0])
    patched = spliced(text, sites(text))
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
    (site,) = sites(module(body))
    assert site.status is Status.MISSED and reason in site.reason, site.reason


@pytest.mark.parametrize(
    ("norm", "reason"),
    [
        ("OtherNorm(size)", "OtherNorm is without_cast, which has no form with an addition"),
        ("LikeRMSNorm(size)", "LikeRMSNorm has no formula of rms_norm"),
        ("Checked(size)", "Checked checks its arguments"),
    ],
)
def test_norms_without_a_form_here(norm, reason):
    (site,) = sites(module(FORMS["copied"][0], norm))
    assert site.status is Status.MISSED and reason in site.reason


def test_one_of_two_classes_is_known_at_the_call_alone():
    text = module(FORMS["copied"][0], "SomeNorm(size)").replace(
        "self.scale = 0.5", "self.scale = 0.5\n        if size > 6:\n            self.norm = OneNorm(size)"
    )
    (site,) = sites(text)
    assert "may be one of OneNorm, SomeNorm" in site.reason


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
    assert sites(module(body)) == []


def test_a_norm_of_another_file_is_no_candidate():
    assert sites(module(FORMS["copied"][0], "nn.RMSNorm(size)")) == []
    assert sites(module(FORMS["copied"][0], "nn.Linear(size, size)")) == []


def test_a_layer_that_inherits_its_init():
    text = module(FORMS["copied"][0])
    derived = text + "\n\nclass Derived(Layer):\n" + text.partition("self.scale = 0.5\n")[2]
    assert [site.target for site in sites(derived)] == ["Layer.forward", "Derived.forward"]
    assert all(site.status is Status.ROUTED for site in sites(derived))


def _hook(layer: Any) -> None:
    layer.norm.register_forward_hook(lambda module, args, output: output * 2)


def _gradient_hook(layer: Any) -> None:
    layer.norm.register_full_backward_hook(lambda module, into, out: (into[0] * 2,))


def _forward(layer: Any) -> None:
    layer.norm.forward = lambda x: x * 3


def _subclass(layer: Any) -> None:
    layer.norm.__class__ = type("Sharded", (type(layer.norm),), {})


def _other(layer: Any) -> None:
    layer.norm = nn.Linear(6, 6)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_hook, "has hooks"),
        (_gradient_hook, "has hooks"),
        (_forward, "has its own forward"),
        (_subclass, "Sharded, not the recognised class"),
        (_other, "Linear, not the recognised class"),
    ],
)
def test_a_norm_whose_call_matters_is_called(change, reason):
    assert reason in compared(module(FORMS["copied"][0]), "eager", change)


def test_a_class_whose_forward_was_replaced_is_called():
    text = module(FORMS["copied"][0])

    def change(layer: Any) -> None:
        def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight

        type(layer.norm).forward = forward

    assert "Norm.forward, which a kernel would not call" in compared(text, "eager", change)
