"""The torch backend against the reference: outputs and every gradient; `torch_grouped` runs on a CPU, too."""

from __future__ import annotations

import dataclasses
from functools import partial

import pytest
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.kernels.matching import assert_matches, close, gradients
from tests.kernels.moe_experts import formulas
from tests.kernels.moe_experts.formulas import CASES, EXPERTS, HIDDEN, INNER, LIMIT, SENTINEL, TOP_K, inputs
from veomni_hook.kernels.activations import FUNCTIONS
from veomni_hook.kernels.moe_experts import (
    OP,
    autograd,
    reference,
    torch_by_expert,
    torch_composed,
    torch_grouped,
    torch_routing,
)
from veomni_hook.kernels.moe_experts import torch as ours
from veomni_hook.kernels.registry import load_attribute, registry

DTYPES = pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str
)
DECLARED = [kernel for kernel in registry.kernels("moe_experts") if kernel.backend == "torch"]
STACKED = [kernel.variant for kernel in DECLARED if kernel.variant in CASES]
every_variant = pytest.mark.parametrize("name", STACKED)
GATES = [name for name in STACKED if name not in ("gated_jointly", "gated_normalised")]
every_gate = pytest.mark.parametrize("name", GATES)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(5)


def side(home, name, *changed):
    """The function of a variant without the operands that are no tensors."""
    rest = changed or CASES[name].rest
    home = torch_composed if home is ours and hasattr(torch_composed, name) else home
    return lambda *operands: getattr(home, name)(*operands, *rest)


def assert_same(name, operands, **options):
    assert refusal(name, operands) is None
    assert_matches(side(ours, name), side(reference, name), operands, **options)


def refusal(name, operands, *rest, owner=None):
    kernel = next(kernel for kernel in DECLARED if kernel.variant == name)
    return load_attribute(kernel.refuses)(owner, *operands, *(rest or CASES[name].rest))


def test_every_variant_with_stacked_weights_of_chosen_experts_has_a_kernel():
    others = {"batched_gated", "shared_gated", "grouped_linear", "modules"}
    assert {kernel.variant for kernel in DECLARED} == set(OP.variants) - others


@every_variant
@DTYPES
@pytest.mark.parametrize("tokens", [1, 17, 300])
def test_equals_the_reference(name, dtype, tokens):
    assert_same(name, inputs(CASES[name], dtype, tokens=tokens))


@every_variant
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_routing_weights_of_another_dtype(name, dtype):
    for other in (torch.float32, torch.bfloat16, torch.float64):
        assert_same(name, inputs(CASES[name], dtype, other))


@every_variant
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
    assert_same(name, inputs(CASES[name], ids=ids))


@every_gate
@pytest.mark.parametrize("tokens", [0, 4])
def test_where_no_expert_has_a_token_everything_is_zero(name, tokens):
    operands = inputs(CASES[name], ids=torch.full((tokens, TOP_K), SENTINEL))
    floating = [each.is_floating_point() for each in operands]
    (found,), grads = gradients(side(ours, name), operands, floating)
    assert found.shape == (tokens, HIDDEN) and not found.any()
    for grad, of, want in zip(grads, operands, floating, strict=True):
        assert grad is None if not want else grad.shape == of.shape and not grad.any()


@every_variant
def test_experts_without_tokens_get_zeros(name, monkeypatch):
    # Memory that nobody writes would show.
    filled = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: filled(*a, **k).fill_(float("nan")))
    operands = inputs(CASES[name], ids=torch.tensor([[1, 1, 3], [SENTINEL, 3, 1]]))
    _, grads = gradients(side(ours, name), operands, [each.is_floating_point() for each in operands])
    for grad in grads[3:]:
        assert not grad[[0, 2, 4]].any() and grad[[1, 3]].any()


@every_variant
@pytest.mark.parametrize("wanted", range(6))
def test_gradients_only_where_wanted(name, wanted):
    operands = inputs(CASES[name])
    some = [each.is_floating_point() for each in operands]
    # Frozen experts, frozen hidden states and routing, everything frozen, and one operand at a time.
    some = {
        0: [*some[:3], *[False] * (len(some) - 3)],
        1: [False, False, False, *some[3:]],
        2: [False] * len(some),
    }.get(wanted) or [number == (2, 3, len(some) - 1)[wanted - 3] for number in range(len(some))]
    assert_same(name, operands, wanted=some)


def test_of_frozen_experts_no_weight_gradient_is_computed(monkeypatch):
    monkeypatch.setattr(torch_by_expert, "weight_gradient", None)
    operands = inputs(CASES["gated"])
    assert_same("gated", operands, wanted=[True, False, True, False, False])
    with pytest.raises(TypeError):
        assert_same("gated", operands, wanted=[False, False, False, True, False])


@every_variant
def test_operands_that_are_not_contiguous(name):
    operands = inputs(CASES[name])
    turned = [each.transpose(0, -1).contiguous().transpose(0, -1) for each in operands]
    assert not any(each.is_contiguous() for each in turned)
    assert_same(name, turned)


@every_variant
def test_a_gradient_that_is_expanded(name):
    operands = inputs(CASES[name])
    total, expected = (lambda *x, home=home: side(home, name)(*x).sum() for home in (ours, reference))
    assert_matches(total, expected, operands)


@every_variant
@pytest.mark.parametrize("rows", [1, 7, 1000])
def test_chunks_of_any_size(name, rows, monkeypatch):
    monkeypatch.setattr(torch_by_expert, "CHUNK_ROWS", rows)
    assert_same(name, inputs(CASES[name], torch.bfloat16, tokens=90))


def test_chunks_hold_every_pair_of_an_expert_once():
    ids = torch.tensor([[4, 1, SENTINEL], [1, 1, 3], [-1, 4, 0]])
    pairs = torch_routing.sorted_pairs(ids, EXPERTS)
    for rows in (1, 3, 100):
        seen = {}
        for chunk in pairs.chunks(rows):
            assert torch.equal(chunk.places, pairs.order[chunk.rows])
            assert len(chunk.places) >= rows or max(chunk.experts)[0] == 4
            for expert, part in chunk.experts:
                assert expert not in seen
                seen[expert] = chunk.places[part].tolist()
        assert seen == {0: [8], 1: [1, 3, 4], 3: [5], 4: [0, 7]}


def test_pairs_of_an_expert_stand_in_the_order_of_their_places():
    ids = torch.randint(0, 3, (5000, 2))  # so many that a sort keeps no order by itself
    order = torch_routing.sorted_pairs(ids, 3).order
    assert torch.equal(order, torch.cat([(ids.flatten() == e).nonzero().flatten() for e in range(3)]))


@pytest.mark.parametrize("activation", FUNCTIONS)
@pytest.mark.parametrize("name", [name for name in GATES if "alpha" not in name])
def test_every_activation(name, activation):
    rest = (FUNCTIONS[activation], *CASES[name].rest[1:])
    sides = [side(home, name, *rest) for home in (ours, reference)]
    assert_matches(*sides, inputs(CASES[name]), tolerance=1e-5)


@every_gate
@pytest.mark.parametrize("limit", [0.25, 7, float("inf")])
def test_what_stands_at_the_limit_has_its_gradient(name, limit):
    case = CASES[name]
    rest = tuple(limit if each == LIMIT else each for each in case.rest)
    operands = inputs(case)
    # All numbers are multiples of 1/4, so that many first products are at the limit exactly.
    operands[0], operands[3] = operands[0].round(), (operands[3] * 2).round() / 4
    sides = [side(home, name, *rest) for home in (ours, reference)]
    assert_matches(*sides, operands)


@every_variant
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_under_autocast(name, dtype):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        operands = inputs(CASES[name], dtype, torch.float32, tokens=60)
        assert_same(name, operands, tolerance=2e-2)


def test_weights_of_another_dtype_need_autocast():
    operands = inputs(CASES["gated"])
    operands[0] = operands[0].bfloat16()
    assert "weights are" in refusal("gated", operands)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_same("gated", operands)


@pytest.mark.parametrize(
    "name",
    [
        name
        if name in {"gated", "biased_interleaved_alpha_gated"}
        else pytest.param(name, marks=pytest.mark.slow)
        for name in STACKED
        if "float32" not in name
    ],
)
def test_gradients_are_derivatives(name):
    operands = inputs(CASES[name], torch.float64, tokens=4)
    leaves = [each.requires_grad_(each.is_floating_point()) for each in operands]
    torch.autograd.gradcheck(side(ours, name), leaves)


@every_gate
def test_second_derivatives(name):
    def squared(home):
        def run(*operands):
            out = side(home, name)(*operands)
            leaves = [each for each in operands if each.is_floating_point()]
            first = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
            return sum(each.square().sum() for each in first)

        return run

    assert_matches(squared(ours), squared(reference), inputs(CASES[name], tokens=5), tolerance=1e-5)


@every_variant
def test_with_activation_checkpointing(name):
    for reentrant in (True, False):
        kept = partial(checkpoint, side(ours, name), use_reentrant=reentrant)
        assert_matches(kept, side(ours, name), inputs(CASES[name]), exact=True)


@every_gate
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_is_traced_without_a_graph_break(name, dtype):
    torch._dynamo.reset()
    compiled = torch.compile(side(ours, name), fullgraph=True, backend="aot_eager")
    assert_matches(compiled, side(ours, name), inputs(CASES[name], dtype), exact=True)


@every_gate
def test_the_operators_keep_their_contracts(name):
    operands = inputs(CASES[name])
    tensors, rest = autograd.taken_apart([*operands, *CASES[name].rest])
    form = autograd.form_of(name, tensors, rest)
    call = (*tensors, *form, True)
    torch.library.opcheck(torch.ops.veomni_hook.moe_experts_torch.default, call)
    _, kept = torch.ops.veomni_hook.moe_experts_torch(*call)
    grad, needed = torch.randn(operands[0].shape), [each is not None for each in (tensors[0], *tensors[2:])]
    for wanted in (needed, [False, True, *[False] * 4]):
        call = (grad, *tensors, kept, *form, wanted, False)
        torch.library.opcheck(torch.ops.veomni_hook.moe_experts_torch_backward.default, call)


@every_variant
def test_equal_bits_from_run_to_run(name):
    operands = inputs(CASES[name], tokens=300)
    wanted = [each.is_floating_point() for each in operands]
    (one, grads), (other, again) = (gradients(side(ours, name), operands, wanted) for _ in range(2))
    assert torch.equal(one[0], other[0])
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(grads, again, strict=True))


def test_without_gradients_nothing_is_kept(monkeypatch):
    kept = []
    forward = torch_by_expert.forward

    def watched(operands, form, *, keep):
        found = forward(operands, form, keep=keep)
        kept.append(len(found[1]))
        return found

    monkeypatch.setattr(torch_by_expert, "forward", watched)
    operands = inputs(CASES["gated"])
    side(ours, "gated")(*operands)
    with torch.no_grad():
        side(ours, "gated")(*[each.requires_grad_(each.is_floating_point()) for each in operands])
    side(ours, "gated")(*operands)
    assert kept == [0, 0, operands[1].numel()]


#: Rows of these sizes are multiples of 16 bytes.
ALIGNED = {HIDDEN: 16, INNER: 8, 2 * INNER: 16}


def aligned(name):
    shapes = {key: tuple(map(ALIGNED.get, shape)) for key, shape in CASES[name].shapes.items()}
    return dataclasses.replace(CASES[name], shapes=shapes)


@every_gate
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [3, 70])
def test_grouped_products(name, dtype, tokens, monkeypatch):
    if not hasattr(torch, "_grouped_mm"):
        pytest.skip("this torch has none")
    monkeypatch.setattr(ours, "torch_by_expert", torch_grouped)
    monkeypatch.setattr(formulas, "HIDDEN", ALIGNED[HIDDEN])
    try:
        torch._grouped_mm(torch.ones(1, 8), torch.ones(1, 8, 8), offs=torch.ones(1, dtype=torch.int32))
    except (RuntimeError, NotImplementedError) as error:
        pytest.skip(f"this torch has none on a CPU: {error}")
    operands = inputs(aligned(name), dtype, tokens=tokens)
    assert_same(name, operands)
    some = [True, False, *[False] * (len(operands) - 2)]
    assert_same(name, operands, wanted=some)


@pytest.mark.parametrize("with_weights", [True, False])
@pytest.mark.parametrize("identity", [None, torch.nn.Identity()])
def test_experts_past_the_last_return_their_input(with_weights, identity):
    hidden_states, _, routing, gate_up, down = inputs(CASES["gated"])
    ids = torch.randint(0, EXPERTS + 2, routing.shape)
    gate_up = torch.cat([gate_up, torch.full_like(gate_up[:2], 1e30)])  # that nobody uses

    def call(home):
        def run(hidden_states, routing, *weights):
            weights = weights if with_weights else (None, None)
            rest = (functional.silu, EXPERTS, identity)
            assert ours.refuses_or_identity(None, hidden_states, ids, routing, *weights, *rest) is None
            return home.gated_or_identity(hidden_states, ids, routing, *weights, *rest)

        return run

    assert_matches(call(ours), call(reference), [hidden_states, routing, gate_up, down])


def test_an_identity_with_hooks_is_called():
    identity = torch.nn.Identity()
    identity.register_forward_hook(lambda *_: None)
    operands = inputs(CASES["gated"])
    assert "hooks" in ours.refuses_or_identity(None, *operands, functional.silu, EXPERTS, identity)
    assert "num_experts" in ours.refuses_or_identity(None, *operands, functional.silu, EXPERTS + 1)


@pytest.mark.parametrize(
    ("number", "change", "reason"),
    [
        (0, lambda x: x[None], "hidden states [1,"),
        (0, lambda x: x.to(torch.int64), "int64"),
        (1, lambda x: x[:, :1], "ids"),
        (1, lambda x: x.float(), "ids of experts are"),
        (2, lambda x: x > 0, "bool"),
        (3, lambda x: x[0], "weights"),
        (3, lambda x: x[1:], "weights"),
        (3, lambda x: x.double(), "weights are torch.float64"),
        (4, lambda x: x.to("meta"), "meta"),
        (4, lambda x: x.as_subclass(type("Other", (torch.Tensor,), {})), "Other"),
        (5, lambda x: torch.tanh, "activation is tanh"),
        (6, lambda x: None, "None is no number"),
        (6, lambda x: torch.tensor(1.0), "is no number"),
    ],
)
def test_refuses(number, change, reason):
    operands = [*inputs(CASES["gated_clamped"]), functional.silu, LIMIT]
    assert ours.refuses(None, *operands) is None
    operands[number] = change(operands[number])
    assert reason in ours.refuses(None, *operands)


def test_refuses_biases_of_integers_and_transforms():
    operands = inputs(CASES["biased_interleaved_alpha_gated"])
    operands[4] = operands[4].int()
    assert "int32" in refusal("biased_interleaved_alpha_gated", operands)
    operands = inputs(CASES["gated"])
    reasons = []
    torch.func.vmap(lambda x: reasons.append(refusal("gated", operands)) or x)(torch.ones(2))
    assert reasons == ["a torch.func transform is active"]


class Experts:
    """What `loses` looks at."""

    def __init__(self, implementation):
        self.config = type("Config", (), {"_experts_implementation": implementation})


def test_auto_picks_it_only_where_it_was_measured_faster():
    def loses(implementation, tokens, *up, dtype=torch.float32, device="meta"):
        x = torch.empty(tokens, up[2], dtype=dtype, device=device)
        index = torch.empty(tokens, 8, device="meta")
        stacked = torch.empty(up, device="meta")
        if device == "meta":
            x = type("OnCPU", (), {"device": torch.device("cpu"), "dtype": dtype})
        return ours.loses(Experts(implementation), x, index, None, stacked)

    big, small = (64, 1536, 2048), (64, 256, 256)
    assert loses("grouped_mm", 2048, *big) is None
    assert "few tokens" in loses("grouped_mm", 64, *big)
    assert "small" in loses("grouped_mm", 2048, *small)
    assert loses("grouped_mm", 2048, *small, dtype=torch.bfloat16) is None
    assert loses("eager", 1, *big) is None
    assert loses(None, 2048, *small) is None
    assert "little" in loses(None, 1, 4, 16, 16)
    x = type("OnGPU", (), {"device": torch.device("cuda")})
    assert "not measured" in ours.loses(None, x, None, None, None)


def test_16_bits_are_added_up_in_float32():
    # 256 experts of 256 tokens each add 1/256 to 1: bfloat16 alone would stay at 1.
    ids = torch.zeros(1, 257, dtype=torch.long)
    weights = torch.full((1, 257), 2.0**-8)
    weights[0, 0] = 1
    up, down = torch.ones(1, 2, 1).bfloat16(), torch.ones(1, 1, 1).bfloat16()
    found = ours.gated(torch.ones(1, 1).bfloat16(), ids, weights.bfloat16(), up, down, functional.relu)
    close(found, torch.tensor([[2.0]]), 1e-6)
