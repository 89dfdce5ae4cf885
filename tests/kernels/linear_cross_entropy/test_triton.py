"""The Triton kernels: through the interpreter on a CPU (conftest sets it up), compiled on a GPU."""

import weakref

import pytest
import torch

from tests.kernels.linear_cross_entropy.objectives import VOCAB, loss_of, operands, tokens_of
from tests.kernels.linear_cross_entropy.test_backends import OF_TRITON
from tests.kernels.matching import DEVICE, gradients
from veomni_hook.kernels.linear_cross_entropy import reference
from veomni_hook.kernels.linear_cross_entropy import torch as torch_kernels
from veomni_hook.kernels.linear_cross_entropy.objective import Objective, Wanted

pytest.importorskip("triton")

from veomni_hook.kernels.linear_cross_entropy import triton as kernels


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Several chunks, and several blocks a row, at sizes that the interpreter can do."""
    for constant, value in OF_TRITON.items():
        monkeypatch.setattr(kernels, constant, value)


def test_a_target_that_does_not_exist_makes_the_loss_nan():
    given, target = operands(torch.float32, DEVICE)
    for wrong in (given[1].shape[0], -1):
        target[3] = wrong
        outputs, grads = gradients(loss_of(kernels, target, Objective()), given, [True, True, False])
        assert outputs[0].isnan() and all(grad.isnan().any() for grad in grads[:2])
        assert not outputs[1][[2, 4]].isnan().any()


def test_logits_of_minus_infinity():
    given, target = operands(torch.float32, DEVICE)
    target = target.clamp(max=50)
    given[2][60:] = -torch.inf
    outputs, grads = gradients(
        tokens_of(kernels, target, Objective(), Wanted(True, True, True)), given, [True] * 3
    )
    kept = [given[0], given[1][:60], given[2][:60]]
    expected, truth = gradients(
        tokens_of(reference, target, Objective(), Wanted(True, True, True)), kept, [True] * 3
    )
    torch.testing.assert_close(outputs, expected)
    torch.testing.assert_close(grads[0], truth[0])
    torch.testing.assert_close(grads[1][:60], truth[1])
    assert not grads[1][60:].any()


@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_the_gradient_is_the_memory_that_the_forward_filled(factor):
    given, target = operands(torch.float32, DEVICE)
    leaves = [tensor.requires_grad_() for tensor in given]
    loss = loss_of(kernels, target, Objective(), Wanted())(*leaves)[0]
    held = [tensor.data_ptr() for tensor in loss.grad_fn.saved_tensors if tensor is not None]
    (loss * factor).backward()
    assert {leaf.grad.data_ptr() for leaf in leaves} <= {*held}


@pytest.mark.slow
def test_sums_in_float32_lose_less(monkeypatch):
    rows, hidden, vocab = 512, 8, 8
    x, weight = torch.randn(rows, hidden, device=DEVICE), torch.randn(vocab, hidden, device=DEVICE)
    target = torch.randint(0, vocab, (rows,), device=DEVICE)
    truth = gradients(loss_of(reference, target, Objective(), Wanted()), [x, weight], [True, True])[1][1]
    errors = {}
    for accumulate in ("weight", "float32"):
        call = loss_of(kernels, target, Objective(accumulate=accumulate), Wanted())
        grads = gradients(call, [x.bfloat16(), weight.bfloat16()], [True, True])[1]
        errors[accumulate] = (grads[1].float() - truth).norm()
    assert errors["float32"] < 0.7 * errors["weight"]


@pytest.mark.slow
def test_the_operators_keep_their_contracts():
    (x, weight, bias), target = operands(torch.float32, DEVICE, rows=9)
    ops, dtypes = torch.ops.veomni_hook, (torch.float32, torch.float32)
    linear, number = (x, weight, bias, target), torch.tensor([7.0], device=DEVICE)
    for items, needed in ((None, [True] * 3), (number, [False, True, False])):
        call = (
            *linear, None, None, items, torch.rand(9, device=DEVICE), -100, 1.0, 3.0, 0.1, 0.1, None, 0.0, True, True,
            *dtypes, needed,
        )  # fmt: skip
        torch.library.opcheck(ops.linear_cross_entropy.default, call)
    ids, at = torch.randint(0, VOCAB, (9, 3), device=DEVICE), -torch.rand(9, 3, device=DEVICE)
    call = (
        *linear,
        ids,
        at,
        None,
        None,
        -100,
        1.0,
        3.0,
        0.0,
        0.1,
        -0.5,
        0.3,
        True,
        True,
        *dtypes,
        [True] * 3,
    )
    torch.library.opcheck(ops.linear_cross_entropy.default, call)
    rows = torch.rand(4, 9, device=DEVICE).unbind()
    for tokens, numbers in ((None, None), (ids, at)):
        call = (*linear, tokens, -100, 1.0, None, True, False)
        torch.library.opcheck(ops.token_statistics.default, call)
        call = (*linear, tokens, *rows[:2], numbers, *rows[2:], numbers, -100, 1.0, None, *dtypes, [True] * 3)
        torch.library.opcheck(ops.token_statistics_backward.default, call)
    torch.library.opcheck(ops.scale_.default, (torch.rand(9, device=DEVICE), number[0]))


@pytest.mark.parametrize(
    ("size", "rows"),
    [
        ((8192, 1024, 151936, 2), 1024),
        ((8192, 2047, 151936, 2), 1024),
        ((8192, 2048, 151936, 2), 2048),
        ((8192, 2880, 201088, 2), 2048),
        ((10000, 4096, 151936, 2), 3072),
        ((8193, 5120, 151936, 2), 4096),
        ((8192, 2048, 16384, 2), 8192),
        ((5, 64, 33, 4), 128),
        ((0, 64, 33, 4), 128),
    ],
    ids=str,
)
def test_rows_of_a_chunk(size, rows, monkeypatch):
    monkeypatch.undo()
    assert kernels.chunk_rows(*size) == rows


@pytest.mark.parametrize("call", [loss_of, tokens_of])
@pytest.mark.parametrize("module", [kernels, torch_kernels])
def test_logits_are_freed_before_the_weights_gradient_is_converted(module, call, monkeypatch):
    kept, summed = [], module.Sums

    class Sums(summed):
        def add(self, chunk):
            super().add(chunk)
            kept.append(weakref.ref(chunk.padded))

        def results(self):
            assert kept
            assert all(each() is None for each in kept)
            return super().results()

    monkeypatch.setattr(module, "Sums", Sums)
    given, target = operands(torch.float32, DEVICE)
    gradients(call(module, target, Objective(), Wanted(log_probs=True)), given, [True] * 3)
