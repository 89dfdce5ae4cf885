"""The kernels in PyTorch: its operator for two formulas; the others are recomputed."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from tests.kernels.batches import assert_batch_invariant
from tests.kernels.layer_norm.variants import DTYPES, EPS, UPSTREAM, inputs
from tests.kernels.layer_norm.variants import pair as pair_of
from tests.kernels.matching import assert_matches
from veomni_hook.kernels.layer_norm import torch as kernels

OPERATOR = ["weight_before_cast", "unweighted"]
pair = partial(pair_of, "torch")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 5, 7), (2, 0, 8), (129, 33), (2, 3, 4, 128)], ids=str)
@pytest.mark.parametrize("variant", UPSTREAM)
def test_equals_the_reference(variant, shape, dtype):
    assert_matches(*pair(variant, shape[-1]), inputs(variant, shape, dtype), exact=variant not in OPERATOR)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("variant", OPERATOR)
def test_the_operator_rounds_where_upstream_rounds(variant, dtype):
    ours, upstream = pair(variant, 96)
    given = inputs(variant, (257, 96), dtype)
    other = ours(*given) != upstream(*given)
    assert other.float().mean() < 0.01


@pytest.mark.parametrize("variant", OPERATOR)
def test_autocast_changes_no_dtype(variant, monkeypatch):
    ours, upstream = pair(variant, 16)
    operator = torch.nn.functional.layer_norm

    def as_on_a_gpu(x, shape, weight, *others):
        return operator(x.float(), shape, None if weight is None else weight.float(), *others)

    given = inputs(variant, (5, 16), torch.bfloat16)
    expected = upstream(*given)
    monkeypatch.setattr(torch.nn.functional, "layer_norm", as_on_a_gpu)
    assert ours(*given).dtype is expected.dtype


@pytest.mark.parametrize("variant", OPERATOR)
def test_equal_bits_for_a_row_in_any_batch(variant):
    x, *parameters = inputs(variant, (64, 130), torch.float32)
    assert_batch_invariant(pair(variant, 130)[0], [x], parameters)


@pytest.mark.parametrize("variant", UPSTREAM)
def test_compiles_without_a_break(variant):
    ours, upstream = pair(variant, 48)
    torch.compiler.reset()
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    assert_matches(compiled, upstream, inputs(variant, (5, 48), torch.float32))


@pytest.mark.parametrize(
    ("weight", "reason"),
    [
        (torch.rand(3, 8), "one weight for all groups"),
        (torch.rand(8).bfloat16(), "the weight has dtype torch.bfloat16"),
        (torch.rand(7), "does not match"),
    ],
)
def test_refuses(weight, reason):
    rule = kernels.refuses("weight_before_cast")
    assert rule(None, torch.randn(2, 3, 8), torch.rand(8), EPS) is None
    assert reason in rule(None, torch.randn(2, 3, 8), weight, EPS)
