"""Decays of linear attention: the forms of upstream's modules, and what is near them."""

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
DECAY = "g = -self.A_log.float().exp() * F.softplus(a.float() + self.dt_bias)\n"
# Body of forward(self, x), the variant, and the call of the kernel.
ROUTED = {
    "beside": (
        "a, b = self.a_proj(x), self.b_proj(x)\nbeta = b.sigmoid()\n" + DECAY,
        "softplus_and_sigmoid",
        "beta, g = kernel(a, self.A_log, self.dt_bias, b)",
    ),
    "torch's function": (
        "a, b = self.a_proj(x), self.b_proj(x)\nbeta = torch.sigmoid(b)\n"
        "g = -(torch.exp(self.A_log.float()) * nn.functional.softplus(a.float() + self.dt_bias))\n",
        "softplus_and_sigmoid",
        "beta, g = kernel(a, self.A_log, self.dt_bias, b)",
    ),
    "a call": (
        "beta = self.b_proj(x).sigmoid()\nbeta = beta * 2.0\n"
        + DECAY.replace("a.float", "self.a_proj(x).float"),
        "softplus",
        "g = kernel(self.a_proj(x), self.A_log, self.dt_bias)",
    ),
    "the sigmoid is used": (
        "a, b = self.a_proj(x), self.b_proj(x)\nbeta = b.sigmoid()\n"
        + DECAY.replace("a.float", "(a * beta).float"),
        "softplus",
        "g = kernel(a * beta, self.A_log, self.dt_bias)",
    ),
    "another sigmoid": (
        "a, b = self.a_proj(x), self.b_proj(x)\nbeta = b.sigmoid() * 2\n" + DECAY,
        "softplus",
        "g = kernel(a, self.A_log, self.dt_bias)",
    ),
}
NEAR_MISSES = {
    "not float32": DECAY.replace("a.float()", "a"),
    "another sign": DECAY.replace("g = -", "g = "),
    "another threshold": DECAY.replace("self.dt_bias)", "self.dt_bias, threshold=10.0)"),
    "no rate in float32": DECAY.replace("self.A_log.float()", "self.A_log"),
    "a product": DECAY.replace("+ self.dt_bias", "* self.dt_bias"),
}


def module(body: str) -> str:
    setup = (
        "self.a_proj, self.b_proj = nn.Linear(5, 3), nn.Linear(5, 3)\n"
        "self.A_log, self.dt_bias = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(3))"
    )
    setup, body = (textwrap.indent(text.strip("\n"), "        ") for text in (setup, body))
    return (
        f"{HEAD}class Some(nn.Module):\n    def __init__(self):\n        super().__init__()\n{setup}\n\n"
        f"    def forward(self, x):\n{body}\n        return beta, g\n"
    )


def sites(text):
    return list(log_decay.find(ModuleView(Document(text))))


@pytest.fixture
def choose():
    before = get_choice()
    yield set_choice
    set_choice(before)


@pytest.mark.parametrize("name", ROUTED)
def test_forms(name):
    body, variant, call = ROUTED[name]
    (site,) = sites(module(body))
    assert (site.status, site.variant) == (Status.ROUTED, variant), site.reason
    assert call in in_lines(spliced(module(body), [site]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("name", ROUTED)
def test_the_guarded_path_is_the_upstream_one(name, backend, dtype, choose):
    choose(f"log_decay={backend}")
    text = module(ROUTED[name][0])
    torch.manual_seed(0)
    upstream = executed(text)["Some"]().to(dtype)
    scope = executed(text, sites(text))
    routed = scope["Some"]().to(dtype)
    routed.load_state_dict(upstream.state_dict())
    x = torch.randn(2, 4, 5).to(dtype)
    found = []
    for each in (upstream, routed):
        outputs, grads = gradients(each, [x], [True])
        found.append([*outputs, *grads, *(p.grad for p in each.parameters())])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    (slot,) = [value for name, value in scope.items() if name.startswith("veomni_log_decay")]
    assert slot.outcome(routed).backend == backend


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses(name):
    (site,) = sites(module("a = self.a_proj(x)\nbeta = x\n" + NEAR_MISSES[name]))
    assert site.status is Status.MISSED and site.reason


def test_a_softplus_alone_is_no_candidate():
    assert not sites(module("beta = x\ng = F.softplus(self.a_proj(x))"))
