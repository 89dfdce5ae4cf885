"""Decays of channels: the forms of upstream's modules, and what is near them."""

from __future__ import annotations

import textwrap

import pytest
import torch

from tests.kernels.matching import gradients
from tests.patches.idioms.applied import executed, in_lines, spliced
from veomni_hook.kernels.selection.process_choice import get_choice, set_choice
from veomni_hook.patches.code.document import Document
from veomni_hook.patches.idioms import log_decay
from veomni_hook.patches.routes.view import ModuleView
from veomni_hook.patches.site import Status

HEAD = "import torch\nimport torch.nn.functional as F\nfrom torch import nn\n"
# As in Kimi-Linear, GLM-5-Next and Bailing-Hybrid: body, shape of A_log, variant, the end of the kernel's call.
FLAT = """
shape = (*x.shape[:2], -1, 4)
a = self.a_proj(x)
g = (a.float() + self.dt_bias.float().view(1, 1, -1)).view(shape)
A_log = self.A_log.float()
rate = torch.exp(A_log)
softplus = torch.where(g > 20.0, g, torch.log(1.0 + torch.exp(g)))
return -rate * softplus
"""
BOUND = FLAT.replace("self.A_log.float()", "self.A_log.float().view(1, 1, self.heads, 1)").replace(
    "softplus = ",
    "if self.lower is not None:\n    return self.lower * torch.sigmoid(rate * g)\nsoftplus = ",
)
ROUNDED = """
shape = (*x.shape[:2], self.heads, 4)
g = self.a_proj(x).float().view(shape)
g = g + self.dt_bias.view(1, 1, self.heads, 4)
rate = self.A_log.exp().view(1, 1, self.heads, 1)
if self.safe:
    g = self.lower * torch.sigmoid(rate * g)
else:
    g = -rate * F.softplus(g)
return g.to(x.dtype)
"""
ROUTED = {
    "flat": (
        FLAT,
        "1, 1, 3, 1",
        "channels",
        "kernel(a.reshape(shape), self.A_log, self.dt_bias, None, False, None)",
    ),
    "a bound": (
        BOUND,
        "3",
        "channels",
        "kernel(a.reshape(shape), self.A_log.view(1, 1, self.heads, 1), self.dt_bias, None,"
        " self.lower is not None, self.lower)",
    ),
    "rounded": (
        ROUNDED,
        "3",
        "channels_rounded_rate",
        "kernel(self.a_proj(x).reshape(shape), self.A_log.view(1, 1, self.heads, 1), self.dt_bias, x.dtype,"
        " self.safe, self.lower)",
    ),
    "a rate in other words": (
        FLAT.replace("self.A_log.float()", "self.A_log").replace("torch.exp(A_log)", "A_log.exp()"),
        "1, 1, 3, 1",
        "channels_rounded_rate",
        "kernel(a.reshape(shape), self.A_log, self.dt_bias, None, False, None)",
    ),
    "always bounded": (
        FLAT.replace("-rate * softplus", "-5.0 * torch.sigmoid(g * rate)"),
        "1, 1, 3, 1",
        "channels",
        "kernel(a.reshape(shape), self.A_log, self.dt_bias, None, True, -5.0)",
    ),
}
NEAR_MISSES = {
    "another sign": FLAT.replace("-rate *", "rate *"),
    "another threshold": FLAT.replace("20.0", "10.0"),
    "another branch": FLAT.replace("20.0, g,", "20.0, 2 * g,"),
    "log(2 + exp)": FLAT.replace("log(1.0", "log(2.0"),
    "x is not cast": FLAT.replace("a.float()", "a"),
    "a bias for each head": FLAT.replace("view(1, 1, -1)", "view(1, -1, 1)"),
    "a rate for each channel": BOUND.replace("view(1, 1, self.heads, 1)", "view(1, 1, 1, self.heads)"),
    "no bias": FLAT.replace("a.float() + self.dt_bias.float().view(1, 1, -1)", "a.float() * self.dt_bias"),
    "a bias of another shape": FLAT.replace("view(1, 1, -1)", "view(1, 1, -1, 1)"),
    "one of two bounds": BOUND.replace("return -rate * softplus", "return -9.0 * torch.sigmoid(rate * g)"),
    "two bounds": BOUND.replace(
        "softplus = ", "if self.safe:\n    return -9.0 * torch.sigmoid(rate * g)\nsoftplus = "
    ),
    "another rate below a bound": BOUND.replace("sigmoid(rate * g)", "sigmoid(g * 2.0)"),
}


def module(body: str, shape: str = "1, 1, 3, 1") -> str:
    setup = (
        "self.heads, self.lower, self.safe = 3, lower, lower is not None\n"
        "self.a_proj, self.A_log = nn.Linear(5, 12), nn.Parameter(torch.randn(" + shape + "))\n"
        "self.dt_bias = nn.Parameter(torch.randn(12))"
    )
    setup, body = (textwrap.indent(text.strip("\n"), "        ") for text in (setup, body))
    return (
        f"{HEAD}class Some(nn.Module):\n    def __init__(self, lower=None):\n        super().__init__()\n{setup}\n\n"
        f"    def forward(self, x):\n{body}\n"
    )


def sites(text):
    return list(log_decay.find(ModuleView(Document(text))))


@pytest.fixture
def choose():
    before = get_choice()
    yield set_choice
    set_choice(before)


def built(scope, *, lower=None, dtype=torch.float32):
    torch.manual_seed(0)
    return scope["Some"](lower).to(dtype)


@pytest.mark.parametrize("name", ROUTED)
def test_forms(name):
    body, shape, variant, call = ROUTED[name]
    text = module(body, shape)
    (site,) = sites(text)
    assert (site.status, site.variant) == (Status.ROUTED, variant), site.reason
    assert f"return {call}" in in_lines(spliced(text, [site]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("lower", [None, -5.0])
@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("name", ROUTED)
def test_the_guarded_path_is_the_upstream_one(name, backend, lower, dtype, choose):
    choose(f"log_decay={backend}")
    text = module(*ROUTED[name][:2])
    scope = executed(text, sites(text))
    upstream, routed = built(executed(text), lower=lower, dtype=dtype), built(scope, lower=lower, dtype=dtype)
    x = torch.randn(2, 4, 5).to(dtype)
    found = []
    for each in (upstream, routed):
        outputs, grads = gradients(each, [x], [True])
        found.append([*outputs, *grads, *(p.grad for p in each.parameters())])
    # The logarithm of 1 + exp(g) rounds more than torch's softplus.
    exact = (
        "where" not in text or "sigmoid(g * rate)" in text or ("is not None:" in text and lower is not None)
    )
    for one, other in zip(*found, strict=True):
        assert one.dtype == other.dtype
        if exact:
            assert torch.equal(one, other)
        else:
            torch.testing.assert_close(one, other, rtol=1e-5 if dtype is torch.float32 else 2e-2, atol=2e-6)
    (slot,) = [value for key, value in scope.items() if key.startswith("veomni_log_decay")]
    assert slot.outcome(routed).backend == backend


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses(name):
    (site,) = sites(module(NEAR_MISSES[name]))
    assert site.status is Status.MISSED and site.reason


def test_a_bound_that_is_no_number_is_upstreams(choose):
    choose("log_decay=reference")
    text = module(ROUNDED, "3")
    scope = executed(text, sites(text))
    model = built(scope, lower=-5.0)
    model.lower = None
    with pytest.raises(TypeError):
        model(torch.randn(2, 4, 5))
    model.lower = nn_parameter = torch.nn.Parameter(torch.tensor(-5.0))
    model(torch.randn(2, 4, 5)).sum().backward()
    assert nn_parameter.grad is not None


def test_other_methods_are_no_candidates():
    text = module(FLAT).replace("def forward", "def weights")
    assert not sites(text) and not sites(module(FLAT).replace("dt_bias", "bias"))
