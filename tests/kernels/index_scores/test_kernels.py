"""Index scores against the formulas: outputs and all gradients."""

import pytest
import torch

from tests.kernels import declared
from tests.kernels.contract import call_of
from tests.kernels.declared import refusal
from tests.kernels.matching import DEVICE, close
from veomni_hook.kernels.index_scores import rules
from veomni_hook.kernels.index_scores import torch as pieces

OP = "index_scores"
VARIANTS = ["relu_matmul", "relu_sum", "relu_einsum", "einsum"]
SCALE = 0.3

refuses = refusal("index_scores", "relu_matmul", "triton")


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(pieces, "LIMIT", 1 << 12)


def call(variant, backend, *of):
    torch.manual_seed(5)
    return call_of(OP, variant, backend, *of)


def operands(*size, dtype=torch.float32):
    return call("relu_matmul", "torch", size, dtype).tensors


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_pieces_of_queries(small_pieces, backend, variant, dtype):
    """Scores of every piece, and the sums of gradients over pieces; Triton's backward works in pieces, too."""
    made = call(variant, backend, (2, 67, 33, 3, 24), dtype)
    assert pieces.rows_of_a_piece(*made.tensors[:2]) == 10
    made.matches(exact=False)


def test_gradients_of_keys_are_added_in_float32(small_pieces, backend):
    """Were they rounded once a piece, their error would be that of many roundings."""
    tensors = operands(1, 160, 33, 3, 24, dtype=torch.float16)
    tensors[2] = tensors[2].abs()
    formula = declared.reference(OP, "relu_matmul")
    found = []
    for f, dtype in ((declared.kernel(OP, "relu_matmul", backend), torch.float16), (formula, torch.float64)):
        query, key, weights = (each.clone().requires_grad_() for each in tensors)
        (grad,) = torch.autograd.grad(f(query, key, weights, SCALE).sum(), key)
        found.append(grad.to(dtype).double())
    # Half a unit in the last of 11 bits.
    close(*found, 2**-11)


def test_numbers_that_are_none_and_infinities_stay(backend):
    query, key, weights = operands(1, 4, 6, 2, 16)
    key[0, 1, 0], key[0, 2, 0] = float("nan"), float("inf")
    for variant in VARIANTS:
        found, truth = (
            f(query, key, weights, SCALE)
            for f in (declared.kernel(OP, variant, backend), declared.reference(OP, variant))
        )
        assert truth.isnan().any() and torch.equal(found.isnan(), truth.isnan())
        assert torch.equal(found.isinf(), truth.isinf())


def test_only_operands_are_saved(small_pieces, backend):
    tensors = [each.requires_grad_() for each in operands(1, 67, 33, 3, 24)]
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda each: saved.append(each.numel()), pytest.fail):
        declared.kernel(OP, "relu_matmul", backend)(*tensors, SCALE)
    assert max(saved) <= max(each.numel() for each in tensors)


def test_a_score_has_the_same_bits_in_any_batch():
    pytest.importorskip("triton")
    kernel = declared.kernel(OP, "relu_matmul", "triton")
    query, key, weights = operands(2, 67, 133, 3, 24)
    whole = kernel(query, key, weights, SCALE)
    # Rows of NumPy's product, in the interpreter, depend on their places in a tile.
    queries = slice(10, None) if DEVICE == "cuda" else slice(20)
    part = kernel(query[1:, queries], key[1:, :70], weights[1:, queries], SCALE)
    assert torch.equal(whole[1:, queries, :70], part)


def test_weights_that_a_kernel_cannot_read_are_the_formulas(backend):
    query, key, weights = operands(2, 4, 6, 2, 16)
    for variant in VARIANTS:
        found, truth = (
            f(query, key, weights[:1], SCALE)
            for f in (declared.kernel(OP, variant, backend), declared.reference(OP, variant))
        )
        assert torch.equal(found, truth)


def test_gradients_of_a_second_order(small_pieces):
    tensors = [each.requires_grad_() for each in operands(1, 67, 33, 3, 24)]
    found = []
    for f in (pieces.relu_sum, declared.reference(OP, "relu_sum")):
        grads = torch.autograd.grad(f(*tensors, SCALE).square().sum(), tensors, create_graph=True)
        found.append(torch.autograd.grad(sum(each.square().sum() for each in grads), tensors))
    close(*found, 1e-5)


def test_the_backward_under_autocast():
    declared.kernel(OP, "relu_matmul", "triton")  # defines the operator
    backward = torch.ops.veomni_hook.index_scores_backward
    tensors = operands(1, 5, 7, 2, 16)
    dscores = torch.randn(1, 5, 7, device=DEVICE)
    plain = backward(dscores, *tensors, SCALE, True)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        assert all(map(torch.equal, plain, backward(dscores, *tensors, SCALE, True)))


def test_what_is_refused():
    query, key, _ = operands(2, 4, 6, 2, 16)
    assert rules.refuses(None, query, key, SCALE) is refuses(None, query, key, SCALE) is None
    assert refuses(None, query, key, 1) is None
    for given, reason in {
        (query, key[:1], SCALE): "shapes",
        (query[0], key, SCALE): "shapes",
        (query, key.to("meta"), SCALE): "different devices",
        (query, key.long(), SCALE): "floating-point",
        (query, key, torch.ones(())): "not a number",
        (query, 1.0, SCALE): "an operand is a float",
    }.items():
        assert reason in str(rules.refuses(None, *given)) and reason in str(refuses(None, *given))
    for given, reason in {
        (query.double(), key.double(), SCALE): "torch.float64",
        (query, key.half(), SCALE): "torch.float16",
        (query, key, -SCALE): "not positive",
        (query, key, float("nan")): "not positive",
        (torch.zeros(1, 1, 1, 257, device=DEVICE), torch.zeros(1, 1, 257, device=DEVICE), SCALE): "wider",
    }.items():
        assert rules.refuses(None, *given) is None and reason in str(refuses(None, *given))
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        assert "autocast" in str(refuses(None, query, key, SCALE))
