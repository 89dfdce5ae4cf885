"""MX, where 32 neighbours share a scale: the definition, its casts in Triton, and a layer of it."""

from functools import partial

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from veomni_hook.errors import KernelError
from veomni_hook.kernels.float8 import products, reference
from veomni_hook.kernels.float8.linear import MXLinear, float8_linear
from veomni_hook.kernels.float8.reference import dequantised, quantised
from veomni_hook.settings import precision_of

pytest.importorskip("triton")

from tests.kernels.float8 import test_products
from tests.kernels.float8.test_products import assert_within, operands
from tests.kernels.matching import DEVICE
from veomni_hook.kernels.float8 import triton as kernels

ON_CPU = pytest.mark.skipif(DEVICE == "cuda", reason="the definition is computed on a CPU")


def error_of(x):
    """The most that an element of ``x`` changes: half a step of its own size, or of the smallest of its 32."""
    *_, exponents = quantised(x, mx=True)
    scale = torch.exp2(exponents.double() - 127).repeat_interleave(32, 1)[:, : x.shape[1]]
    return 2**-4 * x.abs().double() + 2**-10 * scale


bound = partial(test_products.bound, error_of=error_of)


def test_the_definition():
    """Each 32 neighbours are a row of `quantised`, whose scale is a power of two; the last may be fewer."""
    x = torch.randn(5, 80) * torch.logspace(-20, 20, 80)
    x[1, 40], x[2, 70], x[3] = torch.nan, torch.inf, 0
    values, exponents = quantised(x, mx=True)
    assert (values.shape, exponents.shape, exponents.dtype) == ((5, 80), (5, 3), torch.uint8)
    for part in range(3):
        q, scale = quantised(x[:, 32 * part : 32 * (part + 1)])
        found = torch.where(exponents[:, part] == 255, torch.nan, 2.0 ** (exponents[:, part].float() - 127))
        assert torch.equal(found.nan_to_num(-1), scale[:, 0].nan_to_num(-1))
        same = values[:, 32 * part : 32 * (part + 1)].float().nan_to_num(-1) == q.float().nan_to_num(-1)
        assert same.all()
    assert (exponents == 255).nonzero().tolist() == [[1, 1], [2, 2]]
    back = dequantised(values, exponents)
    finite = back.isfinite()
    assert (~finite).sum() == 32 + 16
    assert ((back - x).abs().double() <= error_of(x.nan_to_num(0, 0, 0)))[finite].all()


def exact(rows, columns):
    """Normal numbers of the format, times powers of two: the interpreter does not round to float8."""
    torch.manual_seed(0)
    q = torch.randn(rows, columns).to(reference.FLOAT8).float()
    q = torch.where(q.abs() < 2**-5, 0.5, q)
    q[:, ::16] = 448
    return (q * 2.0 ** torch.randint(-8, 4, (rows, 1))).to(DEVICE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(1, 32), (7, 96), (130, 64), (70, 48), (3, 2, 64)], ids=str)
def test_casts_are_those_of_the_definition(shape, dtype):
    x = exact(torch.Size(shape[:-1]).numel(), shape[-1]).to(dtype).view(shape)
    for matrices, turned in ((x, False), (x.transpose(-1, -2).contiguous(), True)):
        q, scale = kernels.in_mx(matrices, turned=turned)
        expected = quantised(x.reshape(-1, shape[-1]), mx=True)
        assert (q.shape, scale.shape[:-1]) == (x.shape, x.shape[:-1])
        assert torch.equal(scale.view(expected[1].shape), expected[1])
        assert torch.equal(q.float().view(expected[0].shape), expected[0].float())


def test_casts_of_strides_of_nothing_and_of_what_is_not_finite():
    x = exact(24, 96).bfloat16()
    for part in (x[::2, :64], x.t().contiguous().t()):
        assert torch.equal(kernels.in_mx(part)[1], quantised(part, mx=True)[1])
        assert torch.equal(kernels.in_mx(part, turned=True)[1], quantised(part.t(), mx=True)[1])
    assert [tensor.shape for tensor in kernels.in_mx(x[:0])] == [(0, 96), (0, 3)]
    x[3, 40], x[5, 0] = torch.inf, torch.nan
    assert (kernels.in_mx(x)[1] == 255).nonzero().tolist() == [[3, 1], [5, 0]]
    assert (kernels.in_mx(x, turned=True)[1] == 255).nonzero().tolist() == [[0, 0], [40, 0]]


@pytest.mark.skipif(DEVICE == "cpu", reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("turned", [False, True])
def test_rounding_is_that_of_torch(turned):
    x = torch.randn(512, 2048, device=DEVICE).bfloat16()
    for one, other in zip(
        kernels.in_mx(x, turned=turned), quantised(x.t() if turned else x, mx=True), strict=True
    ):
        assert torch.equal(one.float(), other.float())


@ON_CPU
@pytest.mark.parametrize("rows", [48, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_results_and_gradients_are_within_the_bound_of_the_format(dtype, rows):
    x, w, bias, dy = operands(dtype, rows, 96, 64)
    leaves = [tensor.clone().requires_grad_() for tensor in (x, w, bias)]
    y = float8_linear(*leaves, mx=True)
    y.backward(dy)
    dx, dw, dbias = (leaf.grad for leaf in leaves)
    exact = [tensor.double() for tensor in (x, w, bias, dy)]
    assert_within(y, functional.linear(*exact[:3]), bound(x, w), dtype)
    assert_within(dx, exact[3] @ exact[1], bound(dy, w.t()), dtype)
    if rows % 32:
        assert torch.equal(dw, dy.t() @ x)
    else:
        assert_within(dw, exact[3].t() @ exact[0], bound(dy.t(), x.t()), dtype)
    assert torch.equal(dbias, dy.sum(0))


def forward(a, b, mx):
    return float8_linear(a, b, mx=mx)


def of_input(a, b, mx):
    return products.gradients(a, mx=mx).of_input(b.t().contiguous())


def of_weight(a, b, mx):
    return products.gradients(a.t().contiguous(), mx=mx).of_weight(b.t().contiguous())


@ON_CPU
@pytest.mark.parametrize("product", [forward, of_input, of_weight])
def test_small_neighbours_keep_their_digits_beside_large_ones(product):
    a, b = torch.randn(64, 96), torch.randn(32, 96)
    a[:, :32] *= 2.0**20
    b[:, 64:] *= 2.0**20
    a[:, 64:], b[:, :32] = 0, 0
    expected = a @ b.t()
    apart = [(product(a, b, mx) - expected).norm() / expected.norm() for mx in (True, False)]
    assert apart[0] < 2**-4
    if product is not of_weight:  # whose rows have scales of their own anyway
        assert apart[1] > 0.5


@ON_CPU
def test_a_layer():
    torch.manual_seed(0)
    module, (x, *_) = torch.nn.Linear(96, 64), operands(rows=64, inner=96)
    module.__class__ = MXLinear
    x.requires_grad_()
    assert torch.equal(module(x), float8_linear(x, module.weight, module.bias, mx=True))
    assert not module.plain_because
    found, expected = (
        torch.autograd.grad(call(x).square().sum(), (x, module.weight))
        for call in (module, torch.compile(module, backend="aot_eager", fullgraph=True))
    )
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    narrow = torch.nn.Linear(96, 48)
    narrow.__class__ = MXLinear
    narrow(x)
    assert narrow.plain_because == "its weight is 48 x 96, which are no multiples of 32"
    for turned in (False, True):
        torch.library.opcheck(torch.ops.veomni_hook.float8_mx.default, (x.detach(), turned))


@pytest.mark.parametrize("shape", [(128, 4), (256, 12), (1, 1), (300, 7)])
def test_scales_have_the_order_of_cublas(shape):
    """And of torch's own tests: checked once against their `to_blocked`."""
    scale = torch.randint(1, 255, shape, dtype=torch.uint8)
    rows, tiles = shape[0], -(-shape[1] // 4)
    expected = torch.zeros(-(-rows // 128) * tiles * 512, dtype=torch.uint8)
    for row in range(rows):
        for column in range(shape[1]):
            tile = row // 128 * tiles + column // 4
            expected[512 * tile + row % 32 * 16 + row % 128 // 32 * 4 + column % 4] = scale[row, column]
    found = products._tiled(scale)
    assert found.dtype is torch.float8_e8m0fnu
    assert torch.equal(found.view(torch.uint8), expected)


@pytest.mark.parametrize(("rows", "inner", "outer"), [(64, 96, 64), (300, 160, 4096)])
def test_torch_accepts_the_products_of_a_gpu(rows, inner, outer):
    """By its own checks of shapes, dtypes and scales; no GPU with MX was there to multiply."""
    with FakeTensorMode():
        casts = [
            (torch.empty(size, inner, dtype=reference.FLOAT8, device="cuda"),
             torch.empty(size, inner // 32, dtype=torch.uint8, device="cuda"))
            for size in (rows, outer)
        ]  # fmt: skip
        y = products._multiplied(*casts, torch.empty(outer, device="cuda"), torch.float16)
    assert (y.shape, y.dtype, y.device.type) == ((rows, outer), torch.float16, "cuda")


def test_a_gpu_without_mx_is_an_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    for capability, lacks in (((9, 0), "a GPU (9.0)"), ((10, 0), ""), ((12, 0), "")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, of=capability: of)
        products._lacks.cache_clear()
        assert products._lacks("cuda", 0, mx=True) == lacks
    products._lacks.cache_clear()
    monkeypatch.setattr(products, "_lacks", lambda *_, **__: "H200 (9.0)")
    with pytest.raises(KernelError, match="has no mxfp8 products") as caught:
        products.check_device(torch.empty(0, device="meta"), mx=True)
    assert "Blackwell" in caught.value.fix and "precision=float8" in caught.value.fix


def test_the_setting():
    assert precision_of("last=1, mxfp8") == "mxfp8,last=1"
    assert precision_of({"mxfp8": True, "skip": ["mlp"]}) == "mxfp8,skip=mlp"
    for value in ("float8,mxfp8", "mxfp8=1", "mxfp4", "first=1"):
        with pytest.raises(ValueError, match="mxfp8"):
            precision_of(value)
