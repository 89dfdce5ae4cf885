"""The triton backend against the reference: through the interpreter on a CPU, compiled on a GPU."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from tests.kernels.matching import assert_matches, close, gradients
from tests.kernels.moe_experts.formulas import CASES, EXPERTS, HIDDEN, INNER, LIMIT, SENTINEL, TOP_K, inputs
from veomni_hook.kernels.activations import FUNCTIONS
from veomni_hook.kernels.moe_experts import forms, reference
from veomni_hook.kernels.registry import load_attribute, registry

pytest.importorskip("triton")

from veomni_hook.kernels.moe_experts import triton as ours
from veomni_hook.kernels.moe_experts import triton_products, triton_routing

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter is wrong for products of bfloat16.
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])]
DECLARED = {
    kernel.variant: kernel for kernel in registry.kernels("moe_experts") if kernel.backend == "triton"
}
STACKED = [variant for variant in DECLARED if variant in CASES]
every_variant = pytest.mark.parametrize("name", STACKED)
#: Every way of storing weights, every order of gates and ups, with biases and without.
LAYOUTS = ["gated", "gated_transposed", "biased_interleaved_alpha_gated", "ungated"]
every_layout = pytest.mark.parametrize("name", LAYOUTS)
#: By default the plainest of them and the oddest.
some_layouts = pytest.mark.parametrize(
    "name",
    [
        each
        if each in {"gated", "biased_interleaved_alpha_gated"}
        else pytest.param(each, marks=pytest.mark.slow)
        for each in LAYOUTS
    ],
)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(5)


def operands_of(name, dtype=torch.float32, *args, **options):
    return [each.to(DEVICE) for each in inputs(CASES[name], dtype, *args, **options)]


def side(home, name, *changed):
    """The function of a variant without the operands that are no tensors."""
    rest = changed or CASES[name].rest
    return lambda *operands: getattr(home, name)(*operands, *rest)


def refusal(name, operands, *rest):
    return load_attribute(DECLARED[name].refuses)(None, *operands, *(rest or CASES[name].rest))


def assert_same(name, operands, **options):
    assert refusal(name, operands) is None
    assert_matches(side(ours, name), side(reference, name), operands, **options)


def test_every_variant_of_stacked_weights_is_declared():
    assert set(DECLARED) == {*forms.LAYOUTS, "gated_or_identity"}
    for kernel in DECLARED.values():
        assert callable(load_attribute(kernel.load))


@every_variant
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equals_the_reference(name, dtype):
    assert_same(name, operands_of(name, dtype))


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


@some_layouts
@pytest.mark.parametrize("other", [torch.bfloat16, torch.float64], ids=str)
def test_routing_weights_of_another_dtype(name, other):
    assert_same(name, operands_of(name, torch.float32, other))


@every_layout
@pytest.mark.parametrize(
    "ids",
    [
        torch.full((4, TOP_K), 2),
        torch.tensor([[0, 0, 4], [4, SENTINEL, 4]]),
        torch.tensor([[SENTINEL, SENTINEL + 9, 0]]),
        torch.tensor([[3, 3, 1]], dtype=torch.int32),
        torch.tensor([[0], [2]]),
    ],
    ids=["one expert three times", "duplicates", "past the sentinel", "int32", "top 1"],
)
def test_odd_routings(name, ids):
    assert_same(name, operands_of(name, ids=ids) if ids.shape[1] == TOP_K else of_one_place(name, ids))


def of_one_place(name, ids):
    operands = operands_of(name, ids=ids.expand(-1, TOP_K))
    operands[1:3] = [each[:, :1] for each in operands[1:3]]
    return operands


@every_layout
@pytest.mark.parametrize("tokens", [0, 4])
def test_where_no_expert_has_a_token_everything_is_zero(name, tokens):
    operands = operands_of(name, ids=torch.full((tokens, TOP_K), SENTINEL))
    floating = [each.is_floating_point() for each in operands]
    (found,), grads = gradients(side(ours, name), operands, floating)
    assert found.shape == (tokens, HIDDEN) and not found.any()
    for grad, of, want in zip(grads, operands, floating, strict=True):
        assert grad is None if not want else grad.shape == of.shape and not grad.any()


@every_layout
def test_memory_that_nobody_writes_does_not_show(name, monkeypatch):
    filled = torch.empty

    def empty(*args, **options):
        made = filled(*args, **options)
        return made.fill_(float("nan")) if made.is_floating_point() else made

    monkeypatch.setattr(torch, "empty", empty)
    operands = operands_of(name, ids=torch.tensor([[1, 1, 3], [SENTINEL, 3, 1]]))
    (found,), grads = gradients(side(ours, name), operands, [each.is_floating_point() for each in operands])
    assert not found.isnan().any() and not grads[2].isnan().any() and grads[2][1, 0] == 0
    for grad in grads[3:]:
        assert not grad[[0, 2, 4]].any() and grad[[1, 3]].any() and not grad.isnan().any()


@some_layouts
@pytest.mark.parametrize("wanted", range(4))
def test_gradients_only_where_wanted(name, wanted):
    operands = operands_of(name)
    count = len(operands)
    # Frozen experts, frozen hidden states and routing, and one operand at a time.
    some = {
        0: [True, False, True, *[False] * (count - 3)],
        1: [False, False, False, *[True] * (count - 3)],
    }.get(wanted) or [number == (2, count - 1)[wanted - 2] for number in range(count)]
    assert_same(name, operands, wanted=some)


@pytest.mark.parametrize(
    ("piece", "frozen"),
    [("weight_gradient", [3, 4]), ("input_gradient", [0]), ("routing_gradient", [2])],
)
def test_of_what_is_frozen_no_gradient_is_computed(piece, frozen, monkeypatch):
    monkeypatch.setattr(triton_products, piece, None)
    operands = operands_of("gated")
    some = [number != 1 and number not in frozen for number in range(5)]
    assert_same("gated", operands, wanted=some)
    with pytest.raises(TypeError):
        assert_same("gated", operands)


@some_layouts
def test_operands_that_are_not_contiguous(name):
    operands = operands_of(name)
    turned = [each.transpose(0, -1).contiguous().transpose(0, -1) for each in operands]
    assert not any(each.is_contiguous() for each in turned)
    assert_same(name, turned)
    apart = [torch.cat([each, each + 1], -1)[..., : each.shape[-1]] for each in operands]
    assert not any(each.is_contiguous() for each in apart)
    assert_same(name, apart)


@some_layouts
def test_a_gradient_that_is_expanded(name):
    total, expected = (lambda *x, home=home: side(home, name)(*x).sum() for home in (ours, reference))
    assert_matches(total, expected, operands_of(name))


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


@pytest.mark.parametrize("activation", FUNCTIONS)
@pytest.mark.parametrize("name", ["gated", pytest.param("ungated", marks=pytest.mark.slow)])
def test_every_activation(name, activation):
    sides = [side(home, name, FUNCTIONS[activation]) for home in (ours, reference)]
    assert_matches(*sides, operands_of(name), tolerance=1e-5)


@pytest.mark.parametrize("name", [name for name in STACKED if LIMIT in CASES[name].rest])
@pytest.mark.parametrize("limit", [0.25, float("inf")])
def test_what_stands_at_the_limit_has_its_gradient(name, limit):
    rest = tuple(limit if each == LIMIT else each for each in CASES[name].rest)
    operands = operands_of(name)
    # All numbers are multiples of 1/4, so that many first products are at the limit exactly.
    operands[0], operands[3] = operands[0].round(), (operands[3] * 2).round() / 4
    assert_matches(*(side(home, name, *rest) for home in (ours, reference)), operands)


@pytest.mark.parametrize("name", ["gated", "biased_interleaved_alpha_gated"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_under_autocast(name, dtype):
    with torch.autocast(DEVICE, dtype=torch.float16):
        operands = operands_of(name, torch.float32, torch.float32)
        operands[0] = operands[0].to(dtype)
        assert_same(name, operands, tolerance=6e-3)


@some_layouts
def test_second_derivatives(name):
    def squared(home):
        def run(*operands):
            out = side(home, name)(*operands)
            leaves = [each for each in operands if each.is_floating_point()]
            first = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
            return sum(each.square().sum() for each in first)

        return run

    assert_matches(squared(ours), squared(reference), operands_of(name, tokens=5), tolerance=1e-4)


@some_layouts
def test_backward_again_through_a_retained_graph(name):
    leaves = [each.requires_grad_(each.is_floating_point()) for each in operands_of(name)]
    floating = [each for each in leaves if each.requires_grad]
    result = side(ours, name)(*leaves)
    incoming = torch.randn_like(result)
    runs = [torch.autograd.grad(result, floating, incoming, retain_graph=True) for _ in range(3)]
    assert all(
        torch.equal(one, other) for again in runs[1:] for one, other in zip(runs[0], again, strict=True)
    )


@pytest.mark.parametrize("reentrant", [True, False])
def test_with_activation_checkpointing(reentrant):
    kept = partial(checkpoint, side(ours, "gated"), use_reentrant=reentrant)
    assert_matches(kept, side(ours, "gated"), operands_of("gated"), exact=True)


@pytest.mark.parametrize(
    ("name", "dynamic"), [("gated", False), ("gated", True), ("biased_interleaved_alpha_gated", False)]
)
def test_is_traced_without_a_graph_break(name, dynamic):
    torch._dynamo.reset()
    compiled = torch.compile(side(ours, name), fullgraph=True, backend="aot_eager", dynamic=dynamic)
    assert_matches(compiled, side(ours, name), operands_of(name), exact=True)
    if dynamic:
        assert_matches(compiled, side(ours, name), operands_of(name, tokens=40), exact=True)


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


class Watch(TorchDispatchMode):
    """Sees operators and lets them be."""

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        return operator(*args, **(kwargs or {}))


def test_what_is_kept_is_written_over_only_where_nobody_watches():
    tensors, rest = forms.taken_apart([*operands_of("gated"), *CASES["gated"].rest])
    form, needed = forms.form_of("gated", tensors, rest), ours.Needed(*[True] * 3, False, True, False)
    for watched in (True, False):
        _, kept = ours._BACKEND.forward(tensors, form, keep=True)
        before, grad = kept[0].clone(), torch.randn_like(tensors[0])
        rows = int(kept[1].shape[0] and (tensors.top_k_index < EXPERTS).sum())
        if watched:
            with Watch():
                ours._BACKEND.backward(grad, tensors, kept, form, needed)
        else:
            ours._BACKEND.backward(grad, tensors, kept, form, needed)
        assert torch.equal(kept[0][:rows], before[:rows]) is watched


@some_layouts
def test_equal_bits_from_run_to_run(name):
    operands = operands_of(name, tokens=40)
    wanted = [each.is_floating_point() for each in operands]
    (one, grads), (other, again) = (gradients(side(ours, name), operands, wanted) for _ in range(2))
    assert torch.equal(one[0], other[0])
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(grads, again, strict=True))


def test_without_gradients_nothing_is_kept(monkeypatch):
    told = []
    gate_up = triton_products.gate_up
    monkeypatch.setattr(
        triton_products, "gate_up", lambda *a, keep, **k: told.append(keep) or gate_up(*a, keep=keep, **k)
    )
    operands = operands_of("gated")
    side(ours, "gated")(*operands)
    with torch.no_grad():
        side(ours, "gated")(*[each.requires_grad_(each.is_floating_point()) for each in operands])
    side(ours, "gated")(*operands)
    assert told == [False, False, True]


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter's products are NumPy's, whose bits go by shape")
def test_a_token_has_the_same_bits_beside_any_others():
    operands = operands_of("gated", tokens=40)
    whole = side(ours, "gated")(*operands)
    some = [each[7:9] for each in operands[:3]]
    assert torch.equal(side(ours, "gated")(*some, *operands[3:]), whole[7:9])


@pytest.mark.parametrize("with_weights", [True, False])
@pytest.mark.parametrize("identity", [None, torch.nn.Identity()])
def test_experts_past_the_last_return_their_input(with_weights, identity):
    hidden_states, ids, routing, gate_up, down = operands_of("gated")
    ids = torch.randint(0, EXPERTS + 2, routing.shape, device=DEVICE)
    gate_up = torch.cat([gate_up, torch.full_like(gate_up[:2], 1e30)])  # that nobody uses

    def call(home):
        def run(hidden_states, routing, *weights):
            weights = weights if with_weights else (None, None)
            rest = (functional.silu, EXPERTS, identity)
            assert ours.refuses_or_identity(None, hidden_states, ids, routing, *weights, *rest) is None
            return home.gated_or_identity(hidden_states, ids, routing, *weights, *rest)

        return run

    assert_matches(call(ours), call(reference), [hidden_states, routing, gate_up, down])


@pytest.mark.parametrize(
    ("number", "change", "reason"),
    [
        (0, lambda x: x[None], "hidden states [1,"),
        (3, lambda x: x.double(), "weights are torch.float64"),
        (5, lambda x: torch.tanh, "activation is tanh"),
        (6, lambda x: -1.0, "is -1.0"),
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
    assert "loses_in_float32" in DECLARED["biased_alpha_gated_float32"].loses
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        assert ours.loses(None, x) is None


def test_16_bits_are_added_up_in_float32():
    # 256 experts of 256 tokens each add 1/2048 to 1: float16 alone would stay at 1.
    ids = torch.zeros(1, 257, dtype=torch.long, device=DEVICE)
    weights = torch.full((1, 257), 2.0**-12, device=DEVICE)
    weights[0, 0] = 1
    up, down = (torch.ones(1, size, 1, device=DEVICE).half() for size in (2, 1))
    found = ours.gated(torch.ones(1, 1, device=DEVICE).half(), ids, weights.half(), up, down, functional.relu)
    close(found, torch.tensor([[1 + 2.0**-4]], device=DEVICE), 1e-6)
