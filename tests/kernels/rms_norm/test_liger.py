"""Liger's RMSNorm, where it is installed, on a GPU."""

import pytest
import torch

from tests.kernels.matching import DEVICE, close
from veomni_hook.kernels.rms_norm import reference
from veomni_hook.kernels.selection.registry import load_attribute, registry

pytest.importorskip("triton")
pytest.importorskip("liger_kernel")

VARIANTS = [kernel for kernel in registry.kernels("rms_norm") if kernel.backend == "liger"]


@pytest.mark.skipif(DEVICE == "cpu", reason="this kernel of Liger does not run in the interpreter")
@pytest.mark.parametrize("kernel", VARIANTS, ids=lambda kernel: kernel.variant)
def test_equals_the_reference_and_keeps_the_gradient_that_arrives(kernel):
    x, dy = torch.randn(2, 5, 7, 32, device=DEVICE)
    weight, found = torch.rand(32, device=DEVICE), []
    for function in (load_attribute(kernel.load), getattr(reference, kernel.variant)):
        leaves, incoming = [each.clone().requires_grad_() for each in (x, weight)], dy.clone()
        y = function(*leaves, 1e-6)
        found.append([y, *torch.autograd.grad(y, leaves, incoming)])
        assert torch.equal(incoming, dy)
    close(*found, 1e-5)
