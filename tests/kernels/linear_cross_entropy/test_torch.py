from __future__ import annotations

from itertools import product
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.loss.loss_utils import ForCausalLMLoss

from tests.kernels.linear_cross_entropy import objectives
from tests.kernels.linear_cross_entropy.objectives import OBJECTIVES
from tests.kernels.matching import assert_matches, close
from veomni_hook.kernels.linear_cross_entropy import reference, rowwise
from veomni_hook.kernels.linear_cross_entropy import torch as chunked
from veomni_hook.kernels.linear_cross_entropy.objective import Objective, Wanted
from veomni_hook.kernels.linear_cross_entropy.transform import Transform
from veomni_hook.tools.bench.timing import peak_bytes

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
ROWS, HIDDEN, VOCAB = 37, 16, 101


@pytest.fixture(params=[None, (8, 0), (1, 0)], ids=["one chunk", "chunks of 8", "chunks of 1"])
def chunks(request, monkeypatch):
    if request.param is not None:
        monkeypatch.setattr(chunked, "CHUNK_ROWS", request.param[0])
        monkeypatch.setattr(chunked, "CHUNK_LOGITS", request.param[1])


def operands(dtype=torch.float32, rows=ROWS, *, bias=True, ignored=3):
    target = torch.randint(0, VOCAB, (rows,))
    target[: rows // 10 * ignored] = -100
    given = [torch.randn(rows, HIDDEN).to(dtype), (torch.randn(VOCAB, HIDDEN) * 0.3).to(dtype)]
    return [*given, torch.randn(VOCAB).to(dtype)] if bias else given, target


def upstream(target, **options):
    """What transformers does: logits from a Linear, then its own loss."""
    num_items = options.pop("num_items", None)

    def run(x, weight, bias=None):
        logits = functional.linear(x, weight, bias)[None]
        return ForCausalLMLoss(
            logits, None, VOCAB, num_items_in_batch=num_items, shift_labels=target[None], **options
        )

    return run


def ours(target, function=chunked.linear_cross_entropy, **options):
    return lambda x, weight, bias=None: function(x, weight, bias, target, **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_equals_upstream(dtype, bias, chunks):
    given, target = operands(dtype, bias=bias)
    assert_matches(ours(target), upstream(target), given)
    assert_matches(ours(target, reference.linear_cross_entropy), upstream(target), given)


@pytest.mark.parametrize("num_items", [17, 17.5, torch.tensor(17), torch.tensor([17]), torch.tensor(3.25)])
@pytest.mark.parametrize("ignored", [0, 1, 9])
def test_num_items_and_ignored_rows(num_items, ignored, chunks):
    given, target = operands(ignored=ignored)
    assert_matches(ours(target, num_items=num_items), upstream(target, num_items=num_items), given)


def test_another_ignore_index(chunks):
    given, target = operands(ignored=0)
    target[::3] = 5
    assert_matches(ours(target, ignore_index=5), upstream(target, ignore_index=5), given)


@pytest.mark.parametrize("rows", [0, 1, 20])
@pytest.mark.parametrize("num_items", [None, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_nothing_counts(rows, num_items, dtype):
    given, target = operands(dtype, rows=rows)
    target[:] = -100
    assert_matches(ours(target, num_items=num_items), upstream(target, num_items=num_items), given)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wanted", list(product([True, False], repeat=3)))
def test_gradients_only_where_wanted(wanted, dtype):
    given, target = operands(dtype)
    assert_matches(ours(target), upstream(target), given, wanted)


def test_strided_operands(chunks):
    given, target = operands()
    x, weight, bias = given
    given = [x.t().contiguous().t(), weight.t().contiguous().t(), bias]
    assert_matches(ours(target), upstream(target), given)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_under_autocast(dtype, chunks):
    given, target = operands(dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_matches(ours(target), upstream(target), given, tolerance=2e-2)


def test_float16_keeps_gradients_that_a_loss_scale_makes_visible():
    given, target = operands(torch.float16)

    def scaled(function):
        return lambda *inputs: function(*inputs) * 2.0**16

    options = {"num_items": 2_000_000}
    assert_matches(scaled(ours(target, **options)), scaled(upstream(target, **options)), given)


def test_a_target_out_of_range_is_an_index_error():
    given, target = operands()
    target[-1] = VOCAB
    with pytest.raises(IndexError):
        upstream(target)(*given)
    with pytest.raises(IndexError):
        ours(target)(*given)


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_backward_twice_through_a_retained_graph(scale):
    given, target = operands(bias=False)
    leaves = [tensor.clone().requires_grad_() for tensor in given]
    loss = ours(target)(*leaves) * scale
    loss.backward(retain_graph=True)
    once = [leaf.grad.clone() for leaf in leaves]
    loss.backward()
    for leaf, first in zip(leaves, once, strict=True):
        close(leaf.grad, 2 * first, 1e-6)


def test_gradients_do_not_share_memory_with_a_retained_graph():
    given, target = operands(bias=False)
    leaves = [tensor.clone().requires_grad_() for tensor in given]
    loss = ours(target)(*leaves)
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    held = [grad.clone() for grad in first]
    for grad in first:
        grad.zero_()
    for grad, before in zip(torch.autograd.grad(loss, leaves), held, strict=True):
        assert torch.equal(grad, before)


@pytest.mark.parametrize("num_items", [None, torch.tensor(7)])
def test_second_derivative(num_items):
    given, target = operands(rows=6)

    def penalty(function):
        def run(*inputs):
            grads = torch.autograd.grad(function(*inputs), inputs, create_graph=True)
            return sum((grad**2).sum() for grad in grads)

        return run

    options = {"num_items": num_items}
    assert_matches(penalty(ours(target, **options)), penalty(upstream(target, **options)), given)


def test_checkpointing_repeats_it(chunks):
    given, target = operands()

    def repeated(*inputs):
        return torch.utils.checkpoint.checkpoint(ours(target), *inputs, use_reentrant=False)

    assert_matches(repeated, upstream(target), given)


class Largest(TorchDispatchMode):
    """Records the largest number of elements of any result."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.elements = max(self.elements, result.numel())
        return result


def test_never_makes_all_logits(monkeypatch):
    monkeypatch.setattr(chunked, "CHUNK_ROWS", 4)
    monkeypatch.setattr(chunked, "CHUNK_LOGITS", 0)
    given, target = operands(rows=64, ignored=0)

    def largest(function):
        with Largest() as seen:
            function(*(tensor.clone().requires_grad_() for tensor in given)).backward()
        return seen.elements

    assert largest(upstream(target)) == 64 * VOCAB
    assert largest(ours(target)) == VOCAB * HIDDEN


def test_rows_to_ignore_are_not_computed():
    given, target = operands(rows=1000, ignored=9)
    with Largest() as seen:
        ours(target)(*given)
    assert seen.elements == (target != -100).sum() * VOCAB


def test_auto_leaves_few_logits_to_upstream():
    few, many = torch.empty(2, 1000, 8), torch.empty(3, 1000, 8)
    assert chunked.loses(SimpleNamespace(), few, None, None, 4000, {})
    assert chunked.loses(SimpleNamespace(), many, None, None, 4000, {}) is None


@pytest.mark.sample(40)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("rows_at_once", [1, 1 << 20])
def test_objectives_and_statistics(name, dtype, rows_at_once, chunks, monkeypatch):
    monkeypatch.setattr(rowwise, "SLICE_LOGITS", rows_at_once)
    given, target = objectives.operands(dtype)
    objective = OBJECTIVES[name]("cpu")
    sides = [objectives.loss_of(module, target, objective) for module in (chunked, reference)]
    assert_matches(*sides, given)


@pytest.mark.sample(12)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wanted", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_statistics_with_gradients(wanted, dtype, softcap, chunks):
    given, target = objectives.operands(dtype)
    objective = Objective(transform=Transform(scale=0.7, softcap=softcap))
    sides = [
        objectives.tokens_of(module, target, objective, Wanted(*wanted, False))
        for module in (chunked, reference)
    ]
    assert_matches(*sides, given, tolerance=objectives.TOKENS[dtype])


def test_predictions(chunks):
    (x, weight, bias), target = objectives.operands(torch.float32)
    for make in (lambda *call: chunked.loss_and_statistics(*call)[1], chunked.token_statistics):
        found = make(x, weight, bias, target, Objective(), Wanted(False, False, True))
        expected = (x @ weight.t() + bias).argmax(-1).where(target != -100, -100)
        assert found[:2] == (None, None) and torch.equal(found.predictions, expected)


def test_a_weight_of_zero_is_as_good_as_a_row_to_ignore(chunks):
    given, target = operands(ignored=0)
    weights = torch.rand(ROWS)
    weights[::3] = 0
    ones = torch.full_like(weights, 2.0).where(weights != 0, 0)
    ignored = target.where(weights != 0, -100)
    assert_matches(ours(target, loss_weights=ones), ours(ignored), given)
    assert_matches(ours(target, loss_weights=weights), ours(ignored, loss_weights=weights), given)


def test_smoothing_and_z_loss_are_those_of_torch_and_of_the_definition():
    given, target = operands()
    logits = functional.linear(*given)
    loss = reference.linear_cross_entropy(*given, target, label_smoothing=0.3)
    close(loss, functional.cross_entropy(logits, target, label_smoothing=0.3), 1e-6)
    more = reference.linear_cross_entropy(*given, target, label_smoothing=0.3, z_loss=0.1) - loss
    close(more, 0.1 * logits.logsumexp(-1).square()[target != -100].mean(), 1e-5)


def test_a_frozen_layer_keeps_no_gradient():
    given, target = operands()
    with Largest() as seen:
        loss = ours(target)(given[0].requires_grad_(), *given[1:])
    saved = [tensor for tensor in loss.grad_fn.saved_tensors if tensor is not None]
    assert sum(tensor.shape == given[1].shape for tensor in saved) == 1
    assert seen.elements <= ROWS * VOCAB


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
def test_the_peak_is_a_chunk_and_the_weights_gradient(dtype):
    rows, hidden, vocab = 1024, 64, 20_000
    x, weight = torch.randn(rows, hidden).to(dtype), torch.randn(vocab, hidden).to(dtype)
    target = torch.randint(0, vocab, (rows,))

    def eager(x, weight):
        return functional.cross_entropy(functional.linear(x, weight).float(), target)

    peaks = []
    for function in (ours(target), eager):
        leaves = [each.clone().requires_grad_() for each in (x, weight)]
        peaks.append(peak_bytes(lambda run=function, leaves=leaves: run(*leaves).backward(), "cpu"))
    assert peaks[1] > 4 * peaks[0], peaks
