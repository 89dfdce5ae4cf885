from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import activations as upstream
from transformers.activations import ACT2FN

from veomni_hook.kernels.shared.activations import FUNCTIONS, name_of, unknown, widened

KNOWN = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu",
    "relu2": "relu_squared", "sigmoid": "sigmoid", "quick_gelu": "quick_gelu", "gelu_new": "gelu_tanh_cubed",
    "gelu_fast": "gelu_tanh_factored",
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ACT2FN)
def test_a_name_means_the_same_bits(name, dtype):
    if name == "xielu":
        pytest.skip("has parameters of its own")
    activation = ACT2FN[name]
    found = name_of(activation)
    assert found == KNOWN.get(name)
    if found is None:
        assert type(activation).__name__ in unknown(activation)
    else:
        x = torch.randn(4096).mul(4).to(dtype)
        assert torch.equal(FUNCTIONS[found](x), activation(x))


@pytest.mark.parametrize(
    ("activation", "name"),
    [
        (nn.GELU(), "gelu"),
        (nn.GELU(approximate="tanh"), "gelu_tanh"),
        (functional.silu, "silu"),
        (functional.gelu, "gelu"),
        (partial(functional.gelu, approximate="tanh"), "gelu_tanh"),
        (torch.sigmoid, "sigmoid"),
        (torch.Tensor.sigmoid, "sigmoid"),
        (torch.relu, "relu"),
    ],
    ids=["GELU", "GELU tanh", "silu", "gelu", "partial of gelu", "sigmoid", "method", "relu"],
)
def test_other_spellings(activation, name):
    assert name_of(activation) == name
    x = torch.randn(512)
    assert torch.equal(FUNCTIONS[name](x), activation(x))


class LikeSiLU(nn.SiLU):
    pass


def altered():
    hooked, before, replaced, compiled = nn.SiLU(), nn.SiLU(), nn.SiLU(), nn.SiLU()
    remade = upstream.GELUActivation()
    hooked.register_forward_hook(lambda *_: None)
    before.register_full_backward_pre_hook(lambda *_: None)
    replaced.forward = torch.relu
    compiled.compile(backend="eager")
    remade.act = torch.relu
    inplace = [nn.SiLU(inplace=True), nn.ReLU(inplace=True)]
    return [hooked, before, replaced, compiled, remade, *inplace, LikeSiLU()]


@pytest.mark.parametrize("activation", altered(), ids=lambda each: type(each).__name__)
def test_what_a_call_adds_is_no_name(activation):
    assert name_of(activation) is None
    assert unknown(activation)


@pytest.mark.parametrize(
    "activation", [torch.tanh, partial(functional.gelu, "tanh"), lambda x: x, None, [], "silu"]
)
def test_other_things(activation):
    assert name_of(activation) is None
    assert unknown(activation)


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_powers_are_widened_by_autocast_on_a_gpu_alone(monkeypatch, on_gpu, autocast):
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: autocast and kind == "cuda")
    assert widened(SimpleNamespace(is_cuda=on_gpu)) is (on_gpu and autocast)
