"""The product against the call of the convolution: results, gradients, memory layout, copies."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import nn

from tests.kernels.contract import call_of
from tests.kernels.dispatched import Operators
from tests.kernels.matching import DEVICE, assert_matches
from tests.kernels.patch_projection.cases import CONVOLUTIONS
from veomni_hook.kernels.patch_projection import reference, rules
from veomni_hook.kernels.patch_projection import torch as kernels


def upstream(x, convolution):
    return convolution(x)


def made(name, *dtypes):
    """The kernel and the call of the module, as functions of tensors, and these."""
    call = call_of("patch_projection", "disjoint_blocks", "torch", name, *dtypes)
    return [call.ours, call.by(upstream)], call.tensors


def strides(tensor):
    """The strides that decide about views: those of dimensions with more than one element."""
    return [step for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_the_reference_equals_it(name):
    call = call_of("patch_projection", "disjoint_blocks", "torch", name)
    assert_matches(call.theirs, call.by(upstream), call.tensors)


def _transposed(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, -1).contiguous().transpose(1, -1)


def _sliced(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x, x], -1)[..., : x.shape[-1]]


def _expanded(x: torch.Tensor) -> torch.Tensor:
    return x[:1].expand(x.shape)


def _channels_last(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous(memory_format={4: torch.channels_last, 5: torch.channels_last_3d}[x.ndim])


def _every_second(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([x, x], 1).flatten(0, 1)[::2]


@pytest.mark.parametrize("laid", [_transposed, _sliced, _expanded, _channels_last, _every_second])
@pytest.mark.parametrize("name", ["one block of 2 dimensions", "an image", "a video with a remainder"])
def test_strided_inputs(name, laid):
    sides, (x, *parameters) = made(name)
    results = []
    for function in sides:
        leaf = x.clone().requires_grad_()
        y = function(laid(leaf), *parameters)
        torch.manual_seed(1)
        # A gradient with strides of its own, as code after it makes.
        incoming = torch.randn(*y.shape[:-1], 2 * y.shape[-1])[..., ::2].to(y)
        results.append((y.detach(), *torch.autograd.grad(y, leaf, incoming)))
    torch.testing.assert_close(*results)
    assert strides(results[0][0]) == strides(results[1][0])


@pytest.mark.parametrize("laid", [lambda x: x, _channels_last], ids=["contiguous", "channels last"])
@pytest.mark.parametrize("name", ["one block of 3 dimensions", "an image", "a video"])
def test_gradients_of_parameters_have_their_memory_layout(name, laid):
    sides, (x, *parameters) = made(name)
    results = []
    for function in sides:
        leaves = [laid(parameters[0]).clone().requires_grad_(), parameters[1].clone().requires_grad_()]
        y = function(x, *leaves)
        y.sum().backward()
        results.append((y, *leaves))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)
        if ours.is_leaf:
            torch.testing.assert_close(ours.grad, theirs.grad)
            assert ours.grad.stride() == theirs.grad.stride()
        else:
            assert strides(ours) == strides(theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_views_that_upstream_makes_of_results(dtype):
    """``view`` of exact blocks; ``view`` that joins channels and blocks, of a contiguous result."""
    for name, view in {
        "one block of 3 dimensions": lambda y: y.view(-1, 5),
        "one block of 2 dimensions": lambda y: y.view(y.size(0), -1),
        "an image": lambda y: y.view(y.size(0), -1),
        "a video": lambda y: y.flatten(2).transpose(1, 2),
    }.items():
        sides, given = made(name, dtype)
        assert_matches(*(lambda *t, f=f, view=view: view(f(*t)) for f in sides), given)


@pytest.mark.parametrize(("name", "copies"), [("one block of 3 dimensions", 0), ("an image", 2)])
def test_copies(name, copies):
    """None in forward and backward for a contiguous input of the kernel's size; else rows and result."""
    (function, _), given = made(name)
    leaves = [each.requires_grad_() for each in given]
    incoming = torch.randn_like(function(*leaves))
    with Operators() as seen:
        y = function(*leaves)
        forward = len(seen.names)
        gradients = torch.autograd.grad(y, leaves[1:], incoming)
    copied = [each for each in seen.names[:forward] if each in {"clone", "copy_", "_to_copy", "contiguous"}]
    assert len(copied) == copies
    if not copies:
        assert not {"clone", "copy_", "_to_copy"} & set(seen.names)
    assert seen.names[:forward].count("addmm") == 1 and not any("convolution" in each for each in seen.names)
    assert gradients[0].is_contiguous() and gradients[0].shape == leaves[1].shape


@pytest.mark.parametrize("dtypes", list(product([torch.float32, torch.bfloat16], repeat=2)), ids=str)
@pytest.mark.parametrize("name", ["one block of 3 dimensions", "an image"])
def test_autocast(name, dtypes):
    case = CONVOLUTIONS[name]
    sides, given = made(name, *dtypes)
    convolution = case.kind(case.size[0], case.out, case.kernel, stride=case.kernel).to(DEVICE, dtypes[1])
    with torch.autocast(DEVICE, torch.bfloat16):
        assert rules.refuses(None, given[0], convolution) is None
        assert_matches(*sides, given, tolerance=2e-2)
        assert sides[0](*given).dtype is torch.bfloat16


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["one block of 3 dimensions", "an image with a remainder"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_without_a_break(name, dynamic):
    case = CONVOLUTIONS[name]
    convolution = case.kind(case.size[0], case.out, case.kernel, stride=case.kernel).to(DEVICE)

    def ours(x):
        if rules.refuses(None, x, convolution) is None and (
            case.batch == 3 or rules.loses(None, x, convolution) is None
        ):
            return kernels.disjoint_blocks(x, convolution)
        return convolution(x) * 0

    torch.compiler.reset()
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for rows in (4, 6):
        x = torch.randn(rows, *case.size, device=DEVICE)
        assert_matches(compiled, convolution, [x])


def test_a_call_costs_one_product_of_the_batch_not_one_for_each_image():
    (function, _), given = made("an image")
    with Operators() as seen:
        function(*given)
    assert [each for each in seen.names if "mm" in each] == ["addmm"]


def test_of_several_kernels_the_formula_is_that_of_the_module():
    """The reference knows neither unfolded images nor torch's convolutions: by hand, for one block."""
    convolution = nn.Conv2d(1, 1, 2, stride=2)
    x = torch.arange(16.0).view(1, 1, 4, 4)
    weight, bias = convolution.weight.flatten(), convolution.bias
    expected = torch.stack([
        weight @ x[0, 0, i : i + 2, j : j + 2].flatten() + bias for i in (0, 2) for j in (0, 2)
    ]).view(1, 1, 2, 2)  # fmt: skip
    for each in (reference, kernels):
        torch.testing.assert_close(each.disjoint_blocks(x, convolution), expected)
