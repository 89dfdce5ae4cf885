"""Hyper-connections: what is routed, what is missed, and that it computes what transformers' classes do."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as upstream

from tests.kernels.matching import gradients
from tests.patches.idioms.applied import executed, spliced
from veomni_hook.kernels.selection.process_choice import get_choice, set_choice
from veomni_hook.patches.code.document import Document
from veomni_hook.patches.idioms.hyper_connection import find, mixed
from veomni_hook.patches.routes.view import ModuleView
from veomni_hook.patches.site import Site, Status

HEAD = "import torch\nimport torch.nn.functional as F\nfrom torch import nn\n\n\n"
CONFIG = SimpleNamespace(hc_mult=4, hc_sinkhorn_iters=3, hc_eps=1e-3, hidden_size=10, rms_norm_eps=1e-5)
NORM = upstream.DeepseekV4UnweightedRMSNorm
LAYER = """
class Layer(nn.Module):
    def forward(self, x, output, post, comb):
        dtype = x.dtype
        _, _ = self.attn_hc(x)
        return post.to(dtype).unsqueeze(-1) * output.unsqueeze(-2) + torch.matmul(
            comb.to(dtype).transpose(-1, -2), x
        )

    def attn_hc(self, x):
        return x, x
"""
VIEWED = "flattened = hidden_streams.view(batch_size, seq_len, -1).float()"


@pytest.fixture(autouse=True)
def _by_name() -> Any:
    before = str(get_choice())
    set_choice("hyper_connection=torch")
    yield
    set_choice(before)


def text_of(*classes: type) -> str:
    """Transformers' own code of these classes, unpatched."""
    return HEAD + "\n\n".join(inspect.getsource(each) for each in classes)


def sites(text: str, idiom: Any = find) -> list[Site]:
    return list(idiom.find(ModuleView(Document(text, "transformers.models.a.modeling_a"))))


def made(scope: dict[str, Any], name: str) -> nn.Module:
    torch.manual_seed(3)
    module: nn.Module = scope[name](CONFIG)
    for each in module.parameters():
        nn.init.normal_(each, std=0.3)
    return module


def compared(text: str, name: str) -> Any:
    """Outputs and gradients are equal with the routes and without; returns the patched module, and its slot."""
    results = []
    for routed in ([], [each for each in sites(text) if each.status is Status.ROUTED]):
        scope = executed(text, routed)
        module = made(scope, name)
        torch.manual_seed(4)
        outputs, grads = gradients(module, [torch.randn(2, 3, 4, 10)], [True])
        results.append([*outputs, *grads, *(each.grad for each in module.parameters())])
    assert all(map(torch.equal, *results))
    return module, next(value for key, value in scope.items() if key.startswith("veomni_hyper"))


CONNECTION = text_of(NORM, upstream.DeepseekV4HyperConnection)
FORMS = {
    "of views": (CONNECTION, "DeepseekV4HyperConnection", "sinkhorn"),
    "of flatten": (
        CONNECTION.replace(VIEWED, "flattened = hidden_streams.flatten(start_dim=2).float()"),
        "DeepseekV4HyperConnection",
        "sinkhorn",
    ),
    "of a sum": (text_of(NORM, upstream.DeepseekV4HyperHead), "DeepseekV4HyperHead", "collapse"),
}


@pytest.mark.parametrize("name", FORMS)
def test_transformers_classes_are_routed_and_compute_the_same(name):
    text, owner, variant = FORMS[name]
    (site,) = sites(text)
    assert (site.status, site.variant, site.part, site.target) == (
        Status.ROUTED, variant, "weights", f"{owner}.forward",
    ), site.reason  # fmt: skip
    module, slot = compared(text, owner)
    assert slot.outcome(module) == ("torch", "chosen")


def test_other_norms_run_as_they_are():
    text, owner, _ = FORMS["of views"]
    module, slot = compared(text, owner)
    module.input_norm.forward = lambda x: x * 2
    x = torch.randn(1, 2, 4, 10)
    assert torch.equal(module(x)[1], made_with_doubled_norm(text, owner)(x)[1])
    assert slot.outcome(module)[0] == "eager"


def made_with_doubled_norm(text: str, owner: str) -> nn.Module:
    module = made(executed(text), owner)
    module.input_norm.forward = lambda x: x * 2  # type: ignore[assignment]
    return module


MISSED = {
    "another weight": ("post = 2 * torch.sigmoid", "post = 3 * torch.sigmoid", "nearest is sinkhorn"),
    "rows first": ("comb.sum(dim=-2, keepdim=True)", "comb.sum(dim=-1, keepdim=True)", "nearest is sinkhorn"),
    "another norm": ("x.float().square().mean(-1", "x.float().abs().mean(-1", "not an RMSNorm without weight"),
    "eps under a root": ("self.eps = eps", "self.eps = eps\n        self.e = eps", ""),
    "a norm from elsewhere": (
        "DeepseekV4UnweightedRMSNorm(eps=config.rms_norm_eps)", "nn.Identity()", "one class of the file",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISSED)
def test_forms_that_are_missed(name):
    old, new, reason = MISSED[name]
    assert old in CONNECTION
    (site,) = sites(CONNECTION.replace(old, new))
    assert (site.status is Status.ROUTED) == (not reason) and reason in site.reason


def test_mixed_streams_are_routed_and_compute_the_same():
    (site,) = sites(HEAD + LAYER, mixed)
    assert (site.status, site.variant, site.part) == (Status.ROUTED, "mix", "mix"), site.reason
    assert (
        "if (kernel := veomni_hyper_connection_mix.kernel(self, post, comb, output, x, dtype)) is not None"
        in (spliced(HEAD + LAYER, [site]))
    )
    given = torch.randn(1, 2, 4, 6), torch.randn(1, 2, 6), torch.randn(1, 2, 4), torch.randn(1, 2, 4, 4)
    results = []
    for routed in ([], [site]):
        scope = executed(HEAD + LAYER, routed)
        layer = scope["Layer"]()
        outputs, grads = gradients(layer, given, [True] * 4)
        results.append([*outputs, *grads])
    assert all(map(torch.equal, *results))
    assert scope["veomni_hyper_connection_mix"].outcome(layer) == ("torch", "chosen")


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("transpose(-1, -2), x", "transpose(-1, -2), output", ""),
        ("comb.to(dtype).transpose(-1, -2)", "comb.to(dtype)", "nothing has the form"),
        ("dtype = x.dtype", "dtype = x.dtype\n        torch = F", "torch has another name"),
    ],
)
def test_other_mixtures(old, new, reason):
    assert old in LAYER
    (site,) = sites(HEAD + LAYER.replace(old, new), mixed)
    assert (site.status is Status.ROUTED) == (not reason) and reason in site.reason
