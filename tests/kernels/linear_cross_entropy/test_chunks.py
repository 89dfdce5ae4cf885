"""Products whose widths are padded: on a CPU by force, since only cuBLAS needs it."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from tests.kernels.linear_cross_entropy.objectives import (
    OBJECTIVES,
    ROWS,
    TOKENS,
    loss_of,
    tokens_of,
)
from tests.kernels.matching import assert_matches
from veomni_hook.kernels.linear_cross_entropy import chunks, reference
from veomni_hook.kernels.linear_cross_entropy import torch as chunked
from veomni_hook.kernels.linear_cross_entropy.autograd import Needed
from veomni_hook.kernels.linear_cross_entropy.chunks import Head
from veomni_hook.kernels.linear_cross_entropy.objective import Objective, Wanted
from veomni_hook.kernels.linear_cross_entropy.transform import Transform

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
#: Vocabulary and hidden size: all of the weight is copied, or its last rows.
SIZES = [(55, 16), (131, 16), (1003, 16), (141, 13), (48, 15)]


@pytest.fixture(autouse=True)
def padded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks, and few rows to copy, so that there are others."""
    monkeypatch.setattr(chunks, "PADDED_ON", frozenset({"cpu", "cuda"}))
    monkeypatch.setattr(chunks, "COPIED", 64 * 16)
    monkeypatch.setattr(chunks, "ROWS_COPIED", 64)
    monkeypatch.setattr(chunked, "CHUNK_ROWS", 4)
    monkeypatch.setattr(chunked, "CHUNK_LOGITS", 0)
    monkeypatch.setattr(chunked, "CHUNK_LOGITS_GPU", 0)


@pytest.fixture(params=["torch", "triton"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Every backend that uses chunks."""
    if request.param == "torch":
        return chunked
    pytest.importorskip("triton")
    from veomni_hook.kernels.linear_cross_entropy import triton as kernels

    for name, value in (
        ("CHUNK_ROWS", 1),
        ("LEAST_ROWS", 1),
        ("CHUNK_BYTES", 1),
        ("TILE", 4),
        ("BLOCK", 128),
    ):
        monkeypatch.setattr(kernels, name, value)
    return kernels


def operands(dtype: torch.dtype, vocab: int, hidden: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Targets are also in what is copied; some are ignored."""
    target = torch.randint(0, vocab, (ROWS,))
    target[0], target[2] = vocab - 1, vocab - 2
    target[1::5] = -100
    given = [torch.randn(ROWS, hidden), torch.randn(vocab, hidden) * 0.3, torch.randn(vocab)]
    return [each.to(DEVICE, dtype) for each in given], target.to(DEVICE)


@pytest.mark.sample(5)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_equals_the_reference(backend: ModuleType, size: tuple[int, int], dtype: torch.dtype) -> None:
    (x, weight, bias), target = operands(dtype, *size)
    for given in ([x, weight], [x, weight, bias]):
        sides = [loss_of(module, target, Objective()) for module in (backend, reference)]
        assert_matches(*sides, given)


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_equals_the_reference_for_every_objective(backend: ModuleType, name: str) -> None:
    given, target = operands(torch.float32, 1003, 16)
    objective = OBJECTIVES[name](DEVICE)
    assert_matches(loss_of(backend, target, objective), loss_of(reference, target, objective), given)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tokens_equal_the_reference(backend: ModuleType, dtype: torch.dtype) -> None:
    given, target = operands(dtype, 131, 16)
    objective = Objective(transform=Transform(scale=0.7, softcap=3.0))
    sides = [
        tokens_of(module, target, objective, Wanted(True, True, False)) for module in (backend, reference)
    ]
    assert_matches(*sides, given, tolerance=TOKENS[dtype])


@pytest.mark.parametrize("wanted", [(True, False, False), (False, True, False), (False, False, True)])
def test_gradients_only_where_wanted(backend: ModuleType, wanted: tuple[bool, bool, bool]) -> None:
    given, target = operands(torch.float32, 131, 16)
    sides = [loss_of(module, target, Objective()) for module in (backend, reference)]
    assert_matches(*sides, given, wanted)


def test_a_gradient_that_is_there_and_a_weight_that_is_tied(backend: ModuleType) -> None:
    (_, weight, _), target = operands(torch.float32, 131, 16)
    tokens = torch.randint(0, 131, (ROWS,), device=DEVICE)
    found = []
    for module in (backend, reference):
        table = weight.clone().requires_grad_()
        table.grad = torch.ones_like(table)
        held = table.grad
        loss = loss_of(module, target, Objective(), Wanted())
        for _ in range(2):
            loss(functional.embedding(tokens, table), table)[0].backward()
        assert table.grad is held
        found.append(held)
    torch.testing.assert_close(*found)


def test_what_is_ignored_and_infinite_has_no_gradient(backend: ModuleType) -> None:
    (x, weight, _), target = operands(torch.float32, 131, 16)
    x[1] = torch.inf
    assert target[1] == -100
    x.requires_grad_()
    loss_of(backend, target, Objective(), Wanted())(x, weight)[0].backward()
    assert x.grad is not None and not x.grad[1].any() and x.grad.isfinite().all()


class Widths(TorchDispatchMode):
    """The widths of all products, and the distance of rows of their operands."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[int] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_):
            a, b = args[-2:]
            self.found += [*a.shape[1:], *b.shape, *(max(each.stride()) for each in (a, b))]
        return function(*args, **kwargs)


@pytest.mark.parametrize("in_float32", [False, True])
@pytest.mark.parametrize("vocab", [55, 131, 1003])
def test_every_product_is_of_widths_that_suit_cublas(vocab: int, in_float32: bool) -> None:
    (x, weight, bias), _ = operands(torch.bfloat16, vocab, 16)
    total = torch.float32 if in_float32 else torch.bfloat16
    for added in (None, bias):
        with Widths() as widths:
            head = Head.of(weight, added)
            sums = chunks.Sums(x[:8], head, Needed(True, True, False), (total, torch.bfloat16))
            for chunk in chunks.chunks(x[:8], head, 4):
                sums.add(chunk)
        assert len(widths.found) >= 2 * 3 * 5
        odd = [width for width in widths.found if width % 8 and width != 4]  # the rows of a chunk
        assert not odd, odd


def test_a_head_that_suits_is_not_copied() -> None:
    weight = torch.randn(136, 16, dtype=torch.bfloat16)
    assert Head.of(weight, None) == (weight, None, 136, None, None)
    odd = torch.randn(131, 16, dtype=torch.bfloat16)
    assert Head.of(odd, None, aligned=False).rest is None
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
