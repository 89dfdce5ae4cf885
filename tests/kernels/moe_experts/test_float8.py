"""Experts in float8: the definition on a CPU, and Triton's kernels, compiled on a GPU."""

from types import SimpleNamespace

import pytest
import torch

from tests.kernels.moe_experts.backends import DEVICE, LAYOUTS
from tests.kernels.moe_experts.formulas import CASES, EXPERTS
from veomni_hook.kernels.float8.reference import FLOAT8, dequantised, quantised
from veomni_hook.kernels.moe_experts import float8
from veomni_hook.kernels.moe_experts import torch as by_torch
from veomni_hook.kernels.moe_experts.low_rank import AdaptedWeight, Part
from veomni_hook.kernels.moe_experts.operators import Needed

pytest.importorskip("triton")

from veomni_hook.kernels.gated_mlp.triton import ACTIVATIONS
from veomni_hook.kernels.moe_experts import triton, triton_float8, triton_products
from veomni_hook.kernels.moe_experts.triton_float8 import Cast, gate_gradients
from veomni_hook.kernels.moe_experts.triton_products import Expert
from veomni_hook.kernels.moe_experts.triton_routing import route
from veomni_hook.kernels.moe_experts.triton_tiles import Tile

#: HIDDEN, INNER and both of a gate: multiples of 16, and of 32 in MX.
SIZES, SIZES_OF_MX = {12: 32, 10: 48, 20: 96}, {12: 96, 10: 64, 20: 128}
TOKENS, TOP_K = 29, 3
RELU = ACTIVATIONS["relu"]


def rounded(x, mx=False):
    """Rows as float8 has them."""
    return dequantised(*quantised(x, mx=mx)).to(x.dtype)


class Product(torch.autograd.Function):
    """``x w^T``, and ``share`` times it, with what `float8` says of gradients."""

    @staticmethod
    def forward(ctx, x, w, share, second, mx):
        ctx.second, ctx.mx = second, mx
        ctx.save_for_backward(x, w, share)
        return rounded(x, mx) @ rounded(w, mx).t() * share

    @staticmethod
    def backward(ctx, dy):
        x, w, share = ctx.saved_tensors
        dx = rounded(dy, ctx.mx) @ rounded(w.t(), ctx.mx).t()
        of_tokens, wide = (dy, share * x) if ctx.second else (x, dy)
        if ctx.mx:
            q, wide = (rounded(factor.t(), True).t() for factor in (of_tokens, wide))
        else:
            q, scale = quantised(of_tokens)
            wide = rounded((wide * scale.to(x.dtype)).t()).t()
        slope = q.to(x.dtype).t() @ wide if ctx.second else wide.t() @ q.to(x.dtype)
        return dx * share, slope, (dx * x).sum(1, keepdim=True), None, None


def formula(case, x, index, weights, *operands, mx=False):
    """The experts one after the other."""
    layout, result = case.layout, torch.zeros_like(x)
    for number in range(EXPERTS):
        token, place = (index == number).nonzero(as_tuple=True)
        up, up_bias, down, down_bias = (
            [operand[number] for operand in operands]
            if layout.biased
            else (operands[0][number], 0, operands[1][number], 0)
        )
        up, down = (up.t(), down.t()) if layout.transposed else (up, down)
        both = Product.apply(x[token], up, x.new_ones(len(token), 1), False, mx) + up_bias
        parts = (both[:, 0::2], both[:, 1::2]) if layout.interleaved else both.chunk(2, 1)
        h = case.gate(*((both,) if layout.gate == "activation" else parts), *case.rest)
        share = weights[token, place, None]
        result = result.index_add(0, token, Product.apply(h, down, share, True, mx) + share * down_bias)
    return result


def operands(name, dtype=torch.float32, device="cpu", sizes=SIZES):
    torch.manual_seed(0)
    case = CASES[name].resized({**sizes, 5: EXPERTS})
    index = torch.rand(TOKENS, EXPERTS + 1).topk(TOP_K).indices  # the last one is nobody's
    weights = torch.rand(TOKENS, TOP_K)
    stacked = [torch.randn(EXPERTS, *shape) / shape[-1] ** 0.5 for shape in case.shapes.values()]
    floats = [torch.randn(TOKENS, sizes[12]) * torch.logspace(-1, 1, TOKENS)[:, None], weights, *stacked]
    x, *floats = (tensor.to(device, dtype).requires_grad_() for tensor in floats)
    return case, [x, index.to(device), *floats]


def slopes(run, leaves):
    result = run(*leaves)
    floats = [leaf for leaf in leaves if leaf.requires_grad]
    torch.manual_seed(1)
    grad = torch.randn(result.shape).to(result)
    return [result.detach(), *torch.autograd.grad(result, floats, grad)]


def assert_near(found, expected, most):
    """In norms: the last bit of a product can change a number of float8, here and there."""
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape and one.dtype is other.dtype
        apart = (one.double() - other.double()).norm() / other.double().norm()
        assert apart <= most, apart


@pytest.mark.parametrize("mx", [False, True], ids=["rows", "mx"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_definition(name, mx):
    case, leaves = operands(name, sizes=SIZES_OF_MX if mx else SIZES)
    assert float8.refuses(None, *leaves, *case.rest, mx=mx) is None
    found = slopes(lambda *leaves: float8.kernel(name, mx=mx)(*leaves, *case.rest), leaves)
    assert_near(found, slopes(lambda *leaves: formula(case, *leaves, mx=mx), leaves), 1e-3)
    plain = slopes(lambda *leaves: by_torch.kernel(name)(*leaves, *case.rest), leaves)
    for one, other in zip(found[:2], plain[:2], strict=True):
        assert 0.01 < (one - other).norm() / other.norm() < 0.2


def mx_by_definition(x, *, turned=False):
    """What `in_mx` returns."""
    x = x.transpose(-1, -2) if turned else x
    q, scale = quantised(x.reshape(-1, x.shape[-1]), mx=True)
    return q.view(x.shape), scale.view(*x.shape[:-1], -1)


def turned_to_mx_by_definition(x, routing, *, gathered):
    """What `_turned_to_mx` returns."""
    values = columns_of(x, routing, rows=routing.tokens if gathered else None, dtype=x.dtype).values
    return mx_by_definition(values)


def columns_by_definition(x):
    """What `quantised_columns` returns."""
    transposed = x.transpose(-1, -2)
    q, scale = quantised(transposed.reshape(-1, transposed.shape[-1]))
    return q.view(transposed.shape), scale.view(*transposed.shape[:-1], 1)


def columns_of(x, routing, factors=None, rows=None, dtype=FLOAT8):
    """Rows as columns of float8, and what experts' columns times their tokens' ``factors`` are divided by.

    ``rows`` says which rows of x they are, by default those in order.
    """
    columns, block = x.shape[1], routing.block
    q = torch.zeros(columns, routing.max_tiles * block, device=x.device)
    scale = torch.zeros(routing.num_experts, columns, device=x.device)
    *of_tiles, (number, *_) = (part.tolist() for part in routing.tiles.split(routing.max_tiles))
    for expert in range(routing.num_experts):
        tiles = [m for m in range(number) if of_tiles[0][m] == expert]
        places = [torch.arange(of_tiles[1][m], min(of_tiles[2][m], of_tiles[1][m] + block)) for m in tiles]
        if not places:
            continue
        place = torch.cat(places).to(x.device)
        values = x[place if rows is None else rows[place].long()].float()
        if factors is not None:
            cast, of_expert = quantised((values * factors[routing.tokens[place].long()].view(-1, 1)).t())
            values, scale[expert] = cast.float().t(), of_expert[:, 0]
        for m, part in zip(tiles, values.split(block), strict=True):
            q[:, m * block : m * block + len(part)] = part.t()
    return Cast(q.to(dtype), scale)


def gates_by_definition(grad, x, *operands, keep=True, **options):
    """What `gate_gradients` returns, from gradients that are not cast."""
    routing, needed = operands[2], operands[6]
    *_, sums, dz, weighted = gate_gradients(grad, x, *operands, **options)
    results = (
        Cast(*quantised(dz)) if needed.hidden_states else None,
        columns_of(dz, routing, x.scale) if needed.up else None,
        columns_of(weighted, routing, grad.scale) if needed.down else None,
        sums, dz, weighted,
    )  # fmt: skip
    if not keep and options["spend"]:
        operands[1].untyped_storage().resize_(0)
    return results if keep else (*results[:4], None, None)


#: By dtype of products, how far apart results may be: rounded first, a number can become another of float8.
MOST = {torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 0.2}
#: Where gates have a limit, one number on its other side makes 0.1.
LIMITED = 0.2
#: A GPU does not multiply float32 so, and the interpreter computes no bfloat16.
del MOST[torch.float32 if DEVICE == "cuda" else torch.bfloat16]


@pytest.fixture
def casts(monkeypatch):
    """By definition in the interpreter, which does not round to float8; and tiles that it computes soon."""
    if DEVICE == "cpu":
        monkeypatch.setattr(triton_float8, "quantised", quantised)
        monkeypatch.setattr(triton_float8, "quantised_columns", columns_by_definition)
        monkeypatch.setattr(triton_float8, "gate_gradients", gates_by_definition)
        monkeypatch.setattr(triton_float8, "in_mx", mx_by_definition)
        monkeypatch.setattr(triton_float8, "_turned_to_mx", turned_to_mx_by_definition)
        monkeypatch.setattr(triton_float8, "BLOCK", 32)
        monkeypatch.setattr(triton_float8, "float8_weight_tile", lambda _: Tile(32, 32, 32, 4, 2))


@pytest.mark.usefixtures("casts")
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("dtype", MOST, ids=str)
@pytest.mark.parametrize("mx", [False, True], ids=["rows", "mx"])
def test_triton(name, dtype, mx):
    """MX also on GPUs without it: Triton multiplies there in 16 bits, with the scales."""
    case, leaves = operands(name, dtype, DEVICE, SIZES_OF_MX if mx else SIZES)
    found = slopes(lambda *leaves: triton.in_float8(name, mx=mx)(*leaves, *case.rest), leaves)

    def wide(*leaves):
        floats = [leaf.float() if leaf.is_floating_point() else leaf for leaf in leaves]
        return formula(case, *floats, mx=mx).to(dtype)

    limited = dtype is not torch.float32 and "alpha" in name
    assert_near(found, slopes(wide, leaves), LIMITED if limited else MOST[dtype])


@pytest.mark.usefixtures("casts")
@pytest.mark.parametrize("name", ["gated", "gated_transposed"])
def test_rows_wider_than_gate_and_up_and_a_second_backward(monkeypatch, name):
    """Some columns of x at a time, after gate and up, spent, have given back their memory."""
    monkeypatch.setattr(triton_float8, "_TILE", 16)
    (dtype, most), *_ = MOST.items()
    case, leaves = operands(name, dtype, DEVICE, sizes={12: 112, 10: 16, 20: 32})
    result = triton.in_float8(name)(*leaves, *case.rest)
    floats = [leaf for leaf in leaves if leaf.requires_grad]
    grad = torch.randn_like(result)
    first, again = (torch.autograd.grad(result, floats, grad, retain_graph=True) for _ in range(2))
    expected = torch.autograd.grad(formula(case, *leaves), floats, grad)
    assert_near(first, expected, most)
    assert_near(again, expected, most)
    saved = [tensor for tensor in result.grad_fn.saved_tensors if tensor is not None]
    assert [tensor.shape[1] for tensor in saved if not tensor.untyped_storage().size()] == [32]


@pytest.mark.usefixtures("casts")
def test_memory_that_a_hook_of_saved_tensors_shares_is_kept(monkeypatch):
    monkeypatch.setattr(triton_float8, "gate_gradients", gate_gradients)
    dtype = next(iter(MOST))
    case, leaves = operands("gated", dtype, DEVICE)
    parts = []

    def packed(tensor):
        room = torch.empty(2, *tensor.shape, dtype=tensor.dtype, device=tensor.device)
        parts.append(room[1].copy_(tensor))
        return parts[-1]

    def run(*leaves):
        return triton.in_float8("gated")(*leaves, *case.rest)

    def hooked(*leaves):
        with torch.autograd.graph.saved_tensors_hooks(packed, lambda part: part):
            return run(*leaves)

    found, expected = (slopes(side, leaves) for side in (hooked, run))
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert parts and all(part.untyped_storage().size() for part in parts)


@pytest.mark.usefixtures("casts")
@pytest.mark.skipif(DEVICE == "cuda", reason="the definition is computed on a CPU")
@pytest.mark.parametrize("name", ["gated", "biased_interleaved_alpha_gated"])
def test_adapters_stay_as_they_are(name):
    case, leaves = operands(name)
    weights = [number for number, leaf in enumerate(leaves) if leaf.ndim == 3]
    for number in weights:
        _, first, second = leaves[number].shape
        for shape in ((EXPERTS, first, 16), (EXPERTS, 16, second)):
            leaves.append((torch.randn(shape) / 8).requires_grad_())

    def side(kernel):
        def run(*leaves):
            called, factors = [*leaves[:-4]], leaves[-4:]
            for number, left, right in zip(weights, factors[::2], factors[1::2], strict=True):
                called[number] = AdaptedWeight(called[number], (Part(left, right, 0.5),), pytest.fail)
            assert float8.refuses(None, *called, *case.rest) is None
            return kernel(name)(*called, *case.rest)

        return run

    found, expected = (slopes(side(home.in_float8), leaves) for home in (triton, by_torch))
    assert_near(found, expected, 1e-3)
    plain = slopes(side(by_torch.kernel), leaves)
    assert 0.01 < (found[0] - plain[0]).norm() / plain[0].norm() < 0.1


def test_experts_with_few_rows_multiply_in_16_bits_on_a_gpu(monkeypatch):
    ran = []
    for home in ("kernel", "in_float8"):
        monkeypatch.setattr(triton, home, lambda variant, home=home, **_: lambda *_: ran.append(home))
    run = float8.kernel("gated")
    x = SimpleNamespace(is_cpu=False, device=torch.device("cuda"), dtype=torch.bfloat16)
    up = SimpleNamespace(shape=(4,))
    for rows in (4 * float8.ROWS - 1, 4 * float8.ROWS):
        run(x, SimpleNamespace(numel=lambda rows=rows: rows), None, up)
    x.dtype = torch.float32
    run(x, SimpleNamespace(numel=lambda: 8 * float8.ROWS), None, up)
    assert ran == ["kernel", "in_float8", "kernel"]


@pytest.fixture
def routing():
    """An expert has no rows, others up to five tiles."""
    torch.manual_seed(0)
    index = torch.rand(140, EXPERTS + 1).topk(TOP_K).indices.to(DEVICE)
    return route(torch.where(index == 2, EXPERTS, index), EXPERTS, 16)


def assert_same(found, expected, routing):
    """Scales, and the bytes of tiles that exist."""
    used = int(routing.tiles[3 * routing.max_tiles]) * routing.block
    assert used and torch.equal(found.values.float()[:, :used], expected.values.float()[:, :used])
    assert torch.equal(found.scale, expected.scale)


def test_rows_of_tokens_as_columns(routing):
    values = torch.randn(routing.num_tokens, 80).to(FLOAT8).to(DEVICE)
    expected = columns_of(values, routing, rows=routing.tokens)
    assert_same(Cast(triton_float8._turned(values, routing), expected.scale), expected, routing)


@pytest.mark.parametrize("gathered", [False, True])
def test_rows_as_columns_in_mx(gathered):
    index = torch.rand(70, EXPERTS + 1).topk(TOP_K).indices.to(DEVICE)
    routing = route(torch.where(index == 2, EXPERTS, index), EXPERTS, 32)
    x = torch.randn(routing.num_tokens if gathered else routing.num_rows, 80).to(FLOAT8).bfloat16()
    x = torch.where(x.abs() < 2**-5, 0.5, x).to(DEVICE)
    found, expected = (cast(x, routing, gathered=gathered) for cast in (TURNED, turned_to_mx_by_definition))
    used = int(routing.tiles[3 * routing.max_tiles]) * routing.block
    assert used and torch.equal(found[0].float()[:, :used], expected[0].float()[:, :used])
    assert torch.equal(found[1][:, : used // 32], expected[1][:, : used // 32])


TURNED = triton_float8._turned_to_mx
GATED = Expert(0, RELU)


@pytest.mark.parametrize(
    ("form", "wanted"),
    [
        (GATED, (True, True, True)),
        (Expert(0, RELU, interleaved=True), (True, True, True)),
        (Expert(4, RELU, alone=True), (True, True, True)),
        (GATED, (True, False, False)),
        (GATED, (False, True, False)),
        (GATED, (False, False, True)),
    ],
)
def test_casts_of_gates(routing, monkeypatch, form, wanted):
    """Of numbers of the format, whose cast rounds nothing: also the interpreter's."""

    def numbers(*shape):
        return torch.randint(1, 4, shape, device=DEVICE).to(torch.bfloat16)

    rows, columns = routing.num_rows, 40
    dh, parts = numbers(rows, columns), 1 if form.alone else 2
    products = numbers(rows, parts * columns) * torch.randint(-1, 2, (rows, 1), device=DEVICE)
    grad, x = (
        Cast(dh, 2.0 ** torch.randint(-3, 4, (routing.num_tokens, 1), device=DEVICE)) for _ in range(2)
    )
    weights = torch.ones(routing.num_tokens, TOP_K, device=DEVICE)
    monkeypatch.setattr(triton_products, "rows_product", lambda *_, **__: dh.clone())
    monkeypatch.setattr(triton_float8, "operands_of", lambda *_, **__: (None,) * 4)
    to_x, to_up, to_down = wanted
    needed = Needed(to_x, True, to_up, False, to_down, False)
    operands = grad, x, None, products, routing, weights, form, None, needed
    as_rows, *as_columns, sums, _, _ = gate_gradients(*operands, spend=False)
    expected = gates_by_definition(*operands, spend=False)
    assert [cast is not None for cast in (as_rows, *as_columns)] == [*wanted]
    with_expert = int(routing.offsets[EXPERTS])
    parts = (products[:, 0::2], products[:, 1::2]) if form.interleaved else products.chunk(parts, 1)
    h = parts[0].relu() * (1 if form.alone else parts[1])
    assert torch.equal(sums.sum(0)[:with_expert], (dh * h).float().sum(1)[:with_expert])
    assert torch.equal(expected[5][:with_expert], h[:with_expert])
    if to_x:
        for one, other in zip(as_rows, expected[0], strict=True):
            assert torch.equal(one.float()[:with_expert], other.float()[:with_expert])
    for one, other in zip(as_columns, expected[1:3], strict=True):
        if one is not None:
            assert_same(one, other, routing)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_gradient_that_is_not_finite_makes_its_row_and_columns_nan(routing, monkeypatch, value):
    rows, columns = routing.num_rows, 40
    expert = 1
    row = int(routing.offsets[expert])
    dh, products = torch.ones(rows, columns, device=DEVICE), torch.ones(rows, 2 * columns, device=DEVICE)
    dh[row, 3] = value
    ones = Cast(dh, torch.ones(routing.num_tokens, 1, device=DEVICE))
    weights = torch.ones(routing.num_tokens, TOP_K, device=DEVICE)
    monkeypatch.setattr(triton_products, "rows_product", lambda *_, **__: dh)
    monkeypatch.setattr(triton_float8, "operands_of", lambda *_, **__: (None,) * 4)
    needed = Needed(True, True, True, False, True, False)
    of_rows, of_columns, of_h, *_, dz, weighted = gate_gradients(
        ones, ones, None, products, routing, weights, GATED, None, needed, spend=True, keep=False
    )
    assert dz is weighted is None and products.untyped_storage().size() == 0
    assert of_rows.scale.isnan().nonzero()[:, 0].tolist() == [row]
    assert of_columns.scale.isnan().nonzero().tolist() == [[expert, 3], [expert, columns + 3]]
    assert not of_h.scale.isnan().any()
