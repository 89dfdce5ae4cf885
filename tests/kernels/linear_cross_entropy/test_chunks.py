"""Products whose widths are padded: on a CPU by force, since only cuBLAS needs it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.kernels.dispatched import Operators
from tests.kernels.linear_cross_entropy.objectives import ROWS
from tests.kernels.linear_cross_entropy.test_backends import DEVICE, backend_of, matches
from veomni_hook.kernels.linear_cross_entropy import chunks
from veomni_hook.kernels.linear_cross_entropy.autograd import Needed
from veomni_hook.kernels.linear_cross_entropy.chunks import Head


@pytest.fixture(autouse=True, params=["torch, padded"])
def backend(request):
    return backend_of(request.param, request)


def operands(dtype: torch.dtype, vocab: int, hidden: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Targets are also in what is copied; some are ignored."""
    target = torch.randint(0, vocab, (ROWS,))
    target[0], target[2] = vocab - 1, vocab - 2
    target[1::5] = -100
    given = [torch.randn(ROWS, hidden), torch.randn(vocab, hidden) * 0.3, torch.randn(vocab)]
    return [each.to(DEVICE, dtype) for each in given], target.to(DEVICE)


@pytest.mark.sample(6)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [(55, 16), (131, 16), (1003, 16), (141, 13), (48, 15)], ids=str)
@pytest.mark.parametrize("backend", ["torch, padded", "triton, padded"], indirect=True)
def test_vocabularies_that_are_copied_as_a_whole_or_in_their_last_rows(backend, size, dtype):
    (x, weight, bias), target = operands(dtype, *size)
    for given in ([x, weight], [x, weight, bias]):
        matches(backend, given, target)


@pytest.mark.parametrize("in_float32", [False, True])
@pytest.mark.parametrize("vocab", [55, 131, 1003])
def test_every_product_is_of_widths_that_suit_cublas(vocab: int, in_float32: bool) -> None:
    (x, weight, bias), _ = operands(torch.bfloat16, vocab, 16)
    total = torch.float32 if in_float32 else torch.bfloat16
    for added in (None, bias):
        widths: list[int] = []

        def note(operator: Any, operands: Any, _: Any, widths: list[int] = widths) -> None:
            """The widths of all products, and the distance of rows of their operands."""
            if operator.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_):
                a, b = [each for each in operands if isinstance(each, torch.Tensor)][-2:]
                widths += [*a.shape[1:], *b.shape, *(max(each.stride()) for each in (a, b))]

        with Operators(note):
            head = Head.of(weight, added)
            sums = chunks.Sums(x[:8], head, Needed(True, True, False), (total, torch.bfloat16))
            for chunk in chunks.chunks(x[:8], head, 4):
                sums.add(chunk)
        assert len(widths) >= 2 * 3 * 5
        odd = [width for width in widths if width % 8 and width != 4]  # the rows of a chunk
        assert not odd, odd


def test_a_head_that_suits_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(136, 16, dtype=torch.bfloat16)
    assert Head.of(weight, None) == (weight, None, 136, None, None)
    odd = torch.randn(131, 16, dtype=torch.bfloat16)
    with monkeypatch.context() as patch:
        patch.setattr(torch.compiler, "is_compiling", lambda: True)
        assert Head.of(odd, None).rest is None
    head = Head.of(odd, None)
    assert (head.whole, head.columns) == (72, 136) and head.rest is not None
    assert torch.equal(head.rest[:59], odd[72:]) and not head.rest[59:].any()
    # In float32 four columns are 16 bytes.
    assert Head.of(torch.randn(132, 16), None).rest is None


def test_only_where_cublas_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert Head.of(torch.randn(131, 16), None).rest is None
    with torch.device("meta"):
        assert Head.of(torch.randn(131, 16), None).rest is None
    assert {"cuda"} == chunks.PADDED_ON
