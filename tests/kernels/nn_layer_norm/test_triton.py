"""The kernel of torch's LayerNorm against the call of the module: interpreted, or compiled on a GPU."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import nn

from tests.kernels.batches import assert_batch_invariant
from tests.kernels.declared import refusal
from tests.kernels.matching import assert_matches
from tests.kernels.nn_layer_norm.norms import DEVICE, EPS, FORMS, inputs, of_tensors
from veomni_hook.kernels.layer_norm import reference

pytest.importorskip("triton")

from veomni_hook.kernels.layer_norm import module_calls as kernels

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(3, 5, 7), (2, 0, 8), (1, 3), (129, 33), (2, 3, 4, 128)]

refuses = refusal("nn_layer_norm", "rounded_once", "triton")


def upstream(x, norm):
    return norm(x)


def pair(form, width):
    return [of_tensors(each, form, width) for each in (kernels.rounded_once, upstream)]


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        pytest.param(*e, marks=[] if e[0] == SHAPES[0] or e[1] is torch.float32 else pytest.mark.slow)
        for e in product(SHAPES, DTYPES)
    ],
    ids=str,
)
@pytest.mark.parametrize("form", FORMS)
def test_equals_the_call_of_the_module(form, shape, dtype):
    assert_matches(*pair(form, shape[-1]), inputs(form, shape, dtype))


@pytest.mark.parametrize("form", FORMS)
def test_the_reference_has_its_bits(form):
    given = inputs(form, (3, 5, 7), torch.bfloat16)
    assert_matches(of_tensors(reference.rounded_once, form, 7), pair(form, 7)[1], given, exact=True)


@pytest.mark.parametrize("form", FORMS)
def test_rounds_once(form):
    ours, theirs = pair(form, 96)
    # The interpreter cuts bfloat16 off.
    given = inputs(form, (257, 96), torch.bfloat16 if DEVICE == "cuda" else torch.float16)
    got, expected = ours(*given).float(), theirs(*given).float()
    # A cast at another place changes a quarter of the results, another order of a sum hardly any.
    assert (~torch.isclose(got, expected, rtol=2e-6, atol=1e-6)).float().mean() < 0.01


@pytest.mark.parametrize("wanted", [each for each in product((True, False), repeat=3)], ids=str)
def test_gradients_only_where_wanted(wanted):
    form = "weight and bias"
    assert_matches(*pair(form, 9), inputs(form, (4, 9), torch.float32), wanted)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(6, 4, 10).transpose(0, 1),
        lambda: torch.randn(2, 5, 3, 24)[..., 8:16],
        lambda: torch.randn(4, 3, 5, 6, 8).permute(3, 1, 0, 2, 4),
        lambda: torch.randn(10, 6).t(),
        lambda: torch.randn(1, 8).expand(5, 8),
    ],
    ids=["swapped", "part of a row", "more steps than three", "columns apart", "one row for all"],
)
def test_strided_input_and_gradients(make):
    x = make().to(DEVICE)
    _, *parameters = inputs("weight and bias", (1, x.shape[-1]), torch.float32)
    results = []
    for function in pair("weight and bias", x.shape[-1]):
        leaf = x.detach().requires_grad_()
        y = function(leaf, *parameters)
        assert y.is_contiguous()
        torch.manual_seed(1)
        # A gradient with strides of its own.
        incoming = torch.randn(*y.shape[:-1], 2 * y.shape[-1])[..., ::2].to(DEVICE)
        results.append((y, *torch.autograd.grad(y, leaf, incoming)))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("columns", [4100, pytest.param(12288, marks=pytest.mark.slow)])
def test_wide_rows(columns):
    form = "weight and bias"
    assert_matches(*pair(form, columns), inputs(form, (3, columns), torch.float32))


def test_without_gradients_nothing_is_kept():
    ours, theirs = pair("weight and bias", 9)
    given = inputs("weight and bias", (4, 9), torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(ours(*given), theirs(*given))
    assert ours(*given).grad_fn is None


@pytest.mark.parametrize("parameters", [None, torch.float32], ids=str)
def test_under_autocast_as_on_a_gpu_the_result_is_float32(parameters, monkeypatch):
    """A CPU's autocast leaves torch's operator alone; here kernel and module do what they do on a GPU."""
    monkeypatch.setattr(kernels, "cast_by_autocast", lambda x: True)
    form = "weight and bias"

    def cast(x, norm):
        weight, bias = (each.float() for each in norm._parameters.values())
        return nn.functional.layer_norm(x.float(), norm.normalized_shape, weight, bias, norm.eps)

    given = inputs(form, (5, 48), torch.bfloat16, parameters=parameters)
    ours, theirs = (of_tensors(each, form, 48) for each in (kernels.rounded_once, cast))
    assert ours(*given).dtype is torch.float32
    assert_matches(ours, theirs, given)
    norm = nn.LayerNorm(48, dtype=parameters or torch.bfloat16)
    assert refuses(None, given[0].cpu(), norm) is None


@pytest.mark.skipif(DEVICE != "cuda", reason="a GPU's autocast")
def test_autocast_on_a_gpu():
    form = "weight and bias"
    with torch.autocast("cuda", torch.bfloat16):
        for dtype in (torch.bfloat16, torch.float32):
            assert_matches(*pair(form, 48), inputs(form, (5, 48), dtype, parameters=torch.float32))


def test_equal_bits_for_a_row_in_any_batch():
    x, *parameters = inputs("weight and bias", (64, 130), torch.float32)
    assert_batch_invariant(pair("weight and bias", 130)[0], [x], parameters)


def test_compiles_without_a_break():
    norm = nn.LayerNorm(48, EPS).to(DEVICE)

    def ours(x):
        if refuses(norm, x, norm) is None:
            return kernels.rounded_once(x, norm)
        return x * 0

    torch.compiler.reset()
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    assert_matches(compiled, norm, [torch.randn(5, 48, device=DEVICE)])


class Other(nn.LayerNorm):
    pass


def made(prepare):
    norm = nn.LayerNorm(8)
    prepare(norm)
    return norm


@pytest.mark.parametrize(
    ("norm", "reason"),
    [
        (Other(8), "Other, not torch's LayerNorm"),
        (nn.RMSNorm(8), "RMSNorm, not torch's LayerNorm"),
        (nn.Identity(), "Identity, not torch's LayerNorm"),
        (None, "NoneType, not torch's LayerNorm"),
        (len, "builtin_function_or_method, not torch's LayerNorm"),
        (made(lambda norm: norm.register_forward_hook(lambda *_: None)), "has hooks"),
        (made(lambda norm: norm.register_forward_pre_hook(lambda *_: None)), "has hooks"),
        (made(lambda norm: norm.register_full_backward_hook(lambda *_: None)), "has hooks"),
        (made(lambda norm: setattr(norm, "forward", lambda x: x)), "has its own forward"),
        (made(lambda norm: norm.compile()), "is compiled separately"),
        (made(lambda norm: nn.utils.parametrizations.weight_norm(norm, dim=None)), "not torch's LayerNorm"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_refuses_norms_whose_call_would_be_missed(norm, reason):
    x = torch.randn(2, 8)
    assert refuses(None, x, nn.LayerNorm(8)) is None
    assert reason in refuses(None, x, norm)


def test_refuses_where_torchs_own_code_was_replaced(monkeypatch):
    x, norm = torch.randn(2, 8), nn.LayerNorm(8)
    with monkeypatch.context() as patched:
        patched.setattr(nn.LayerNorm, "forward", lambda self, x: x)
        assert "torch.nn.LayerNorm.forward was replaced" in refuses(None, x, norm)
    with monkeypatch.context() as patched:
        patched.setattr(nn.functional, "layer_norm", lambda *_: x)
        assert "torch.nn.functional.layer_norm was replaced" in refuses(None, x, norm)
    assert refuses(None, x, norm) is None


@pytest.mark.parametrize(
    ("x", "norm", "reason"),
    [
        (torch.randn(2, 8, dtype=torch.float64), nn.LayerNorm(8, dtype=torch.float64), "float64"),
        (torch.randn(2, 8).bfloat16(), nn.LayerNorm(8), "the weight has dtype torch.float32, the input"),
        (torch.randn(2, 8), made(lambda n: setattr(n, "bias", nn.Parameter(torch.ones(8).half()))), "the bias has dtype"),
        (torch.randn(2, 8), nn.LayerNorm((2, 8)), "not over the last dimension alone"),
        (torch.randn(2, 8), nn.LayerNorm(4), "not over the last dimension alone"),
        (torch.randn(()), nn.LayerNorm(()), "not over the last dimension alone"),
        (torch.randn(2, 8), nn.LayerNorm(8, device="meta"), "the weight is on meta"),
        (torch.empty(1, 40_000), nn.LayerNorm(40_000), "at most 32768"),
        (torch.randn(2, 8), made(lambda n: setattr(n, "eps", torch.ones(()))), "eps is a Tensor"),
        (torch.randn(2, 8), made(lambda n: setattr(n, "weight", nn.Parameter(torch.ones(4)))), "one contiguous"),
        (torch.sparse_coo_tensor(size=(2, 8), check_invariants=True), nn.LayerNorm(8), "is not strided"),
        (1.0, nn.LayerNorm(8), "an operand is a float"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_refuses_operands(x, norm, reason):
    assert reason in refuses(None, x, norm)


def test_refuses_in_transforms_of_functions():
    norm, reasons = nn.LayerNorm(8), []
    torch.func.vmap(lambda x: reasons.append(refuses(None, x, norm)) or x)(torch.randn(2, 3, 8))
    assert "torch.func transform" in reasons[0]


def test_small_calls_lose():
    rows = kernels.LEAST_BYTES // (8 * 4)
    assert kernels.loses(None, torch.empty(rows, 8, device="meta"), None) is None
    assert "128 MiB" in kernels.loses(None, torch.empty(rows - 1, 8, device="meta"), None)
