"""The pieces in Triton: through the interpreter on a CPU (conftest sets it up), compiled on a GPU."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch.nn import functional

from tests.kernels.matching import DEVICE
from veomni_hook.kernels.moe_experts import reference

pytest.importorskip("triton")

from veomni_hook.kernels.moe_experts import triton_products, triton_routing, triton_sums, triton_tiles
from veomni_hook.kernels.moe_experts.triton_products import Expert
from veomni_hook.kernels.moe_experts.triton_routing import route
from veomni_hook.kernels.moe_experts.triton_tiles import Tile

# The interpreter is wrong for products of bfloat16.
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])]
TOLERANCE = {torch.float32: 2e-5, torch.float16: 6e-3, torch.bfloat16: 4e-2}
EXPERTS, TOKENS, TOP_K, BLOCK = 4, 9, 3, 16
ALPHA, LIMIT = 1.3, 0.4  # a limit that bites


@pytest.fixture
def chosen_tiles():
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture(autouse=True)
def small(monkeypatch, request):
    """Several tiles each way, and several rounds of a loop, at sizes that the interpreter can do."""
    if "chosen_tiles" in request.fixturenames:
        return
    monkeypatch.setattr(triton_tiles, "product_tile", lambda *_: Tile(BLOCK, 16, 16, 4, 2, group=2))
    monkeypatch.setattr(triton_tiles, "weight_tile", lambda *_, **__: Tile(16, 16, 16, 4, 2, group=2))
    monkeypatch.setattr(triton_sums, "_COMBINED", 16)


@dataclass
class Variant:
    """A reference, and what the pieces are told to compute the same."""

    name: str
    expert: Expert
    numbers: tuple = ()
    biased: bool = False


SILU, GELU_TANH = functional.silu, lambda x: functional.gelu(x, approximate="tanh")
VARIANTS = {
    "silu": Variant("gated", Expert(0, 0), (SILU,)),
    "gelu_tanh": Variant("gated", Expert(0, 1), (GELU_TANH,)),
    "clamped": Variant("gated_clamped", Expert(1, 0, LIMIT), (SILU, LIMIT)),
    "clamped_after": Variant("gated_clamped_after", Expert(2, 0, LIMIT), (SILU, LIMIT)),
    "alpha": Variant("alpha_gated", Expert(3, 0, LIMIT, ALPHA), (ALPHA, LIMIT)),
    "transposed": Variant("gated_transposed", Expert(0, 0, transposed=True), (SILU,)),
    "biased_interleaved": Variant(
        "biased_interleaved_alpha_gated",
        Expert(3, 0, LIMIT, ALPHA, transposed=True, interleaved=True),
        (ALPHA, LIMIT),
        biased=True,
    ),
    "biased": Variant(
        "biased_alpha_gated_float32", Expert(3, 0, LIMIT, ALPHA, transposed=True), (ALPHA, LIMIT), biased=True
    ),
}

IDS = {
    "spread": lambda: torch.randint(EXPERTS, (TOKENS, TOP_K)),  # duplicates too
    "one hot": lambda: torch.where(torch.rand(TOKENS, TOP_K) < 0.9, 3, 1),
    "sentinel": lambda: torch.randint(EXPERTS + 1, (TOKENS, TOP_K)),
    "nowhere": lambda: torch.full((TOKENS, TOP_K), EXPERTS),
    "one row": lambda: torch.tensor([[EXPERTS, 2, -1]]),
    "empty": lambda: torch.zeros(0, TOP_K, dtype=torch.int64),
}


def operands(variant, ids, dtype, hidden, inner):
    def normal(*shape):
        return torch.randn(*shape, device=DEVICE).to(dtype)

    shapes = [(EXPERTS, 2 * inner, hidden), (EXPERTS, hidden, inner)]
    first, second = (normal(*shape) * 0.2 for shape in shapes)
    if variant.expert.transposed:
        first, second = (weight.transpose(1, 2).contiguous() for weight in (first, second))
    biases = (normal(EXPERTS, 2 * inner), normal(EXPERTS, hidden)) if variant.biased else (None, None)
    weights = torch.rand(ids.shape, device=DEVICE)
    return normal(len(ids), hidden), weights, (first, biases[0], second, biases[1])


def by_reference(variant, x, ids, weights, parameters, dout):
    """The result and all gradients, those of what is None left out; computed in float64."""
    leaves = [t.double().requires_grad_() for t in (x, weights, *parameters) if t is not None]
    function = reference.of(variant.name)
    if variant.name == "biased_alpha_gated_float32":
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.Tensor, "float", torch.Tensor.double)
            patch.setattr(reference.torch, "float32", torch.float64)
            out = function(leaves[0], ids, leaves[1], *leaves[2:], *variant.numbers)
    else:
        out = function(leaves[0], ids, leaves[1], *leaves[2:], *variant.numbers)
    if out.requires_grad:
        out.backward(dout.double())
    return [out.detach(), *(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves)]


def by_pieces(variant, x, ids, weights, parameters, dout, *, in_epilogue=False, spend=True, ordered=False):
    first, first_bias, second, second_bias = parameters
    expert = variant.expert
    routing = route(ids, EXPERTS, BLOCK)
    x_rows, d_rows = (triton_products.ordered(t, routing) if ordered else t for t in (x, dout))
    h, products = triton_products.gate_up(
        x_rows, first, first_bias, routing, expert, keep=True, ordered=ordered
    )
    y = triton_products.rows_product(
        h,
        second,
        routing,
        bias=second_bias,
        weights=weights if in_epilogue else None,
        transposed=expert.transposed,
    )
    out = triton_sums.combine(y, routing, None if in_epilogue else weights)
    gradients, weighted, partial = triton_products.gate_up_backward(
        d_rows, second, products, routing, weights, expert, spend=spend, ordered=ordered
    )
    assert (gradients is products) is spend
    to_weights = triton_sums.routing_gradient(partial, weights, routing, dout, second_bias)
    dx = triton_sums.combine(
        triton_products.rows_product(
            gradients, first, routing, transposed=not expert.transposed, to_input=True
        ),
        routing,
    )
    pairs = [(d_rows, weighted, (not ordered, False)), (gradients, x_rows, (False, not ordered))]
    if expert.transposed:
        pairs = [(right, left, gathered[::-1]) for left, right, gathered in pairs]
    to_second, to_first = (
        triton_products.weight_gradient(a, b, routing, gathered=gathered) for a, b, gathered in pairs
    )
    found = [out, dx, to_weights, to_first]
    if first_bias is not None:
        found += [triton_sums.bias_gradient(gradients, routing, gather=False)]
    found += [to_second]
    if second_bias is not None:
        found += [triton_sums.bias_gradient(dout, routing, weights, gather=True)]
    return found


def compare(found, expected, dtype):
    for number, (ours, truth) in enumerate(zip(found, expected, strict=True)):
        assert ours.shape == truth.shape
        if truth.numel():
            gap = (ours.double() - truth).norm() / truth.norm().clamp(min=1e-30)
            assert gap <= TOLERANCE[dtype], (number, gap)


def check(name, which, dtype=torch.float32, hidden=24, inner=20, **how):
    torch.manual_seed(0)
    variant, ids = VARIANTS[name], IDS[which]().to(DEVICE)
    x, weights, parameters = operands(variant, ids, dtype, hidden, inner)
    dout = torch.randn_like(x)
    call = (variant, x, ids, weights, parameters, dout)
    compare(by_pieces(*call, **how), by_reference(*call), dtype)


def first(names, *default):
    """A matrix of names, of which the default suite has those that show a layout or a gate of its own."""
    return pytest.mark.parametrize(
        "name", [name if name in default else pytest.param(name, marks=pytest.mark.slow) for name in names]
    )


@pytest.mark.sample(1)
@first(VARIANTS, "silu", "clamped", "biased_interleaved")
def test_equals_the_reference(name):
    check(name, "sentinel")


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@first(["silu", "clamped", "biased_interleaved"], "biased_interleaved")
def test_equals_the_reference_in_16_bits(name, dtype):
    check(name, "sentinel", dtype)


@pytest.mark.sample(1)
@pytest.mark.parametrize("which", IDS)
def test_however_rows_are_spread(which):
    check("biased_interleaved" if which == "one hot" else "silu", which)


# 24 and 40 are described in whole and broken tiles; 21 and 19 have strides that hardware cannot copy by.
@pytest.mark.sample(1)
@pytest.mark.parametrize("sizes", [(32, 16), (40, 16), (21, 19), (16, 3)])
@first(["silu", "transposed", "biased_interleaved"], "silu")
def test_sizes(name, sizes):
    check(name, "spread", torch.float32, *sizes)


@pytest.mark.parametrize("name", ["silu", "biased_interleaved"])
def test_gate_and_up_need_not_be_kept(name):
    torch.manual_seed(0)
    variant, ids = VARIANTS[name], IDS["sentinel"]().to(DEVICE)
    x, _, (weight, bias, *_) = operands(variant, ids, torch.float32, 24, 16)
    routing = route(ids, EXPERTS, BLOCK)
    (h, kept), (alone, nothing) = (
        triton_products.gate_up(x, weight, bias, routing, variant.expert, keep=keep) for keep in (True, False)
    )
    rows = int(routing.offsets[EXPERTS])
    assert kept is not None and nothing is None and torch.equal(alone[:rows], h[:rows])


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(24, 20), (21, 19)])
@first(["silu", "transposed", "biased_interleaved"], "biased_interleaved")
def test_rows_copied_into_order_first_give_the_same_bits(name, sizes):
    torch.manual_seed(0)
    variant, ids = VARIANTS[name], IDS["sentinel"]().to(DEVICE)
    x, weights, parameters = operands(variant, ids, torch.float32, *sizes)
    call = (variant, x, ids, weights, parameters, torch.randn_like(x))
    for ordered, gathered in zip(by_pieces(*call, ordered=True), by_pieces(*call), strict=True):
        assert torch.equal(ordered, gathered)


def test_weights_before_the_rounding():
    check("biased", "sentinel", in_epilogue=True)


@pytest.mark.sample(1)
@pytest.mark.parametrize("tile", [
    Tile(BLOCK, 32, 16, 4, 2, parts=2),
    Tile(BLOCK, 16, 32, 4, 3, group=1, flatten=True),
    Tile(BLOCK, 16, 16, 4, 2, described=False),
    Tile(BLOCK, 32, 16, 4, 2, programs=0, parts=2, described=False),
])  # fmt: skip
@first(["silu", "transposed", "biased_interleaved"], "silu")
def test_other_tiles(monkeypatch, name, tile):
    monkeypatch.setattr(triton_tiles, "product_tile", lambda *_: tile)
    monkeypatch.setattr(triton_tiles, "weight_tile", lambda *_, **__: tile)
    check(name, "sentinel")


# Compiled only: what the interpreter cannot show is whether they fit, and whether layouts are right.
@pytest.mark.skipif(DEVICE == "cpu", reason="takes the interpreter minutes")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block", [16, 32, 64, 128])
@pytest.mark.parametrize("name", ["silu", "transposed", "biased_interleaved"])
def test_tiles_that_shapes_choose(chosen_tiles, name, block, dtype):
    chosen_tiles.setattr(f"{__name__}.BLOCK", block)
    chosen_tiles.setattr(f"{__name__}.TOKENS", 70)
    check(name, "sentinel", dtype, 136, 200)


@pytest.fixture(params=["few", "many"])
def either_routing(request, monkeypatch):
    """In one launch, as few pairs are routed, and with a sort."""
    monkeypatch.setattr(triton_routing, "_MANY", 0 if request.param == "many" else 10**6)


@pytest.mark.usefixtures("either_routing")
@pytest.mark.parametrize("block", [16, 32])
@pytest.mark.parametrize("which", IDS)
def test_routing(which, block):
    torch.manual_seed(1)
    ids = IDS[which]().to(DEVICE)
    routing = route(ids, EXPERTS, block)
    flat = ids.flatten().tolist()
    sorted_pairs = [p for e in range(EXPERTS) for p in range(len(flat)) if flat[p] == e]
    counts = [flat.count(e) for e in range(EXPERTS)]
    offsets = [sum(counts[:e]) for e in range(EXPERTS + 1)]
    assert routing.offsets[: EXPERTS + 1].tolist() == offsets
    assert routing.pairs[: len(sorted_pairs)].tolist() == sorted_pairs
    assert routing.tokens[: len(sorted_pairs)].tolist() == [p // TOP_K for p in sorted_pairs]
    rows_of = routing.rows_of[: len(flat)].tolist()
    assert sorted(rows_of) == [*range(len(flat))]
    assert all(rows_of[p] == r for r, p in enumerate(sorted_pairs))
    tiles = [
        (e, row, offsets[e + 1]) for e in range(EXPERTS) for row in range(offsets[e], offsets[e + 1], block)
    ]
    assert len(tiles) <= routing.max_tiles and int(routing.tiles[3 * routing.max_tiles]) == len(tiles)
    parts = routing.tiles[: 3 * routing.max_tiles].view(3, -1)[:, : len(tiles)]
    assert [tuple(tile) for tile in parts.t().tolist()] == tiles
    first_tiles = [sum(tile[0] < e for tile in tiles) for e in range(EXPERTS)]
    largest_first = sorted(range(EXPERTS), key=lambda e: -counts[e])
    experts = [(e, offsets[e], offsets[e + 1], first_tiles[e]) for e in largest_first]
    table = routing.experts[: 4 * EXPERTS].view(4, -1)
    assert not flat or [tuple(expert) for expert in table.t().tolist()] == experts


@pytest.mark.sample(3)
@pytest.mark.usefixtures("either_routing")
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_routing_of_many_experts(dtype):
    torch.manual_seed(2)
    ids = torch.randint(301, (9, 30), device=DEVICE, dtype=dtype)
    routing = route(ids, 300, 16)
    keys, order = ids.flatten().sort(stable=True)
    rows = int((keys < 300).sum())
    assert torch.equal(routing.pairs[:rows].long(), order[:rows])
    assert torch.equal(
        routing.offsets[:301].long(), torch.searchsorted(keys, torch.arange(301, device=DEVICE))
    )
    counts = torch.bincount(keys, minlength=301)[:300]
    assert torch.equal(routing.experts[:300].long(), counts.sort(stable=True, descending=True).indices)
    # Pairs without an expert have no tile.
    assert int(routing.tiles[3 * routing.max_tiles]) == int(
        (counts + 15).div(16, rounding_mode="floor").sum()
    )


def test_more_places_than_are_unrolled():
    torch.manual_seed(3)
    ids = torch.randint(EXPERTS, (2, 20), device=DEVICE)
    routing = route(ids, EXPERTS, BLOCK)
    y, weights = torch.randn(40, 24, device=DEVICE), torch.rand(2, 20, device=DEVICE)
    found = triton_sums.combine(y, routing, weights)
    rows = routing.rows_of[:40].long()
    torch.testing.assert_close(found, (y[rows].view(2, 20, 24) * weights[..., None]).sum(1))


def test_rows_may_stand_apart():
    torch.manual_seed(4)
    variant, ids = VARIANTS["silu"], IDS["spread"]().to(DEVICE)
    x, weights, parameters = operands(variant, ids, torch.float32, 32, 16)
    dout = torch.randn_like(x)
    expected = by_pieces(variant, x, ids, weights, parameters, dout)
    apart = [torch.cat([t, torch.full_like(t, float("nan"))], 1)[:, :32] for t in (x, dout)]
    found = by_pieces(variant, apart[0], ids, weights, parameters, apart[1])
    for ours, truth in zip(found, expected, strict=True):
        assert torch.equal(ours, truth)


def test_numbers_that_are_not_finite_stay_with_their_rows():
    """Another expert's rows, and what stands in rows of no expert, do not reach an expert's gradient."""
    torch.manual_seed(5)
    ids = torch.tensor([[0, 1], [1, EXPERTS], [EXPERTS, 2]], device=DEVICE)
    routing = route(ids, EXPERTS, BLOCK)
    x, rows = torch.randn(3, 16, device=DEVICE), torch.randn(6, 16, device=DEVICE)
    clean = triton_products.weight_gradient(rows, x, routing, gathered=(False, True))
    spoilt = rows.clone()
    spoilt[3:] = float("nan")  # expert 2's row, then those of none
    found = triton_products.weight_gradient(spoilt, x, routing, gathered=(False, True))
    assert torch.equal(found[:2], clean[:2]) and found[2].isnan().all() and not found[3:].any()


def test_no_experts_and_no_places():
    x, ids = torch.randn(3, 16, device=DEVICE), torch.zeros(3, 2, dtype=torch.int64, device=DEVICE)
    routing = route(ids, 0, BLOCK)
    assert not triton_sums.combine(torch.empty(6, 16, device=DEVICE), routing).any()
    assert (
        triton_products.weight_gradient(
            x, torch.empty(6, 8, device=DEVICE), routing, gathered=(True, False)
        ).shape[0]
        == 0
    )
    routing = route(ids[:, :0], EXPERTS, BLOCK)
    assert not triton_sums.combine(torch.empty(0, 16, device=DEVICE), routing).any()


def test_blocks_of_rows():
    assert [triton_tiles.row_block(n, 8, 2) for n in (8, 200, 400, 520, 80000)] == [16, 32, 64, 128, 128]
    assert triton_tiles.row_block(80000, 8, 4) == 64
