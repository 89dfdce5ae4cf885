"""The kernel of torch's LayerNorm against the call of the module: interpreted, or compiled on a GPU."""

import pytest
import torch
from torch import nn

from tests.kernels.contract import call_of
from tests.kernels.declared import refusal
from tests.kernels.matching import DEVICE, assert_matches

pytest.importorskip("triton")

from veomni_hook.kernels.layer_norm import modules as kernels

refuses = refusal("nn_layer_norm", "rounded_once", "triton")


def upstream(x, norm):
    return norm(x)


def call(shape, parameters=2, *dtypes):
    return call_of("nn_layer_norm", "rounded_once", "triton", (shape, parameters), *dtypes)


@pytest.mark.parametrize("parameters", [2, 1, 0])
def test_the_reference_has_its_bits(parameters):
    made = call((3, 5, 7), parameters, torch.bfloat16)
    assert_matches(made.theirs, made.by(upstream), made.tensors, exact=True)


@pytest.mark.parametrize("columns", [4100, pytest.param(12288, marks=pytest.mark.slow)])
def test_wide_rows(columns):
    made = call((3, columns))
    assert_matches(made.ours, made.by(upstream), made.tensors)


@pytest.mark.parametrize("parameters", [None, torch.float32], ids=str)
def test_under_autocast_as_on_a_gpu_the_result_is_float32(parameters, monkeypatch):
    """A CPU's autocast leaves torch's operator alone; here kernel and module do what they do on a GPU."""
    monkeypatch.setattr(kernels, "cast_by_autocast", lambda x: True)

    def cast(x, norm):
        weight, bias = (each.float() for each in norm._parameters.values())
        return nn.functional.layer_norm(x.float(), norm.normalized_shape, weight, bias, norm.eps)

    made = call((5, 48), 2, torch.bfloat16, parameters)
    assert made.ours(*made.tensors).dtype is torch.float32
    assert_matches(made.ours, made.by(cast), made.tensors)
    norm = nn.LayerNorm(48, dtype=parameters or torch.bfloat16)
    assert refuses(None, made.tensors[0].cpu(), norm) is None


@pytest.mark.skipif(DEVICE != "cuda", reason="a GPU's autocast")
def test_autocast_on_a_gpu():
    with torch.autocast("cuda", torch.bfloat16):
        for dtype in (torch.bfloat16, torch.float32):
            made = call((5, 48), 2, dtype, torch.float32)
            assert_matches(made.ours, made.by(upstream), made.tensors)


class Other(nn.LayerNorm):
    pass


def prepared(prepare):
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
        (prepared(lambda norm: norm.register_forward_hook(lambda *_: None)), "has hooks"),
        (prepared(lambda norm: norm.register_forward_pre_hook(lambda *_: None)), "has hooks"),
        (prepared(lambda norm: norm.register_full_backward_hook(lambda *_: None)), "has hooks"),
        (prepared(lambda norm: setattr(norm, "forward", lambda x: x)), "has its own forward"),
        (prepared(lambda norm: norm.compile()), "is compiled separately"),
        (prepared(lambda norm: nn.utils.parametrizations.weight_norm(norm, dim=None)), "not torch's LayerNorm"),
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
        (torch.randn(2, 8), prepared(lambda n: setattr(n, "bias", nn.Parameter(torch.ones(8).half()))), "the bias has dtype"),
        (torch.randn(2, 8), nn.LayerNorm((2, 8)), "not over the last dimension alone"),
        (torch.randn(2, 8), nn.LayerNorm(4), "not over the last dimension alone"),
        (torch.randn(()), nn.LayerNorm(()), "not over the last dimension alone"),
        (torch.randn(2, 8), nn.LayerNorm(8, device="meta"), "the weight is on meta"),
        (torch.empty(1, 40_000), nn.LayerNorm(40_000), "at most 32768"),
        (torch.randn(2, 8), prepared(lambda n: setattr(n, "eps", torch.ones(()))), "eps is a Tensor"),
        (torch.randn(2, 8), prepared(lambda n: setattr(n, "weight", nn.Parameter(torch.ones(4)))), "one contiguous"),
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
