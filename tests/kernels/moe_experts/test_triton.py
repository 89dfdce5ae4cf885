"""What is the triton backend's own: interpreted on a CPU, compiled on a GPU; `test_backends` has the rest."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional

from tests.kernels.dispatched import Operators
from tests.kernels.moe_experts.backends import BACKENDS, DEVICE, LAYOUTS, SOME_LAYOUTS
from tests.kernels.moe_experts.formulas import CASES, EXPERTS, HIDDEN, INNER, LIMIT
from veomni_hook.kernels.moe_experts import forms

pytest.importorskip("triton")

from veomni_hook.kernels.moe_experts import triton as ours
from veomni_hook.kernels.moe_experts import triton_products, triton_routing, triton_sums
from veomni_hook.kernels.moe_experts.low_rank import NO_ADAPTERS
from veomni_hook.kernels.moe_experts.torch_routing import assigned
from veomni_hook.kernels.moe_experts.triton_routing import route
from veomni_hook.kernels.shared.host_values import note_number

TRITON = BACKENDS["triton"]
operands_of, side, refusal, assert_same = TRITON.operands, TRITON.side, TRITON.refusal, TRITON.assert_same
every_layout = pytest.mark.parametrize("name", LAYOUTS)
some_layouts = pytest.mark.parametrize(
    "name",
    [each if each in SOME_LAYOUTS else pytest.param(each, marks=pytest.mark.slow) for each in LAYOUTS],
)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(5)


@pytest.mark.sample(2)
@every_layout
@pytest.mark.parametrize("wanted", [None, "hidden_states", "weights"])
def test_rows_that_are_copied_into_order_first(name, wanted, monkeypatch):
    monkeypatch.setattr(ours, "worth_ordering", lambda *_: True)
    operands = operands_of(name)
    of = [number == 0 if wanted == "hidden_states" else number > 2 for number in range(len(operands))]
    assert_same(name, operands, wanted=of if wanted else None)


def test_where_rows_are_copied_into_order():
    def worth(hidden=4096, dtype=torch.bfloat16, pairs=16384, experts=8, inner=14336):
        return ours.worth_ordering(torch.empty(0, hidden), dtype, pairs, experts, inner)

    assert worth() and worth(hidden=8, dtype=torch.float16, pairs=8 * 4096, inner=4096)
    assert not worth(inner=4095) and not worth(pairs=8 * 14336 + 1)  # little to win; too much memory
    assert not worth(hidden=4100) and not worth(dtype=torch.float32)  # nothing that descriptors can copy


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("home", "piece", "frozen"),
    [
        (triton_products, "weight_gradient", [3, 4]),
        (ours, "_input_gradient", [0]),
        (triton_sums, "routing_gradient", [2]),
    ],
    ids=["weights", "input", "routing"],
)
def test_of_what_is_frozen_no_gradient_is_computed(home, piece, frozen, monkeypatch):
    monkeypatch.setattr(home, piece, None)
    operands = operands_of("gated")
    some = [number != 1 and number not in frozen for number in range(5)]
    assert_same("gated", operands, wanted=some)
    with pytest.raises(TypeError):
        assert_same("gated", operands)


def noted_rows(monkeypatch):
    """Note how many ids are assigned wherever rows are allocated, and return how many rows there are."""
    rows = []

    def noted(ids, *others):
        count = ((ids >= 0) & (ids < EXPERTS)).sum()
        note_number(ids, count, assigned, EXPERTS)
        rows.append((route(ids, *others).num_rows, int(count)))
        return route(ids, *others)

    monkeypatch.setattr(ours, "route", noted)
    return rows


@pytest.mark.sample(1)
@some_layouts
def test_only_assigned_pairs_have_rows_where_their_number_is_known(name, monkeypatch):
    rows = noted_rows(monkeypatch)
    operands = operands_of(name)
    assert_same(name, operands)
    assert rows and all(allocated == count < operands[1].numel() for allocated, count in rows)


def test_no_rows_where_nothing_is_assigned(monkeypatch):
    rows = noted_rows(monkeypatch)
    x, ids, *others = operands_of("gated")
    leaves = [x, torch.full_like(ids, EXPERTS), *others]
    leaves = [each.requires_grad_(each.is_floating_point()) for each in leaves]
    result = side("gated")(*leaves)
    result.sum().backward()
    assert rows == [(0, 0)]
    assert not result.any() and not any(each.grad.any() for each in leaves if each.requires_grad)


@pytest.mark.sample(2)
@pytest.mark.parametrize("sizes", [(1, 1), (33, 17), (64, 48)])
@some_layouts
def test_sizes(name, sizes):
    hidden, inner = sizes
    shape = {HIDDEN: hidden, INNER: inner, 2 * INNER: 2 * inner, EXPERTS: EXPERTS}
    x, ids, routing, *weights = operands_of(name)
    weights = [
        torch.randn([EXPERTS, *(shape[size] for size in each.shape[1:])], device=DEVICE) * 0.3
        for each in weights
    ]
    assert_same(name, [torch.randn(len(x), hidden, device=DEVICE), ids, routing, *weights], tolerance=1e-5)


@pytest.mark.sample(1)
@some_layouts
def test_backward_again_through_a_retained_graph(name):
    leaves = [each.requires_grad_(each.is_floating_point()) for each in operands_of(name)]
    floating = [each for each in leaves if each.requires_grad]
    result = side(name)(*leaves)
    incoming = torch.randn_like(result)
    runs = [torch.autograd.grad(result, floating, incoming, retain_graph=True) for _ in range(3)]
    assert all(
        torch.equal(one, other) for again in runs[1:] for one, other in zip(runs[0], again, strict=True)
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("gated", torch.float16),
        pytest.param("biased_interleaved_alpha_gated", torch.float32, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_operators(name, dtype, monkeypatch):
    # Of what is kept, rows of no expert are never written: opcheck compares them all the same.
    for module in (triton_products, triton_routing):
        monkeypatch.setattr(module, "torch", SimpleNamespace(**{**vars(torch), "empty": torch.zeros}))
    operands = operands_of(name, dtype)
    tensors, rest = forms.taken_apart([*operands, *CASES[name].rest])
    form = forms.form_of(name, tensors, rest)
    operators = torch.ops.veomni_hook
    torch.library.opcheck(operators.moe_experts_triton.default, (*tensors, *form, False))
    call = (*tensors, *form, True)
    torch.library.opcheck(operators.moe_experts_triton.default, call)
    _, *kept = operators.moe_experts_triton(*call)
    grad, needed = torch.randn_like(operands[0]), [each is not None for each in (tensors[0], *tensors[2:])]
    for wanted in (needed, [False, True, *[False] * 4]):
        call = (grad, *tensors, *kept, *form, wanted, False)
        torch.library.opcheck(operators.moe_experts_triton_backward.default, call)


def test_what_is_kept_is_written_over_only_where_nobody_watches():
    tensors, rest = forms.taken_apart([*operands_of("gated"), *CASES["gated"].rest])
    form, needed = forms.form_of("gated", tensors, rest), ours.Needed(*[True] * 3, False, True, False)
    for watched in (True, False):
        _, kept = ours._BACKEND.forward(tensors, NO_ADAPTERS, form, keep=True)
        before, grad = kept[0].clone(), torch.randn_like(tensors[0])
        rows = int(kept[1].shape[0] and (tensors.top_k_index < EXPERTS).sum())
        with Operators() if watched else nullcontext():
            ours._BACKEND.backward(grad, tensors, NO_ADAPTERS, kept, form, needed)
        assert torch.equal(kept[0][:rows], before[:rows]) is watched


def test_without_gradients_nothing_is_kept(monkeypatch):
    told = []
    gate_up = triton_products.gate_up
    monkeypatch.setattr(
        triton_products, "gate_up", lambda *a, keep, **k: told.append(keep) or gate_up(*a, keep=keep, **k)
    )
    operands = operands_of("gated")
    side("gated")(*operands)
    with torch.no_grad():
        side("gated")(*[each.requires_grad_(each.is_floating_point()) for each in operands])
    side("gated")(*operands)
    assert told == [False, False, True]


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter's products are NumPy's, whose bits go by shape")
def test_a_token_has_the_same_bits_beside_any_others():
    operands = operands_of("gated", tokens=40)
    whole = side("gated")(*operands)
    some = [each[7:9] for each in operands[:3]]
    assert torch.equal(side("gated")(*some, *operands[3:]), whole[7:9])


@pytest.mark.parametrize(
    ("number", "change", "reason"),
    [
        (0, lambda x: x[None], "hidden states [1,"),
        (3, lambda x: x.double(), "weights have dtype torch.float64"),
        (5, lambda x: torch.tanh, "activation tanh is not supported"),
        (6, lambda x: -1.0, "is negative: -1.0"),
    ],
)
def test_refuses(number, change, reason):
    operands = [*operands_of("gated_clamped"), functional.silu, LIMIT]
    assert ours.refuses(None, *operands) is None
    operands[number] = change(operands[number])
    assert reason in ours.refuses(None, *operands)


def test_refuses_float64():
    assert "float64" in refusal("gated", operands_of("gated", torch.float64))


def test_auto_leaves_float32_to_upstream():
    x = torch.empty(3, HIDDEN, device=DEVICE)
    assert "tensor cores" in ours.loses(None, x) and ours.loses(None, x.half()) is None
    assert "loses_in_float32" in TRITON.declared["biased_alpha_gated_float32"].loses
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        assert ours.loses(None, x) is None
