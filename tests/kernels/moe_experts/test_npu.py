"""The npu kernels on the double of torch_npu's operators, against the reference."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.kernels.matching import assert_matches, gradients
from tests.kernels.moe_experts.formulas import CASES, EXPERTS, HIDDEN, SENTINEL, TOP_K, inputs
from veomni_hook.kernels.activations import FUNCTIONS
from veomni_hook.kernels.moe_experts import forms, reference
from veomni_hook.kernels.moe_experts import npu as ours
from veomni_hook.kernels.registry import load_attribute, registry

pytestmark = pytest.mark.usefixtures("operators")

DECLARED = {k.variant: k for k in registry.kernels("moe_experts") if k.backend == "npu"}
STACKED = [variant for variant in DECLARED if variant in CASES]
every_variant = pytest.mark.parametrize("name", STACKED)
#: Every way of storing weights, with biases and without.
LAYOUTS = ["gated", "gated_transposed", "biased_interleaved_alpha_gated", "ungated"]
every_layout = pytest.mark.parametrize("name", LAYOUTS)
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(5)


def operands_of(name, *args, **options):
    return inputs(CASES[name], *args, **options)


def side(home, name, *changed):
    rest = changed or CASES[name].rest
    return lambda *operands: getattr(home, name)(*operands, *rest)


def assert_same(name, operands, **options):
    assert load_attribute(DECLARED[name].refuses)(None, *operands, *CASES[name].rest) is None
    assert_matches(side(ours, name), side(reference, name), operands, **options)


def test_every_variant_of_stacked_weights_is_declared():
    assert set(DECLARED) == {*forms.LAYOUTS, "gated_or_identity"}


@every_variant
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equals_the_reference(name, dtype):
    assert_same(name, operands_of(name, dtype))


def test_operators_compute_it_both_ways(called):
    assert_same("gated", operands_of("gated"))
    there = ["npu_moe_token_permute", "npu_grouped_matmul", "npu_swiglu", "npu_grouped_matmul"]
    assert called[:5] == [*there, "npu_moe_token_unpermute"]
    back = called[5:]
    assert {name: back.count(name) for name in back} == {
        "npu_moe_token_permute": 2,
        "npu_grouped_matmul": 4,
        "npu_swiglu": 1,
        "npu_swiglu_backward": 1,
        "npu_moe_token_unpermute": 1,
    }


@every_layout
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
    ],
    ids=["one expert three times", "duplicates", "past the sentinel", "int32"],
)
def test_odd_routings(name, ids):
    assert_same(name, operands_of(name, ids=ids))


@every_layout
def test_one_place(name):
    operands = operands_of(name, ids=torch.tensor([[0], [2]]).expand(-1, TOP_K))
    operands[1:3] = [each[:, :1] for each in operands[1:3]]
    assert_same(name, operands)


@every_layout
@pytest.mark.parametrize("tokens", [0, 4])
def test_where_no_expert_has_a_token_everything_is_zero(name, tokens):
    operands = operands_of(name, ids=torch.full((tokens, TOP_K), SENTINEL))
    floating = [each.is_floating_point() for each in operands]
    (found,), grads = gradients(side(ours, name), operands, floating)
    assert found.shape == (tokens, HIDDEN) and not found.any()
    assert all(grad is None or not grad.any() for grad in grads)


def test_experts_without_tokens_have_no_gradient():
    operands = operands_of("gated", ids=torch.tensor([[1, 1, 3]]))
    _, grads = gradients(side(ours, "gated"), operands, [each.is_floating_point() for each in operands])
    for grad in grads[3:]:
        assert not grad[[0, 2, 4]].any() and grad[[1, 3]].any() and not grad.isnan().any()


@every_layout
@pytest.mark.parametrize("wanted", range(4))
def test_gradients_only_where_wanted(name, wanted):
    operands = operands_of(name)
    count = len(operands)
    some = {
        0: [True, False, True, *[False] * (count - 3)],
        1: [False, False, False, *[True] * (count - 3)],
    }.get(wanted) or [number == (2, count - 1)[wanted - 2] for number in range(count)]
    assert_same(name, operands, wanted=some)


def test_of_frozen_experts_no_gradient_is_computed(called):
    operands = operands_of("gated")
    assert_same("gated", operands, wanted=[True, False, True, False, False])
    assert called.count("npu_grouped_matmul") == 4


@every_layout
def test_operands_that_are_not_contiguous(name):
    operands = operands_of(name)
    turned = [each.transpose(0, -1).contiguous().transpose(0, -1) for each in operands[:3]] + operands[3:]
    assert_same(name, turned)


@every_layout
def test_weights_that_are_neither_contiguous_nor_transposed(name):
    *others, last = operands_of(name)
    apart = (
        torch.cat((last, last), 0)[::2]
        if last.ndim == 2
        else torch.cat((last, last), -1)[..., : last.shape[-1]]
    )
    assert_same(name, [*others, apart])


@pytest.mark.parametrize("activation", FUNCTIONS)
@pytest.mark.parametrize("name", ["gated", "ungated"])
def test_every_activation(name, activation):
    sides = [side(home, name, FUNCTIONS[activation]) for home in (ours, reference)]
    assert_matches(*sides, operands_of(name), tolerance=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_under_autocast(dtype):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        operands = operands_of("gated", torch.float32, torch.float32)
        operands[0] = operands[0].to(dtype)
        assert_same("gated", operands, tolerance=2e-2)


@every_layout
def test_second_derivatives(name):
    def squared(home):
        def run(*operands):
            out = side(home, name)(*operands)
            leaves = [each for each in operands if each.is_floating_point()]
            first = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
            return sum(each.square().sum() for each in first)

        return run

    assert_matches(squared(ours), squared(reference), operands_of(name, tokens=5), tolerance=1e-4)


@pytest.mark.parametrize("reentrant", [True, False])
def test_with_activation_checkpointing(reentrant):
    kept = partial(checkpoint, side(ours, "gated"), use_reentrant=reentrant)
    assert_matches(kept, side(ours, "gated"), operands_of("gated"), exact=True)


@pytest.mark.parametrize(("name", "dynamic"), [("gated", False), ("gated", True), (LAYOUTS[2], False)])
def test_is_traced_without_a_graph_break(name, dynamic):
    torch._dynamo.reset()
    compiled = torch.compile(side(ours, name), fullgraph=True, backend="aot_eager", dynamic=dynamic)
    assert_matches(compiled, side(ours, name), operands_of(name), exact=True)


@pytest.mark.parametrize("name", ["gated", "biased_interleaved_alpha_gated"])
def test_the_operators_keep_their_contracts(name):
    operands = operands_of(name)
    tensors, rest = forms.taken_apart([*operands, *CASES[name].rest])
    form = forms.form_of(name, tensors, rest)
    operators = torch.ops.veomni_hook
    torch.library.opcheck(operators.moe_experts_npu.default, (*tensors, *form, False))
    call = (*tensors, *form, True)
    torch.library.opcheck(operators.moe_experts_npu.default, call)
    _, *kept = operators.moe_experts_npu(*call)
    grad, needed = torch.randn_like(operands[0]), [each is not None for each in (tensors[0], *tensors[2:])]
    for wanted in (needed, [False, True, *[False] * 4]):
        call = (grad, *tensors, *kept, *form, wanted, False)
        torch.library.opcheck(operators.moe_experts_npu_backward.default, call)


@pytest.mark.parametrize("with_weights", [True, False])
def test_experts_past_the_last_return_their_input(with_weights):
    hidden_states, _, routing, gate_up, down = operands_of("gated")
    ids = torch.randint(0, EXPERTS + 2, routing.shape)

    def call(home):
        def run(hidden_states, routing, *weights):
            weights = weights if with_weights else (None, None)
            rest = (functional.silu, EXPERTS, None)
            assert ours.refuses_or_identity(None, hidden_states, ids, routing, *weights, *rest) is None
            return home.gated_or_identity(hidden_states, ids, routing, *weights, *rest)

        return run

    assert_matches(call(ours), call(reference), [hidden_states, routing, gate_up, down])


def many(experts, top_k, tokens=1, hidden=2):
    """Operands whose memory is one number, for questions of their sizes alone."""
    ids = torch.zeros(1, 1, dtype=torch.int64).expand(tokens, top_k)
    number = torch.zeros(1, 1, 1)
    weights = number.expand(experts, 2, hidden), number.expand(experts, hidden, 1)
    return [number[0].expand(tokens, hidden), ids, number[0].expand(tokens, top_k), *weights, functional.silu]


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ({"experts": 1024, "top_k": 512}, None),
        ({"experts": 1025, "top_k": 1}, "at most 1024 experts"),
        ({"experts": 2, "top_k": 513}, "at most 1024 experts, 512 of them"),
        ({"experts": 2, "top_k": 8, "tokens": 1 << 21}, "fewer than 16777215 pairs"),
        ({"experts": 2, "top_k": 2, "hidden": 65536}, "fewer than 65536 columns"),
    ],
)
def test_limits_of_the_operators(sizes, reason):
    found = ours.refuses(None, *many(**sizes))
    assert found is None if reason is None else reason in found


def test_refuses_float64():
    operands = operands_of("gated", torch.float64)
    assert "float64" in ours.refuses(None, *operands, functional.silu)
