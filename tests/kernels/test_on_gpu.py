"""Every torch kernel on a CUDA device against upstream: outputs and gradients."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

from tests.kernels.batches import assert_batch_invariant
from veomni_hook.kernels.gated_mlp.torch import gated_silu
from veomni_hook.kernels.linear_cross_entropy import torch as chunked
from veomni_hook.kernels.registry import load_attribute, registry
from veomni_hook.kernels.rms_norm.torch import rms_norm
from veomni_hook.kernels.rotary.torch import rotary

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
# ||ours - upstream|| / ||upstream||: both round, differently.
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def compare(ours, upstream, inputs, dtype):
    results = []
    for function in (ours, upstream):
        leaves = [tensor.clone().requires_grad_() for tensor in inputs]
        outputs = function(*leaves)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        torch.manual_seed(1)
        torch.autograd.backward(outputs, [torch.randn_like(output) for output in outputs])
        results.append([*outputs, *(leaf.grad for leaf in leaves)])
    for got, expected in zip(*results, strict=True):
        assert got.dtype is expected.dtype
        error = (got.double() - expected.double()).norm() / expected.double().norm()
        assert error < CLOSE[dtype], error


def random(*shape, dtype):
    return torch.randn(shape, device="cuda").to(dtype)


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
def test_elementwise_kernels(dtype):
    norm = Qwen3RMSNorm.forward
    compare(
        partial(rms_norm, eps=1e-6),
        lambda x, weight: norm(SimpleNamespace(weight=weight, variance_epsilon=1e-6), x),
        [random(3, 37, 130, dtype=dtype), random(130, dtype=dtype)],
        dtype,
    )
    cos, sin = random(1, 37, 64, dtype=dtype), random(1, 37, 64, dtype=dtype)
    given = [random(2, 37, heads, 64, dtype=dtype).transpose(1, 2) for heads in (6, 3)]
    compare(partial(rotary, cos=cos, sin=sin), partial(apply_rotary_pos_emb, cos=cos, sin=sin), given, dtype)
    compare(
        gated_silu,
        lambda gate, up: functional.silu(gate) * up,
        [random(3, 37, 130, dtype=dtype) for _ in "gu"],
        dtype,
    )


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("rows_a_chunk", [16, 1000], ids=["chunks", "one chunk"])
@pytest.mark.parametrize("in_float32", [True, False])
def test_linear_cross_entropy(dtype, rows_a_chunk, in_float32, monkeypatch):
    monkeypatch.setattr(chunked, "CHUNK_ROWS", rows_a_chunk)
    monkeypatch.setattr(chunked, "CHUNK_LOGITS_GPU", 0)
    monkeypatch.setattr(chunked, "ADDS_IN_FLOAT32", in_float32 and chunked.ADDS_IN_FLOAT32)
    target = torch.randint(0, 501, (130,), device="cuda")
    target[::5] = -100

    def upstream(x, weight, bias):
        return ForCausalLMLoss(functional.linear(x, weight, bias)[None], None, 501, shift_labels=target[None])

    compare(
        lambda x, weight, bias: chunked.linear_cross_entropy(x, weight, bias, target),
        upstream,
        [random(130, 64, dtype=dtype), random(501, 64, dtype=dtype), random(501, dtype=dtype)],
        dtype,
    )


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("columns", [128, 130, 2560, 4096, 12288])
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_normalised_row_has_the_same_bits_in_any_batch(backend, columns, dtype):
    pytest.importorskip("triton")
    for kernel in registry.kernels("rms_norm"):
        if kernel.backend != backend:
            continue
        rows, further = 1 + ("gate" in kernel.variant), {"eps": 1e-6}
        if kernel.variant.endswith("_gated"):
            further["activation"] = functional.silu
        if kernel.variant.endswith("_grouped"):
            further["group_size"] = columns // 2
        weighted = "unweighted" not in kernel.variant and kernel.variant != "inverse_rms"
        weights = [random(columns, dtype=dtype)] if weighted else []
        given = [random(1000, columns, dtype=dtype) for _ in range(rows)]
        assert_batch_invariant(partial(load_attribute(kernel.load), **further), given, weights)


def test_rms_norm_past_two_to_the_31_elements():
    fused = pytest.importorskip("veomni_hook.kernels.rms_norm.triton")
    rows, columns = 2**31 // 4096 + 3, 4096
    x = torch.randn(1, columns, device="cuda", dtype=torch.bfloat16).expand(rows, columns).contiguous()
    x[-1].mul_(2).add_(1)
    x.requires_grad_()
    weight = torch.rand(columns, device="cuda", dtype=torch.bfloat16)
    y = fused.cast_before_weight(x, weight, 1e-6)
    y.backward(torch.ones_like(y))
    last = x.detach()[-1:].clone().requires_grad_()
    expected = fused.cast_before_weight(last, weight, 1e-6)
    expected.backward(torch.ones_like(expected))
    assert torch.equal(y[-1:], expected) and torch.equal(x.grad[-1:], last.grad)
    assert torch.equal(y[0], y[-2]) and torch.equal(x.grad[0], x.grad[-2])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_rms_norm_on_another_device_than_the_current_one():
    fused = pytest.importorskip("veomni_hook.kernels.rms_norm.triton")
    results = []
    for place in ("cuda:0", "cuda:1"):
        torch.manual_seed(0)
        x = torch.randn(64, 512).to(place).requires_grad_()
        weight = torch.rand(512).to(place).requires_grad_()
        y = fused.cast_before_weight(x, weight, 1e-6)
        y.square().sum().backward()
        assert torch.cuda.current_device() == 0
        results.append([tensor.cpu() for tensor in (y, x.grad, weight.grad)])
    torch.testing.assert_close(*results)
