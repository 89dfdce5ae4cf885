"""Hyper-connections: what is routed, what is missed, and that it computes what transformers' classes do."""

import inspect
from types import SimpleNamespace

import pytest
from torch import nn

from tests.patches.idioms.applied import IMPORTS, changed, compared, sites_of, spliced
from veomni_hook.kernels.selection.process_choice import set_choice
from veomni_hook.patches.idioms.hyper_connection import find, mixed
from veomni_hook.patches.site import Status

upstream = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4", reason="new in 5.9")
HEAD = f"{IMPORTS}\n\n"
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
def _by_name():
    set_choice("hyper_connection=torch")


def text_of(*classes):
    """Transformers' own code of these classes, unpatched."""
    return HEAD + "\n\n".join(inspect.getsource(each) for each in classes)


def sites(text, idiom=find):
    return sites_of(idiom, text, "transformers.models.a.modeling_a")


def outcome_of(text, owner, change=lambda module: None):
    def prepared(module):
        for each in module.parameters():
            nn.init.normal_(each, std=0.3)
        change(module)

    routed = [each for each in sites(text) if each.status is Status.ROUTED]
    return compared(text, routed, owner, [(2, 3, 4, 10)], arguments=(CONFIG,), change=prepared)[
        "hyper_connection"
    ]


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
    assert outcome_of(text, owner) == ("torch", "chosen")


def test_other_norms_run_as_they_are():
    def doubled(module):
        module.input_norm.forward = lambda x: x * 2

    assert outcome_of(*FORMS["of views"][:2], doubled).backend == "eager"


MISSED = {
    "another weight": ("post = 2 * torch.sigmoid", "post = 3 * torch.sigmoid", "nearest is sinkhorn"),
    "another norm": ("x.float().square().mean(-1", "x.float().abs().mean(-1", "not an RMSNorm without weight"),
    "eps under a root": ("self.eps = eps", "self.eps = eps\n        self.e = eps", ""),
    "a norm from elsewhere": (
        "DeepseekV4UnweightedRMSNorm(eps=config.rms_norm_eps)", "nn.Identity()", "one class of the file",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISSED)
def test_forms_that_are_missed(name):
    old, new, reason = MISSED[name]
    (site,) = sites(changed(CONNECTION, (old, new)))
    assert (site.status is Status.ROUTED) == (not reason) and reason in site.reason


def test_mixed_streams_are_routed_and_compute_the_same():
    (site,) = sites(HEAD + LAYER, mixed)
    assert (site.status, site.variant, site.part) == (Status.ROUTED, "mix", "mix"), site.reason
    assert (
        "if (kernel := veomni_hyper_connection_mix.kernel(self, post, comb, output, x, dtype)) is not None"
        in (spliced(HEAD + LAYER, [site]))
    )
    shapes = (1, 2, 4, 6), (1, 2, 6), (1, 2, 4), (1, 2, 4, 4)
    outcomes = compared(HEAD + LAYER, [site], "Layer", shapes)
    assert outcomes["hyper_connection"] == ("torch", "chosen")


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("transpose(-1, -2), x", "transpose(-1, -2), output", ""),
        ("comb.to(dtype).transpose(-1, -2)", "comb.to(dtype)", "nothing has the form"),
        ("dtype = x.dtype", "dtype = x.dtype\n        torch = F", "torch has another name"),
        ("dtype = x.dtype", "dtype = x.dtype\n        self = self.inner", "self is not the method's module"),
    ],
)
def test_other_mixtures(old, new, reason):
    (site,) = sites(HEAD + changed(LAYER, (old, new)), mixed)
    assert (site.status is Status.ROUTED) == (not reason) and reason in site.reason
