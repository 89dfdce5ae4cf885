"""The npu kernels on the double of torch_npu's operators, against the reference."""

import pytest
import torch

from tests.kernels.matching import assert_matches
from veomni_hook.kernels.moe_router import npu, reference

pytestmark = pytest.mark.usefixtures("operators")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
KINDS = {
    "softmax": ("softmax_topk", (False,)),
    "normalised": ("softmax_topk", (True,)),
    "topk": ("topk_softmax", ()),
}


def apart(tokens, experts, dtype):
    """Logits that differ in every dtype: no ties."""
    return (torch.rand(tokens, experts).argsort(-1) / experts - 0.5).to(dtype) * 4


def weighed(module, kind, top_k):
    """The weights at the place of each expert: one tensor says both."""
    name, others = KINDS[kind]

    def dense(logits):
        weights, indices = getattr(module, name)(logits, top_k, *others)
        assert indices.dtype is torch.int64
        return torch.zeros_like(logits, dtype=weights.dtype).scatter(-1, indices, weights)

    return dense


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "sizes", [(37, 8, 2), (3, 60, 4), (1, 4, 4), (5, 8, 3), (0, 8, 2), (2, 512, 32)], ids=str
)
def test_equals_the_reference(kind, dtype, sizes, called):
    tokens, experts, top_k = sizes
    sides = [weighed(module, kind, top_k) for module in (npu, reference)]
    assert_matches(
        *sides, [apart(tokens, experts, dtype)], tolerance=3e-2 if dtype is torch.bfloat16 else None
    )
    assert called == ["npu_moe_gating_top_k_softmax"] * (tokens > 0)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_may_be_written_to(kind):
    logits = apart(5, 8, torch.float32).requires_grad_()
    name, others = KINDS[kind]
    found = []
    for module in (npu, reference):
        weights, _ = getattr(module, name)(logits, 3, *others)
        weights = weights.clone() if module is reference else weights
        weights.mul_(2)
        found.append(torch.autograd.grad(weights.square().sum(), logits)[0])
    torch.testing.assert_close(*found)


def test_strides():
    logits = apart(6, 8, torch.float32)
    assert_matches(
        weighed(npu, "normalised", 2), weighed(reference, "normalised", 2), [logits.t().contiguous().t()]
    )


@pytest.mark.parametrize("kind", KINDS)
def test_compiles_without_a_break(kind):
    torch.compiler.reset()
    ours = torch.compile(weighed(npu, kind, 2), backend="aot_eager", fullgraph=True)
    assert_matches(ours, weighed(reference, kind, 2), [apart(5, 8, torch.float32)])


def test_the_operator_keeps_its_contract():
    torch.library.opcheck(torch.ops.veomni_hook.npu_softmax_topk.default, (torch.randn(4, 6), 2))


def test_more_than_the_operator_takes_is_computed_by_the_formula(called):
    assert_matches(
        weighed(npu, "softmax", 1025), weighed(reference, "softmax", 1025), [apart(2, 1100, torch.float32)]
    )
    assert not called


def test_refuses():
    logits = torch.randn(3, 8)
    assert npu.refuses(None, logits, 2, True) is None
    assert "float64" in npu.refuses(None, logits.double())
    assert "num_experts" in npu.refuses(None, logits[None])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert "autocast" in npu.refuses_in_autocast(None, logits.bfloat16())
        assert npu.refuses(None, logits.bfloat16()) is None
