from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional
from transformers.loss.loss_utils import ForCausalLMLoss

from tests.kernels.dispatched import Operators
from tests.kernels.matching import assert_matches, close
from veomni_hook.kernels.linear_cross_entropy import reference
from veomni_hook.kernels.linear_cross_entropy import torch as chunked
from veomni_hook.kernels.linear_cross_entropy.objective import NOTHING, Objective
from veomni_hook.tools.bench.timing import peak_bytes

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
ROWS, HIDDEN, VOCAB = 37, 16, 101


@pytest.fixture(params=[None, 1], ids=["one chunk", "chunks of 1"])
def chunks(request, monkeypatch):
    if request.param is not None:
        monkeypatch.setattr(chunked, "CHUNK_ROWS", request.param)
        monkeypatch.setattr(chunked, "CHUNK_LOGITS", 0)


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


def ours(target, module=chunked, **options):
    call = (target, Objective(**options), NOTHING)
    return lambda x, weight, bias=None: module.loss_and_statistics(x, weight, bias, *call)[0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_equals_upstream(dtype, bias, chunks):
    given, target = operands(dtype, bias=bias)
    assert_matches(ours(target), upstream(target), given)
    assert_matches(ours(target, reference), upstream(target), given)


@pytest.mark.parametrize("num_items", [17, 17.5, torch.tensor(17), torch.tensor([17]), torch.tensor(3.25)])
@pytest.mark.parametrize("ignored", [0, 1, 9])
def test_num_items_and_ignored_rows(num_items, ignored, chunks):
    given, target = operands(ignored=ignored)
    assert_matches(ours(target, num_items=num_items), upstream(target, num_items=num_items), given)


def test_a_target_out_of_range_is_an_index_error():
    given, target = operands()
    target[-1] = VOCAB
    with pytest.raises(IndexError):
        upstream(target)(*given)
    with pytest.raises(IndexError):
        ours(target)(*given)


def largest(run):
    """The largest number of elements of any result."""
    elements = [0]

    def note(operator, operands, result):
        if isinstance(result, torch.Tensor):
            elements.append(result.numel())

    with Operators(note):
        run()
    return max(elements)


def test_never_makes_all_logits(monkeypatch):
    monkeypatch.setattr(chunked, "CHUNK_ROWS", 4)
    monkeypatch.setattr(chunked, "CHUNK_LOGITS", 0)
    given, target = operands(rows=64, ignored=0)

    def step(function):
        return lambda: function(*(tensor.clone().requires_grad_() for tensor in given)).backward()

    assert largest(step(upstream(target))) == 64 * VOCAB
    assert largest(step(ours(target))) == VOCAB * HIDDEN


def test_rows_to_ignore_are_not_computed():
    given, target = operands(rows=1000, ignored=9)
    assert largest(lambda: ours(target)(*given)) == (target != -100).sum() * VOCAB


def test_auto_leaves_few_logits_to_upstream():
    few, many = torch.empty(2, 1000, 8), torch.empty(3, 1000, 8)
    assert chunked.loses(SimpleNamespace(), few, None, None, 4000, {})
    assert chunked.loses(SimpleNamespace(), many, None, None, 4000, {}) is None


def test_smoothing_and_z_loss_are_those_of_torch_and_of_the_definition():
    given, target = operands()
    logits = functional.linear(*given)
    loss = reference.linear_cross_entropy(*given, target, label_smoothing=0.3)
    close(loss, functional.cross_entropy(logits, target, label_smoothing=0.3), 1e-6)
    more = reference.linear_cross_entropy(*given, target, label_smoothing=0.3, z_loss=0.1) - loss
    close(more, 0.1 * logits.logsumexp(-1).square()[target != -100].mean(), 1e-5)


def test_a_frozen_layer_keeps_no_gradient():
    given, target = operands()
    call, losses = ours(target), []
    most = largest(lambda: losses.append(call(given[0].requires_grad_(), *given[1:])))
    (loss,) = losses
    saved = [tensor for tensor in loss.grad_fn.saved_tensors if tensor is not None]
    assert sum(tensor.shape == given[1].shape for tensor in saved) == 1
    assert most <= ROWS * VOCAB


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
