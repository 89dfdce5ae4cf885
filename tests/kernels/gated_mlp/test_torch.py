from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers.activations import ACT2FN

from tests.kernels import declared
from tests.kernels.matching import assert_matches
from veomni_hook.kernels.gated_mlp import reference
from veomni_hook.kernels.gated_mlp.torch import clamped_silu, gated_silu, loses, refuses, refuses_others

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def upstream(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return ACT2FN["silu"](gate) * up


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 3, 7), (1,), (0, 4), (65, 130)])
def test_has_upstreams_bits(shape, dtype):
    given = [torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)]
    assert_matches(gated_silu, upstream, given, exact=True)


@pytest.mark.parametrize("wanted", [(True, False), (False, True), (False, False)])
def test_gradients_only_where_wanted(wanted):
    assert_matches(gated_silu, upstream, [torch.randn(4, 6), torch.randn(4, 6)], wanted, exact=True)


def test_strided_input():
    assert_matches(gated_silu, upstream, [torch.randn(6, 4).t(), torch.randn(4, 12)[:, ::2]], exact=True)


def test_operands_that_promote_or_broadcast():
    assert_matches(gated_silu, upstream, [torch.randn(4, 6).bfloat16(), torch.randn(4, 6)], exact=True)
    assert_matches(gated_silu, upstream, [torch.randn(4, 6), torch.randn(1, 6)], exact=True)


def test_second_derivative():
    given = [torch.randn(3, 2, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    assert torch.autograd.gradcheck(gated_silu, given)
    assert torch.autograd.gradgradcheck(gated_silu, given)


def test_keeps_one_activation_less():
    def kept(function):
        saved = []
        gate, up = torch.randn(8, 4, requires_grad=True), torch.randn(8, 4, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.data_ptr()) or t, lambda t: t):
            function(gate, up)
        return len(set(saved))

    assert (kept(gated_silu), kept(upstream)) == (2, 3)


# Small, so that a clamp in another place shows: at 7 silu hides it.
@pytest.mark.parametrize("limit", [0.5, 2.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_clamps_with_the_references_bits(limit, dtype):
    given = [(torch.randn(65, 130) * 3).to(dtype) for _ in range(2)]

    def ours(gate, up):
        return clamped_silu(gate, up, nn.functional.silu, limit)

    def expected(gate, up):
        return reference.clamped(gate, up, ACT2FN["silu"], limit)

    assert_matches(ours, expected, given, exact=True)


@pytest.mark.parametrize("name", ["silu", "swish"])
def test_takes_silu(name):
    assert refuses(nn.Module(), torch.randn(2), ACT2FN[name]) is None


def test_takes_silu_as_a_function():
    assert refuses(nn.Module(), torch.randn(2), nn.functional.silu) is None


@pytest.mark.parametrize("activation", [nn.GELU(), ACT2FN["gelu_pytorch_tanh"], nn.ReLU(), nn.Identity()])
def test_refuses_other_activations(activation):
    assert type(activation).__name__ in refuses(nn.Module(), torch.randn(2), activation)


@pytest.mark.parametrize("activation", [nn.functional.gelu, torch.sigmoid])
def test_refuses_other_functions(activation):
    assert activation.__name__ in refuses(nn.Module(), torch.randn(2), activation)


class LikeSiLU(nn.SiLU):
    pass


def test_refuses_activations_that_a_fusion_would_skip():
    hooked, replaced = nn.SiLU(), nn.SiLU()
    hooked.register_forward_hook(lambda *_: None)
    replaced.forward = torch.relu
    for activation in (hooked, replaced, nn.SiLU(inplace=True), LikeSiLU()):
        assert refuses(nn.Module(), torch.randn(2), activation)


def test_auto_leaves_training_to_upstream():
    assert loses(nn.Module(), torch.randn(2), nn.SiLU())
    with torch.no_grad():
        assert loses(nn.Module(), torch.randn(2), nn.SiLU()) is None


#: What comes after gate and up. Small limits, so that a clamp in another place shows.
OTHERS = {
    "product_float32": [functional.gelu],
    "clamped_after": [torch.sigmoid, 0.75],
    "scaled_sigmoid": [1.702, 0.5],
}


def others(variant):
    functions = declared.pair("gated_mlp", variant, "torch")
    return [lambda gate, up, f=f: f(gate, up, *OTHERS[variant]) for f in functions]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 3, 7), (0, 4), (65, 130)])
@pytest.mark.parametrize("variant", OTHERS)
def test_others_have_the_references_bits(variant, shape, dtype):
    given = [(torch.randn(shape) * 2).to(dtype) for _ in "gu"]
    assert_matches(*others(variant), given, exact=True)
    assert_matches(*others(variant), [given[0], given[1].float()], exact=True)
    assert_matches(*others(variant), [each.t() for each in given] if len(shape) == 2 else given, exact=True)


@pytest.mark.parametrize("variant", [*OTHERS, "gated_silu"])
def test_is_traced(variant):
    ours, upstream_ = others(variant) if variant in OTHERS else (gated_silu, upstream)
    torch.compiler.reset()
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    assert_matches(compiled, upstream_, [torch.randn(4, 6), torch.randn(4, 6)])


@pytest.mark.parametrize("variant", OTHERS)
def test_others_keep_gate_and_up_alone(variant):
    leaves, saved = [torch.randn(8, 4, requires_grad=True) for _ in "gu"], []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        others(variant)[0](*leaves)
    assert {each.data_ptr() for each in saved} == {each.data_ptr() for each in leaves}


def test_others_refuse_activations_that_may_have_parameters():
    assert refuses_others(None, torch.randn(2)) is None
    assert refuses_others(None, torch.randn(2), nn.GELU()) is None
    assert "PReLU" in refuses_others(None, torch.randn(2), nn.PReLU())
