"""Kernels give a value at its limit the gradient that this release of torch gives it."""

import pytest
import torch

from veomni_hook.kernels.shared.clamped import AT_LIMIT


@pytest.mark.parametrize(
    "clamp", [lambda x: x.clamp(max=2.0), lambda x: x.clamp(min=2.0), lambda x: x.clamp(1, 2)]
)
def test_a_value_at_its_limit(clamp):
    x = torch.full((3,), 2.0, requires_grad=True)
    (dx,) = torch.autograd.grad(clamp(x).sum(), x)
    assert dx.tolist() == [float(AT_LIMIT)] * 3
