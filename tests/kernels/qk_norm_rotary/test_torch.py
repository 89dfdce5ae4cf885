from __future__ import annotations

import pytest
import torch

from tests.kernels import declared
from tests.kernels.matching import assert_matches
from veomni_hook.kernels.qk_norm_rotary.variants import OP


def operands(variant, dtype=torch.float32, weight=None, table=None, length=3):
    """q, k ``[batch, heads, length, head_dim]`` as projections give them, weights, cos and sin."""
    made = [torch.randn(2, length, heads, 16).transpose(1, 2).to(dtype) for heads in (4, 2)]
    made += [(torch.rand(16) + 0.5).to(weight or dtype) for _ in "qk"]
    width = 8 if variant.endswith("partial") else 16
    return made, [torch.randn(1, length, width).to(table or dtype) for _ in "cs"]


def sides(variant, tables):
    functions = declared.pair("qk_norm_rotary", variant, "torch")
    return [lambda *given, f=f: f(*given, 1e-3, 1e-5, *tables) for f in functions]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("further", [{}, {"weight": torch.float32}, {"table": torch.float32}, {"length": 0}])
@pytest.mark.parametrize("variant", OP.variants)
def test_equals_the_reference(variant, further, dtype):
    given, tables = operands(variant, dtype, **further)
    assert_matches(*sides(variant, tables), given)


@pytest.mark.sample(2)
@pytest.mark.parametrize("variant", OP.variants)
def test_is_traced(variant):
    given, tables = operands(variant)
    ours, upstream = sides(variant, tables)
    torch.compiler.reset()
    assert_matches(torch.compile(ours, backend="aot_eager", fullgraph=True), upstream, given)
