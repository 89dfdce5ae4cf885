"""The npu kernels on the double of torch_npu's operators, against the reference."""

from functools import partial

import pytest
import torch
from torch import nn
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RMSNorm

from tests.kernels import declared
from tests.kernels.declared import refusal
from tests.kernels.matching import assert_matches

pytestmark = pytest.mark.usefixtures("operators")

refuses = refusal("add_rms_norm", "cast_before_weight", "npu")


def pair(variant):
    return [partial(each, eps=1e-3) for each in declared.pair("add_rms_norm", variant, "npu")]


def inputs(shape, dtype, weight_dtype=None):
    weight = (torch.rand(shape[-1]) + 0.5).to(weight_dtype or dtype)
    return [torch.randn(shape).to(dtype), torch.randn(shape).to(dtype), weight]


def test_one_operator_adds_and_normalises(called):
    assert_matches(*pair("cast_before_weight"), inputs((4, 6), torch.bfloat16))
    assert called == ["npu_add_rms_norm", "npu_rms_norm_backward"]


@pytest.mark.parametrize("wanted", [(True, True, True), (True, False, False), (False, False, True)])
def test_the_norm_alone_has_a_gradient(wanted):
    sides = [lambda *given, f=f: f(*given)[1] for f in pair("cast_before_weight")]
    assert_matches(*sides, inputs((4, 6), torch.float32), wanted)


def test_the_sum_alone_has_a_gradient(called):
    a, b, weight = inputs((4, 6), torch.float32)
    assert_matches(*(lambda a, b, f=f: f(a, b, weight)[0] for f in pair("cast_before_weight")), [a, b])
    assert called == ["npu_add_rms_norm"]


@pytest.mark.parametrize(
    "change",
    [lambda a, b, w: [a, b.bfloat16(), w], lambda a, b, w: [a, b[:1], w], lambda a, b, w: [a, b, w.half()]],
)
def test_what_does_not_fit_is_added_first(change, called):
    assert_matches(*pair("cast_before_weight"), change(*inputs((4, 6), torch.float32)))
    assert called[0] == "npu_rms_norm"


def test_refuses():
    layer = Qwen3DecoderLayer.__new__(Qwen3DecoderLayer)
    a, b, _ = inputs((4, 6), torch.float32)
    norm = Qwen3RMSNorm(6)
    assert refuses(layer, a, b, norm, Qwen3RMSNorm) is None
    assert "not the recognised class" in refuses(layer, a, b, nn.Identity(), Qwen3RMSNorm)
    assert "float64" in refuses(layer, a.double(), b.double(), norm, Qwen3RMSNorm)
    assert "does not match" in refuses(layer, a, b, Qwen3RMSNorm(3), Qwen3RMSNorm)
    norm.bias = nn.Parameter(torch.ones(6))
    assert "2 parameters" in refuses(layer, a, b, norm, Qwen3RMSNorm)
