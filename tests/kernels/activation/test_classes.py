"""The classes of ``transformers.activations``, patched: outputs and gradients are upstream's."""

from __future__ import annotations

import pytest
import torch
from transformers import activations as upstream

from tests.kernels.matching import DEVICE, close
from tests.kernels.patched_qwen3 import load
from veomni_hook.kernels.selection.process_choice import set_choice
from veomni_hook.kernels.shared.activations import FUNCTIONS, name_of
from veomni_hook.tools.report.explanation import explain

pytest.importorskip("triton")

pytestmark = pytest.mark.usefixtures("anywhere")

CLASSES = {
    "NewGELUActivation": "gelu_tanh_cubed",
    "FastGELUActivation": "gelu_tanh_factored",
    "QuickGELUActivation": "quick_gelu",
    "ReLUSquaredActivation": "relu_squared",
}


@pytest.fixture(scope="module")
def patched(tmp_path_factory):
    return load(tmp_path_factory.mktemp("activations"), upstream.__name__)


def both_ways(activation, x):
    x = x.clone().requires_grad_()
    y = activation(x)
    (dx,) = torch.autograd.grad(y, x, torch.linspace(-1, 1, y.numel(), device=y.device).view(y.shape).to(y))
    return y, dx


@pytest.mark.parametrize(("name", "variant"), CLASSES.items())
def test_a_class_computes_what_upstreams_does_by_a_kernel(patched, name, variant):
    set_choice("auto")
    torch.manual_seed(0)
    x = torch.cat((torch.randn(3, 500).mul(3), torch.tensor([[0.0, -0.0, 30.0, -30.0, 1e3] * 100]))).to(
        DEVICE
    )
    ours, theirs = getattr(patched, name)(), getattr(upstream, name)()
    for found, truth in zip(both_ways(ours, x), both_ways(theirs, x), strict=True):
        close(found, truth, 1e-5)
    (row,) = explain(ours).rows
    assert (row.op, row.variant, row.backend) == ("activation", variant, "triton")
    assert torch.equal(FUNCTIONS[variant](x), theirs(x)) and name_of(theirs) == variant


@pytest.mark.skipif(DEVICE == "cpu", reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("name", CLASSES)
def test_results_have_upstreams_dtype_and_rounding_also_under_autocast(patched, name):
    set_choice("auto")
    x = torch.randn(64, 4096, device=DEVICE, dtype=torch.bfloat16).mul(3)
    ours, theirs = getattr(patched, name)(), getattr(upstream, name)()
    for enabled in (False, True):
        with torch.autocast("cuda", torch.bfloat16, enabled=enabled):
            (y, dx), (truth, of_truth) = both_ways(ours, x), both_ways(theirs, x)
        assert y.dtype is truth.dtype
        # A value of tanh between two numbers of 16 bits is that of many inputs.
        assert (y != truth).float().mean() < (1.0 if y.dtype is torch.float32 else 1e-2)
        close(y, truth, 1e-6 if y.dtype is torch.float32 else 4e-3)
        close(dx, of_truth, 1e-2)
