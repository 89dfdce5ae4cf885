"""Products in float8 against float64, within the format's bound, and what surrounds them."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from veomni_hook.errors import KernelError
from veomni_hook.kernels.float8 import linear as layer
from veomni_hook.kernels.float8 import products, reference
from veomni_hook.kernels.float8.linear import Float8Linear, float8_linear

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
#: torch 2.11 multiplies on CPUs with one scale for a tensor alone.
SCALES_ROWS = torch.torch_version.TorchVersion(torch.__version__) >= (2, 12)
ROUNDING = {torch.float32: 2**-20, torch.bfloat16: 2**-8, torch.float16: 2**-10}


def operands(dtype=torch.float32, rows=24, inner=64, outer=48):
    torch.manual_seed(0)
    spread = torch.exp(2 * torch.randn(rows, 1))
    x, w = torch.randn(rows, inner) * spread, torch.randn(outer, inner)
    dy = torch.randn(rows, outer) * spread.flip(0)
    return x.to(dtype), w.to(dtype), torch.randn(outer).to(dtype), dy.to(dtype)


def error_of(x):
    """The most that an element of ``x`` changes in float8: half a step of its own size, or of the smallest."""
    return 2**-4 * x.abs().double() + 2**-10 * reference.scales(x).double()


def bound(a, b, error_of=error_of):
    """The most that ``a b^T`` changes if both are in float8."""
    da, db = error_of(a), error_of(b)
    a, b = a.abs().double(), b.abs().double()
    return a @ db.t() + da @ b.t() + da @ db.t()


def assert_within(found, expected, most, dtype):
    off = (found.double() - expected).abs()
    assert (off <= most + ROUNDING[dtype] * (expected.abs() + most)).all()
    # The bound adds up what partly cancels: a format with fewer bits would stay in it.
    assert off.norm() < 2**-4 * expected.norm()
    assert off.norm() > 2**-7 * expected.norm()  # it is float8


def bound_of_sums(dy, x):
    """The same of ``dy^T x``, where the scales of dy's rows are part of the other factor."""
    scale = reference.scales(dy).double()
    q, wide = dy.double() / scale, x.double() * scale
    dq, dwide = error_of(dy) / scale, error_of(wide.t())
    return q.abs().t() @ dwide.t() + dq.t() @ wide.abs() + dq.t() @ dwide.t()


@pytest.mark.parametrize("rows", [24, 32])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_results_and_gradients_are_within_the_bound_of_the_format(dtype, rows):
    x, w, bias, dy = operands(dtype, rows)
    leaves = [tensor.clone().requires_grad_() for tensor in (x, w, bias)]
    y = float8_linear(*leaves)
    y.backward(dy)
    dx, dw, dbias = (leaf.grad for leaf in leaves)
    assert {tensor.dtype for tensor in (y, dx, dw, dbias)} == {dtype}
    exact = [tensor.double() for tensor in (x, w, bias, dy)]
    assert_within(y, functional.linear(*exact[:3]), bound(x, w), dtype)
    assert_within(dx, exact[3] @ exact[1], bound(dy, w.t()), dtype)
    if rows % 16:
        assert torch.equal(dw, dy.t() @ x)  # torch multiplies no such number
    else:
        assert_within(dw, exact[3].t() @ exact[0], bound_of_sums(dy, x), dtype)
    assert torch.equal(dbias, dy.sum(0))


@pytest.mark.skipif(not SCALES_ROWS, reason="this torch has one scale for a tensor on CPUs")
def test_torch_multiplies_as_the_definition():
    x, w, *_ = operands()
    a, b = reference.quantised(x), reference.quantised(w)
    y = torch._scaled_mm(
        a[0], b[0].t(), scale_a=a[1], scale_b=b[1].t(), out_dtype=torch.float32, use_fast_accum=True
    )
    torch.testing.assert_close(y, reference.product(a, b, torch.float32))


def test_scales_are_the_smallest_powers_of_two():
    x = torch.tensor([[448.0, 1], [448.5, 1], [-896, 1], [0.875, 0], [0, 0], [1e-38, 0]])
    scale = reference.scales(x)[:, 0].tolist()
    assert scale == [1, 2, 2, 2**-9, 2**-108, 2**-108]
    x, *_ = operands()
    q = reference.quantised(x)[0].float().abs().amax(1)
    assert ((q >= 224) & (q <= 448)).all()  # 224: rounded


def test_a_row_may_be_scaled():
    x, w, *_ = operands()
    by = torch.tensor([2.0**30, 2.0**-40, 1] * 8)[:, None]
    assert torch.equal(float8_linear(x * by, w), float8_linear(x, w) * by)
    assert torch.equal(float8_linear(x, w * by.repeat(2, 1)), float8_linear(x, w) * by.repeat(2, 1).t())


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_rows_that_are_not_finite_give_nan(value):
    x, w, *_ = operands()
    plain = float8_linear(x, w)
    x[3, 5] = value
    y = float8_linear(x, w)
    assert y[3].isnan().all()
    y[3] = plain[3]
    assert torch.equal(y, plain)
    x, w, _, dy = operands()
    w[7, 2] = value
    x.requires_grad_()
    y = float8_linear(x, w)
    assert y[:, 7].isnan().all()
    assert y.isnan().sum() == len(y)
    y.backward(dy)
    assert x.grad.isnan().all(0).tolist() == [column == 2 for column in range(64)]


def test_zeros_and_no_rows():
    x, w, bias, _ = operands()
    x[4] = 0
    assert torch.equal(float8_linear(x, w, bias)[4], bias)
    assert torch.equal(float8_linear(x, torch.zeros_like(w)), torch.zeros(24, 48))
    none = x[:0].clone().requires_grad_()
    y = float8_linear(none, w.requires_grad_())
    y.sum().backward()
    assert (y.shape, none.grad.shape) == ((0, 48), (0, 64))
    assert torch.equal(w.grad, torch.zeros_like(w))


def test_leading_dimensions_and_strides():
    x, w, bias, _ = operands()
    y = float8_linear(x, w, bias)
    assert torch.equal(float8_linear(x.view(2, 3, 4, 64), w, bias), y.view(2, 3, 4, 48))
    turned = x.t().contiguous().t()
    wide = torch.cat([x, x], 1)[:, :64]
    for same in (turned, wide):
        leaf, other = same.detach().requires_grad_(), x.clone().requires_grad_()
        for one in (leaf, other):
            result = float8_linear(one, w, bias)
            assert torch.equal(result, y)
            result.sum().backward()  # an expanded gradient
        assert torch.equal(leaf.grad, other.grad)


def float8(outer=48, inner=64, **options):
    torch.manual_seed(1)
    module = torch.nn.Linear(inner, outer, **options)
    module.__class__ = Float8Linear
    return module


def test_autocast():
    module, (x, *_) = float8(), operands()
    x.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = module(x)
        y.float().square().sum().backward()
    assert y.dtype is torch.bfloat16
    assert {tensor.grad.dtype for tensor in (x, module.weight, module.bias)} == {torch.float32}
    assert torch.equal(y, float8_linear(x.bfloat16(), module.weight, module.bias.bfloat16()))


def test_a_recorded_backward_has_the_derivatives_of_the_plain_layer():
    x, w, bias, _ = operands(torch.float64)
    leaves = [tensor.float().requires_grad_() for tensor in (x, w, bias)]
    found, expected = (
        torch.autograd.grad(function(*leaves).square().sum(), leaves[:2], create_graph=True)
        for function in (float8_linear, functional.linear)
    )
    # The slope 2 y comes from a product in float8.
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() < 2**-4 * other.norm()
    y = float8_linear(*leaves)
    (dx,) = torch.autograd.grad(y, leaves[0], torch.ones_like(y), create_graph=True)
    (dw,) = torch.autograd.grad(dx.square().sum(), leaves[1])
    torch.testing.assert_close(dw, 2 * len(x) * leaves[1].sum(0).expand(48, -1), rtol=1e-4, atol=1e-3)


def test_with_a_frozen_weight_the_input_is_not_kept():
    x, w, *_ = operands()
    x.requires_grad_()
    packed = []

    def pack(tensor):
        packed.append(tensor.data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = float8_linear(x, w)
        again = float8_linear(x, w.clone().requires_grad_())
    assert packed.count(x.data_ptr()) == 1  # of the second
    (y + again).sum().backward()
    y = float8_linear(x, w)
    (dx,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    torch.testing.assert_close(dx, w.sum(0).expand_as(x))


def test_checkpoints_give_the_same():
    module, (x, _, _, dy) = float8(), operands()
    results = []
    for call in (module, lambda x: checkpoint(lambda x: module(x * 2), x, use_reentrant=False)):
        module.zero_grad()
        leaf = (x * 2 if call is module else x).detach().requires_grad_()
        y = call(leaf)
        y.backward(dy)
        results.append((y, leaf.grad if call is not module else leaf.grad * 2, module.weight.grad))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_inputs_that_need_no_gradient():
    module, (x, _, _, dy) = float8(), operands()
    module(x).backward(dy)
    assert torch.equal(module.weight.grad, dy.t() @ x)
    with torch.no_grad():
        assert not module(x).requires_grad


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda module, x: (module.double(), x.double()), "the input is torch.float64"),
        (lambda module, x: (float8(40), x), "its weight is 40 x 64, which are no multiples of 16"),
        (lambda module, x: (module, x[0]), "no rows"),
    ],
)
def test_what_does_not_fit_runs_as_upstream(change, reason):
    module, x = change(float8(), operands()[0])
    assert torch.equal(module(x), functional.linear(x, module.weight, module.bias))
    assert reason in module.plain_because
    module = float8()
    module(operands()[0])
    assert not module.plain_because


def test_torch_func_and_replaced_functions_run_as_upstream(monkeypatch):
    module, (x, *_) = float8(), operands()
    slopes = torch.func.vmap(torch.func.grad(lambda row: module(row[None]).sum()))(x)
    torch.testing.assert_close(slopes, module.weight.sum(0).expand_as(x))
    with monkeypatch.context() as patched:
        patched.setattr(functional, "linear", lambda x, w, b=None: x @ w.t() + b)
        torch.testing.assert_close(module(x), x @ module.weight.t() + module.bias)
    assert "has been replaced" in module.plain_because


def test_a_device_without_float8_is_an_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "A100")
    products._lacks.cache_clear()
    assert products._lacks("cuda", 0, mx=False) == "A100 (8.0)"
    assert products._lacks("npu", 0, mx=False) == "this device (npu)"
    products._lacks.cache_clear()
    with monkeypatch.context() as patched:
        patched.setattr(products, "find_spec", lambda _: None)
        assert "Triton is not installed" in products._lacks("cuda", 0, mx=False)
    products._lacks.cache_clear()
    with pytest.raises(KernelError, match=r"npu.* has no float8 products") as caught:
        products.check_device(SimpleNamespace(device=SimpleNamespace(type="npu"), get_device=lambda: 0))
    assert "8.9" in caught.value.fix
    x, w, *_ = operands()
    assert "no numbers" in layer.refuses(x.to("meta"), w.to("meta"), None)


def test_compiled():
    torch._dynamo.reset()
    module, (x, _, _, dy) = float8(), operands()
    compiled = torch.compile(module, fullgraph=True)
    results = []
    for call in (module, compiled):
        module.zero_grad()
        leaf = x.clone().requires_grad_()
        y = call(leaf)
        y.backward(dy)
        results.append((y.detach(), leaf.grad, module.weight.grad))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


def test_operators():
    x, *_ = operands()
    torch.library.opcheck(torch.ops.veomni_hook.float8_rows.default, (x,))
    for factors in (None, x[:, :1].float()):
        torch.library.opcheck(torch.ops.veomni_hook.float8_columns.default, (x, factors))
    q, _ = reference.quantised(x)
    # What else it checks multiplies operands by numbers.
    torch.library.opcheck(torch.ops.veomni_hook.float8_turned.default, (q,), test_utils="test_faketensor")
    assert torch.equal(
        products.gradients(x).of_input(torch.eye(64)), products.linear(x, torch.eye(64).t().contiguous())
    )
