"""Spellings of one computation have the same form and the same bits; similar computations have neither."""

import pytest
import torch

from tests.patches.graph.code import executed, form, one
from veomni_hook.patches.graph import digest

SAME = {
    "as another": ["x.to(y.dtype)", "x.type_as(y)", "x.to(dtype=y.dtype)"],
    "square": ["x.pow(2)", "x ** 2", "torch.square(x)", "x.square()", "torch.pow(x, 2)", "x.pow(exponent=2.0)"],
    "square in float32": ["x.float() * x.float()", "x.float() ** 2", "x.float().square()", "torch.pow(x.float(), 2)"],
    "inverse root": ["torch.rsqrt(x.float())", "x.float().pow(-0.5)", "torch.pow(x.float(), -0.5)", "x.float() ** -0.5"],
    "root": ["x.float().sqrt()", "x.float() ** 0.5"],
    "mean": ["x.mean(-1, keepdim=True)", "torch.mean(x, dim=-1, keepdim=True)", "x.mean([-1], True)", "x.mean(axis=-1, keepdims=True)"],
    "product": ["x * y", "y * x", "torch.mul(x, y)", "x.mul(y)", "torch.multiply(y, x)"],
    "sum": ["x + y", "y.add(x)", "torch.add(x, y)", "torch.add(x, y, alpha=1)"],
    "difference": ["x - y", "torch.sub(x, y)", "x + -y", "-y + x", "x.subtract(y)"],
    "minus": ["-x * y", "x * -y", "-(x * y)", "torch.neg(x * y)", "(-x).mul(y)"],
    "softmax": ["F.softmax(x, dim=-1)", "x.softmax(-1)", "torch.softmax(x, dim=-1)", "nn.functional.softmax(x, -1)"],
    "silu": ["F.silu(x)", "torch.nn.functional.silu(x)", "nn.functional.silu(input=x)"],
    "first half": ["x[..., : x.shape[-1] // 2]", "x[..., 0 : x.size(-1) // 2 : 1]", "x.narrow(-1, 0, x.shape[-1] // 2)"],
    "parts": ["x.split([2, 6], dim=-1)[1]", "torch.split(x, (2, 6), -1)[1]", "x[..., 2:]"],
    "unsqueeze": ["x.unsqueeze(1)", "x[:, None]", "torch.unsqueeze(x, dim=1)", "x[:, None, :]"],
    "transposed": ["x.transpose(0, 1)", "x.transpose(1, 0)", "torch.swapaxes(x, 0, 1)", "x.swapdims(dim0=1, dim1=0)"],
    "reshape": ["x.reshape(4, -1)", "x.view(4, -1)", "x.view((4, -1))", "torch.reshape(x, (4, -1))", "x.contiguous().view(4, -1)"],
    "cat": ["torch.cat((x, y), dim=-1)", "torch.cat([x, y], -1)", "torch.concat(tensors=(x, y), axis=-1)"],
    "row": ["x[0]", "x.unbind(0)[0]", "torch.unbind(x)[0]", "x.select(0, 0)"],
    "greater": ["x > y", "y < x", "torch.gt(x, y)", "torch.greater(x, y)", "y.lt(x)"],
    "one": ["x.float() + 1", "1.0 + x.float()"],
    "promotion": ["x.float() * y", "x.float() * y.float()", "y * x.float()"],
    "cast of float32": ["(x.float() * 2).float()", "x.float() * 2.0"],
    "nothing": ["x.to(x.dtype)", "x.type_as(x)", "x[..., :]", "x[:]"],
    "where": ["torch.where(x > 0)[0]", "torch.nonzero(x > 0, as_tuple=True)[0]", "(x > 0).nonzero(as_tuple=True)[0]"],
    "reciprocal": ["1 / x.float()", "1.0 / x.float()", "x.float().reciprocal()"],
    "choice": ["x if y is None else y", "y if y is not None else x", "y if not (y is None) else x"],
    "matmul": ["x @ y.t()", "torch.matmul(x, y.transpose(0, 1))", "x.matmul(y.t())", "torch.mm(x, y.t())"],
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SAME)
def test_spellings_have_one_form_and_the_same_bits(name, dtype):
    torch.manual_seed(0)
    x, y = torch.rand(4, 8).to(dtype), torch.randn(4, 8).to(dtype)
    first, *others = SAME[name]
    expected = executed(one(first, "x, y"))(x, y)
    for other in others:
        assert digest(form(one(other, "x, y"))) == digest(form(one(first, "x, y"))), other
        found = executed(one(other, "x, y"))(x, y)
        assert torch.equal(torch.as_tensor(found), torch.as_tensor(expected)), other


DIFFERENT = {
    "order of a difference": ["x - y", "y - x"],
    "association": ["(x * y) * z", "x * (y * z)"],
    "cast": ["x.float() * 2", "(x * 2).float()", "x * 2"],
    "dtype": ["x.float()", "x.half()", "x.bfloat16()", "x.to(y.dtype)"],
    "cast before or after": ["(x.float() * y.float()).to(x.dtype)", "x.float().to(x.dtype) * y"],
    "constant": ["x + 1e-6", "x + 1e-5"],
    "number type": ["x + 1", "x + 1.0", "x + True"],
    "root": ["1 / x.float().sqrt()", "x.float().rsqrt()"],
    # In bfloat16 these round differently; under autocast some are computed in float32.
    "unknown dtype": ["x.pow(-0.5)", "x.rsqrt()", "x * x", "x.pow(2)", "x.sqrt()", "x.pow(0.5)"],
    "reduction": ["x.mean(-1)", "x.mean(-1, keepdim=True)", "x.mean(0)", "x.sum(-1)"],
    "half": ["x[..., : x.shape[-1] // 2]", "x[..., x.shape[-1] // 2 :]", "x[..., ::2]", "x[..., 1::2]"],
    "chunk": ["x.chunk(2, dim=-1)[0]", "x[..., : x.shape[-1] // 2]"],
    "which part": ["x.chunk(2, dim=-1)[0]", "x.chunk(2, dim=-1)[1]", "x.chunk(2)[0]", "x.chunk(3, dim=-1)[0]"],
    "order of a cat": ["torch.cat((x, y), -1)", "torch.cat((y, x), -1)", "torch.cat((x, y), 0)", "torch.stack((x, y), -1)"],
    "sign": ["torch.cat((-x, y), -1)", "torch.cat((x, -y), -1)", "torch.cat((x, y), -1)"],
    "activation": ["F.silu(x)", "F.gelu(x)", "F.gelu(x, approximate='tanh')", "x * x.sigmoid()"],
    "dimension from either end": ["x.unsqueeze(1)", "x.unsqueeze(-2)"],
    "interleave": ["x.repeat_interleave(2, dim=-1)", "torch.cat((x, x), -1)", "x.repeat(1, 2)"],
    "clamp": ["x.clamp(max=1)", "x.clamp(min=1)", "x.clamp(-1, 1)", "x.clamp(max=2)"],
    "test": ["x if y is None else z", "z if y is None else x", "x if y else z"],
    "module": ["x.float().softmax(-1)", "F.softmax(x, -1, dtype=torch.float32)", "F.log_softmax(x.float(), -1)"],
    "device": ["x.to(y.device)", "x", "x.to(y.dtype)"],
    "sequence": ["(x, y)", "(y, x, x)", "x"],
}  # fmt: skip


@pytest.mark.parametrize("name", DIFFERENT)
def test_neighbours_have_forms_of_their_own(name):
    digests = {text: digest(form(one(text, "x, y, z"))) for text in DIFFERENT[name]}
    assert len(set(digests.values())) == len(digests), digests


def test_parts_of_a_call_have_no_common_dtype():
    text = "def f(g, x):\n    a, b = g(x)\n    return b.to(a.dtype)\n"
    assert ".to(" in repr(form(text).result)


def test_a_product_of_matrices_may_be_in_another_dtype():
    # Autocast computes it in 16 bits, so the cast is not redundant.
    assert form(one("F.linear(x.float(), y).float()", "x, y")).result.op == "cast"


def test_what_a_name_hides_is_not_torch():
    real = "def f(x):\n    return F.silu(x)\n"
    assert digest(form(real)) != digest(form(real, "from somewhere import F\n"))
    hidden = "def f(x, F):\n    return F.silu(x)\n"
    assert digest(form(hidden)) != digest(form(real))
    twice = "try:\n    import torch.nn.functional as F\nexcept ImportError:\n    F = None\n"
    assert digest(form(real, twice)) != digest(form(real))
