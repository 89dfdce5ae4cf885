"""The npu kernels on the double of torch_npu's operators, against the reference."""

from functools import partial
from operator import itemgetter

import pytest
import torch
from torch import nn
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RMSNorm

from tests.kernels.contract import call_of
from tests.kernels.declared import refusal

pytestmark = pytest.mark.usefixtures("operators")

refuses = refusal("add_rms_norm", "cast_before_weight", "npu")


call = partial(call_of, "add_rms_norm", "cast_before_weight", "npu", (4, 6))


def test_one_operator_adds_and_normalises(called):
    call(torch.bfloat16).matches()
    assert called == ["npu_add_rms_norm", "npu_rms_norm_backward"]


@pytest.mark.parametrize("wanted", [(True, True, True), (True, False, False), (False, False, True)])
def test_the_norm_alone_has_a_gradient(wanted):
    call().matches(wanted, of=itemgetter(1))


def test_the_sum_alone_has_a_gradient(called):
    call().matches((True, True, False), of=itemgetter(0))
    assert called == ["npu_add_rms_norm"]


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_states": torch.Tensor.bfloat16},
        {"hidden_states": lambda b: b[:1]},
        {"weight": torch.Tensor.half},
    ],
)
def test_what_does_not_fit_is_added_first(change, called):
    call(**change).matches()
    assert called[0] == "npu_rms_norm"


def test_refuses():
    layer = Qwen3DecoderLayer.__new__(Qwen3DecoderLayer)
    a, b = torch.randn(2, 4, 6)
    norm = Qwen3RMSNorm(6)
    assert refuses(layer, a, b, norm, Qwen3RMSNorm) is None
    assert "not the recognised class" in refuses(layer, a, b, nn.Identity(), Qwen3RMSNorm)
    assert "float64" in refuses(layer, a.double(), b.double(), norm, Qwen3RMSNorm)
    assert "does not match" in refuses(layer, a, b, Qwen3RMSNorm(3), Qwen3RMSNorm)
    norm.bias = nn.Parameter(torch.ones(6))
    assert "2 parameters" in refuses(layer, a, b, norm, Qwen3RMSNorm)
