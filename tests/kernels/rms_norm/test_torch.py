from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from tests.kernels import declared
from tests.kernels.matching import assert_matches
from veomni_hook.kernels.rms_norm import reference
from veomni_hook.kernels.rms_norm import torch as kernels
from veomni_hook.kernels.rms_norm.torch import refuses, rms_norm
from veomni_hook.kernels.selection.registry import registry

EPS = 1e-5
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def upstream(hidden_states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return Qwen3RMSNorm.forward(SimpleNamespace(weight=weight, variance_epsilon=EPS), hidden_states)


def ours(hidden_states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return rms_norm(hidden_states, weight, EPS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 5, 7), (1, 1), (2, 0, 8), (129, 33), (2, 3, 4, 128)])
def test_equals_upstream(shape, dtype):
    hidden_states, weight = torch.randn(shape).to(dtype), torch.rand(shape[-1]).to(dtype)
    assert_matches(ours, upstream, [hidden_states, weight])
    assert_matches(reference_rms_norm, upstream, [hidden_states, weight])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_output_has_upstreams_bits(dtype):
    hidden_states, weight = (torch.randn(257, 96) * 3).to(dtype), torch.rand(96).to(dtype)
    assert torch.equal(ours(hidden_states, weight), upstream(hidden_states, weight))


def test_weight_inside_the_operator_would_not_have_them():
    hidden_states, weight = torch.randn(257, 96).bfloat16(), torch.rand(96).bfloat16()
    inside = torch.nn.functional.rms_norm(hidden_states, (96,), weight, EPS)
    assert not torch.equal(inside, upstream(hidden_states, weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_under_autocast(dtype):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_matches(ours, upstream, [torch.randn(5, 16).to(dtype), torch.rand(16)], tolerance=2e-2)


def test_refuses_what_upstream_computes_otherwise():
    norm = Qwen3RMSNorm(8)
    assert refuses(norm, torch.randn(2, 8), norm.weight, 1e-6) is None
    assert "float64" in refuses(norm, torch.randn(2, 8, dtype=torch.float64), norm.weight, 1e-6)
    assert "weight" in refuses(norm, torch.randn(8, 2), norm.weight, 1e-6)
    assert "weight" in refuses(norm, torch.randn(()), norm.weight, 1e-6)
    assert "Strange" in refuses(norm, torch.randn(2, 8).as_subclass(Strange), norm.weight, 1e-6)
    assert refuses(norm, torch.randn(2, 8), norm.weight, 1) is None
    assert refuses(norm, torch.randn(2, 8), norm.weight, norm.weight) == "eps is a Parameter"


class Strange(torch.Tensor):
    pass


def reference_rms_norm(hidden_states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return reference.cast_before_weight(hidden_states, weight, EPS)


OTHERS = [variant for variant, k in declared.kernels("rms_norm", "torch").items() if not k.automatic]


def test_all_other_variants_are_chosen_by_name():
    assert {*OTHERS, "cast_before_weight"} == {*registry.ops()["rms_norm"].variants}


def test_what_the_operator_does_not_take_is_computed_by_the_formula():
    for dtype in (torch.float64, torch.bfloat16):
        given = [torch.randn(5, 8).to(dtype), torch.rand(8).to(dtype)]
        assert_matches(partial(kernels.norm_of("cast_before_weight"), eps=EPS), upstream, given)


def test_refuses_activations_that_may_have_parameters():
    x, weight = torch.randn(2, 8), torch.rand(8)
    assert kernels.refuses_activation(None, x, x, weight, EPS, nn.GELU()) is None
    assert "PReLU" in kernels.refuses_activation(None, x, x, weight, EPS, nn.PReLU())
    assert "Strange" in kernels.refuses_activation(None, x.as_subclass(Strange), x, weight, EPS, nn.SiLU())
