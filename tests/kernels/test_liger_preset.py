"""A patched model trained under the preset ``liger``: what one of its kernels returns, the next must take."""

import dataclasses

import pytest
import torch

from tests.kernels.matching import DEVICE, close
from tests.kernels.patched_qwen3 import batch, pair
from veomni_hook.kernels.selection.declaration import Requirement
from veomni_hook.kernels.selection.process_choice import set_choice
from veomni_hook.kernels.selection.registry import registry
from veomni_hook.tools.report.explanation import explain

pytest.importorskip("triton")
pytest.importorskip("liger_kernel")

#: What Liger computes on a CPU; its addition with norm and its gated MLP do not run in the interpreter.
CHOICE = "liger" if DEVICE == "cuda" else "liger,add_rms_norm=eager,gated_mlp=eager"


class NormOfRows(torch.autograd.Function):
    """Liger's RMSNorm as autograd sees it: the result is a view, made inside, of a matrix of rows."""

    @staticmethod
    def forward(ctx, x, weight, eps, *options):
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return norm(x.reshape(-1, x.shape[-1]), weight, eps).view(x.shape)

    @staticmethod
    def backward(ctx, dy):
        leaves = [each.detach().requires_grad_() for each in ctx.saved_tensors]
        with torch.enable_grad():
            y = norm(*leaves, ctx.eps)
        return (*torch.autograd.grad(y, leaves, dy), *[None] * 4)


def norm(x, weight, eps):
    return weight * (x * (x.square().mean(-1, keepdim=True) + eps).rsqrt())


@pytest.fixture(autouse=True)
def anywhere(monkeypatch):
    """Lets Liger's kernels run on the CPU, and stands in for its RMSNorm, which the interpreter cannot run."""
    if DEVICE == "cuda":
        yield
        return
    monkeypatch.setattr("veomni_hook.kernels.rms_norm.liger.LigerRMSNormFunction", NormOfRows)
    with registry.restored():
        for kernel in registry.kernels():
            if kernel.backend == "liger":
                registry.replace(dataclasses.replace(kernel, requires=Requirement(triton=True)))
        yield


def test_a_model_with_norms_of_queries_and_keys_trains(patched):
    upstream, model = (each.to(DEVICE) for each in pair(patched, num_hidden_layers=1))
    inputs = {name: each.to(DEVICE) for name, each in batch(1, 6).items()}
    set_choice(CHOICE)
    found = []
    for each in (model, upstream):
        loss = each(**inputs, use_cache=False).loss
        loss.backward()
        found.append([loss.detach(), *(parameter.grad for parameter in each.parameters())])
    ran = {row.op for row in explain(model).rows if row.backend == "liger"}
    assert ran >= {"rms_norm", "rotary"}
    close(*found, 1e-4)
