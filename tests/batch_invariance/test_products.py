"""Products while torch's operators are replaced: values, rows, and what is left to torch."""

import pytest
import torch

from veomni_hook.batch_invariance import products


@pytest.fixture
def replaced():
    products.install()
    yield
    products.uninstall()


CALLS = {
    "mm": lambda a, b, out: a @ b,
    "mm.out": lambda a, b, out: torch.mm(a, b, out=out),
    "addmm": lambda a, b, out: torch.addmm(torch.ones(b.shape[1]), a, b, beta=0.5, alpha=2),
    "addmm.out": lambda a, b, out: torch.addmm(torch.ones(b.shape[1]), a, b, out=out),
    "addmm_": lambda a, b, out: out.fill_(1).addmm_(a, b, beta=2),
    "bmm": lambda a, b, out: (a[None] @ b[None])[0],
    "bmm.out": lambda a, b, out: torch.bmm(a[None], b[None], out=out[None])[0],
    "baddbmm": lambda a, b, out: torch.baddbmm(out.zero_()[None], a[None], b[None], alpha=3)[0],
    "baddbmm.out": lambda a, b, out: torch.baddbmm(out.zero_()[None] + 1, a[None], b[None], out=out[None])[0],
    "baddbmm_": lambda a, b, out: out.fill_(1)[None].baddbmm_(a[None], b[None])[0],
    "linear": lambda a, b, out: torch.nn.functional.linear(a, b.t(), torch.ones(b.shape[1])),
}


def test_all_operators_are_called_here():
    assert {*products.OPERATORS} == {*CALLS} - {"linear"}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("turned", [False, True])
def test_values_and_rows(name, turned, monkeypatch):
    torch.manual_seed(0)
    a, b = torch.randn(37, 190), torch.randn(64, 190).t() if turned else torch.randn(190, 64)
    right = CALLS[name](a, b, torch.empty(37, 64)).clone()
    counted = []
    by_rows = products._by_rows
    monkeypatch.setattr(products, "_by_rows", lambda *operands: counted.append(1) or by_rows(*operands))
    products.install()
    try:
        found = CALLS[name](a, b, torch.empty(37, 64)).clone()
        assert counted
        torch.testing.assert_close(found, right, atol=1e-4, rtol=1e-4)
        for first, last in ((0, 1), (5, 12), (30, 37)):
            part = CALLS[name](a[first:last], b, torch.empty(last - first, 64))
            assert torch.equal(part, found[first:last])
    finally:
        products.uninstall()
    del counted[:]
    CALLS[name](a, b, torch.empty(37, 64))
    assert not counted


def test_groups(replaced):
    a, b = torch.randn(24, 32).bfloat16(), torch.randn(3, 32, 16).bfloat16()
    ends = torch.tensor([8, 8, 24], dtype=torch.int32)
    found = torch._grouped_mm(a, b, offs=ends)
    torch.testing.assert_close(found, torch.cat([a[:8] @ b[0], a[8:] @ b[2]]))


def test_gradients(replaced):
    a, b = (torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((3, 5), (5, 4)))
    assert torch.autograd.gradcheck(lambda x, y: x @ y, (a, b))


def test_what_is_left_to_torch(replaced):
    assert torch.equal(
        torch.ones(2, 3, dtype=torch.long) @ torch.ones(3, 2, dtype=torch.long), torch.full((2, 2), 3)
    )
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        torch.mm(torch.ones(2, 3), torch.ones(2, 3))
    with pytest.raises(RuntimeError, match="dtype"):
        torch.mm(torch.ones(2, 3), torch.ones(3, 2).double())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("turned", [False, True])
def test_on_a_gpu(dtype, turned, replaced):
    torch.manual_seed(0)
    for rows, inner, columns in ((700, 512, 768), (300, 200, 136), (129, 72, 40), (90, 33, 17)):
        a = torch.randn(rows, inner, device="cuda", dtype=dtype)
        b = torch.randn(columns, inner, device="cuda", dtype=dtype).t() if turned else None
        b = torch.randn(inner, columns, device="cuda", dtype=dtype) if b is None else b
        found = a @ b
        right = (a.double() @ b.double()).to(dtype)
        torch.testing.assert_close(found, right, atol=2e-2 if dtype.itemsize == 2 else 1e-3, rtol=1e-2)
        for first, last in ((0, 1), (3, 67), (7, 72), (1, rows)):
            assert torch.equal(a[first:last] @ b, found[first:last]), (rows, first, last)
