"""The fused addition and torch's LayerNorm against upstream's statements, interpreted or on a GPU."""

from operator import itemgetter

import pytest
import torch
from torch import nn

from tests.kernels.contract import call_of
from tests.kernels.declared import refusal
from tests.kernels.matching import DEVICE, assert_matches
from veomni_hook.kernels.layer_norm import skipped_calls
from veomni_hook.kernels.selection.process_choice import set_choice

pytest.importorskip("triton")

from veomni_hook.kernels.layer_norm import modules as kernels

refuses = refusal("add_layer_norm", "rounded_once", "triton")


def upstream(residual, hidden_states, norm):
    hidden_states = residual + hidden_states
    return hidden_states, norm(hidden_states)


def call(shape=(4, 9), parameters=2, *dtypes, **changed):
    return call_of("add_layer_norm", "rounded_once", "triton", (shape, parameters), *dtypes, **changed)


@pytest.mark.parametrize("parameters", [2, 1, 0])
def test_the_reference_has_their_bits(parameters):
    made = call((3, 5, 7), parameters, torch.bfloat16)
    assert_matches(made.theirs, made.by(upstream), made.tensors, exact=True)


def test_the_sum_has_upstreams_bits_and_the_norm_is_rounded_once():
    made = call((257, 96), 2, torch.bfloat16 if DEVICE == "cuda" else torch.float16)
    (found_sum, found), (true_sum, truth) = (run(*made.tensors) for run in (made.ours, made.by(upstream)))
    assert torch.equal(found_sum, true_sum)
    assert (~torch.isclose(found.float(), truth.float(), rtol=2e-6, atol=1e-6)).float().mean() < 0.01


@pytest.mark.parametrize("part", [0, 1], ids=["the sum alone is used", "the norm alone is used"])
def test_one_of_the_results(part):
    call().matches(of=itemgetter(part))


def test_one_tensor_is_the_gradient_of_both_and_stays_right():
    results, made = [], call()
    for run in (made.ours, made.by(upstream)):
        a, b, *parameters = (x.clone().requires_grad_() for x in made.tensors)
        for _ in range(3):
            total, y = run(a, b, *parameters)
            (total.sin() + y).sum().backward()
            a.grad.mul_(2)  # as clipping does, in place
        results.append((a.grad, b.grad, *(each.grad for each in parameters)))
    torch.testing.assert_close(*results)
    assert not torch.equal(results[0][0], results[0][1])


def test_what_does_not_fit_is_computed_upstreams_way():
    doubled = dict.fromkeys(("residual", "hidden_states", "weight", "bias"), torch.Tensor.double)
    for change in ({"hidden_states": torch.Tensor.bfloat16}, {"hidden_states": lambda b: b[:1]}, doubled):
        made = call(**change)
        assert_matches(made.ours, made.by(upstream), made.tensors, exact=True)


def test_under_autocast_as_on_a_gpu_the_norm_is_float32(monkeypatch):
    monkeypatch.setattr(kernels, "cast_by_autocast", lambda x: True)

    def cast(residual, hidden_states, norm):
        total = residual + hidden_states
        weight, bias = (each.float() for each in norm._parameters.values())
        return total, nn.functional.layer_norm(total.float(), norm.normalized_shape, weight, bias, norm.eps)

    made = call((5, 48), 2, torch.bfloat16, torch.float32)
    assert_matches(made.ours, made.by(cast), made.tensors)


def test_refuses():
    x, norm = torch.randn(2, 8), nn.LayerNorm(8)
    assert refuses(None, x, x, norm) is None
    assert "not torch's LayerNorm" in refuses(None, x, x, nn.Identity())
    assert "an operand is a float" in refuses(None, x, 1.0, norm)
    assert "different shapes" in refuses(None, x, x[:1], norm)
    assert "the dtypes" in refuses(None, x, x.bfloat16(), norm)
    assert "different devices" in refuses(None, x, x.to("meta"), norm)
    assert "last dimension" in refuses(None, x, x, nn.LayerNorm(4))
    assert "128 MiB" in kernels.loses(None, x, x, norm)


def test_auto_leaves_the_norm_to_a_kernel_that_was_chosen():
    owner = nn.Module()
    x, norm = torch.randn(2, 8), nn.LayerNorm(8)
    assert skipped_calls.chosen_apart(owner, x, x, norm) is None
    set_choice("nn_layer_norm=reference")
    assert "nn_layer_norm=reference is chosen" in skipped_calls.chosen_apart(owner, x, x, norm)
