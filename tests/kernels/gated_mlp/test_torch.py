import pytest
import torch
from torch import nn
from transformers.activations import ACT2FN

from veomni_hook.kernels.gated_mlp.torch import loses, refuses, refuses_others


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


def test_others_refuse_activations_that_may_have_parameters():
    assert refuses_others(None, torch.randn(2)) is None
    assert refuses_others(None, torch.randn(2), nn.GELU()) is None
    assert "PReLU" in refuses_others(None, torch.randn(2), nn.PReLU())
