from functools import partial

import pytest
import torch
from torch.nn import functional

from tests.kernels.matching import assert_matches
from tests.kernels.moe_experts.formulas import (
    CASES,
    EXPERTS,
    HIDDEN,
    INNER,
    LIMIT,
    SENTINEL,
    TOP_K,
    inputs,
    loop,
    one_by_one,
)
from veomni_hook.kernels.moe_experts import reference
from veomni_hook.kernels.moe_experts.variants import OP
from veomni_hook.kernels.selection.registry import load_attribute

every_case = pytest.mark.parametrize("name", CASES)


def ours(name, case, *operands):
    return reference.of(name)(*operands, *case.rest)


def assert_same(name, operands, oracle=loop, **options):
    case = CASES[name]
    assert_matches(partial(ours, name, case), partial(oracle, case), operands, **options)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(3)


def test_every_variant_is_declared_and_has_a_reference():
    assert all(callable(load_attribute(row.reference)) for row in OP.variants.values())
    assert set(CASES) < set(OP.variants)


@every_case
def test_is_the_formula_token_by_token(name):
    assert_same(name, inputs(CASES[name]), one_by_one)


@every_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_has_the_bits_of_a_loop_over_experts(name, dtype):
    assert_same(name, inputs(CASES[name], dtype), exact=True)


@every_case
def test_routing_weights_of_a_wider_dtype(name):
    assert_same(name, inputs(CASES[name], torch.bfloat16, torch.float32), exact=True)


@every_case
@pytest.mark.parametrize(
    "ids",
    [
        torch.zeros(0, TOP_K, dtype=torch.long),
        torch.full((4, TOP_K), 2),
        torch.full((4, TOP_K), SENTINEL),
        torch.tensor([[0, 0, 4], [4, SENTINEL, 4]]),
    ],
    ids=["no tokens", "one expert three times", "sentinels only", "duplicates"],
)
def test_odd_routings(name, ids):
    assert_same(name, inputs(CASES[name], torch.bfloat16, ids=ids), exact=True)


@every_case
def test_frozen_experts(name):
    operands = inputs(CASES[name])
    wanted = [True, False, True] + [False] * (len(operands) - 3)
    assert_same(name, operands, wanted=wanted, exact=True)


def test_ids_past_the_sentinel_add_nothing_either():
    case = CASES["gated"]
    operands = inputs(case, ids=torch.tensor([[0, SENTINEL + 7, 1]]))
    known = [*operands]
    known[1] = torch.tensor([[0, SENTINEL, 1]])
    assert torch.equal(ours("gated", case, *operands), ours("gated", case, *known))


def test_the_limit_acts_before_or_after_the_activation():
    operands = inputs(CASES["gated_clamped"])
    before = reference.of("gated_clamped")(*operands, functional.silu, LIMIT)
    after = reference.of("gated_clamped_after")(*operands, functional.silu, LIMIT)
    assert not torch.allclose(before, after)


@pytest.mark.parametrize("with_weights", [True, False])
def test_experts_past_the_last_with_weights_return_their_input(with_weights):
    hidden_states, _, routing, gate_up, down = inputs(CASES["gated"])
    ids = torch.randint(0, EXPERTS + 2, routing.shape)
    result = reference.gated_or_identity(
        hidden_states, ids, routing, gate_up if with_weights else None, down if with_weights else None,
        functional.silu, EXPERTS,
    )  # fmt: skip
    real = (ids < EXPERTS) if with_weights else torch.zeros_like(ids, dtype=torch.bool)
    kept = (routing * ~real).sum(-1, keepdim=True) * hidden_states
    computed = one_by_one(
        CASES["gated"], hidden_states, torch.where(real, ids, SENTINEL), routing, gate_up, down
    )
    torch.testing.assert_close(result, kept + computed)


def test_the_identity_may_be_a_module():
    seen = []
    identity = torch.nn.Identity()
    identity.register_forward_hook(lambda module, inputs, output: seen.append(len(output)))
    hidden_states, _, routing, gate_up, down = inputs(
        CASES["gated"], ids=torch.tensor([[0, EXPERTS, EXPERTS]])
    )
    ids = torch.tensor([[0, EXPERTS, EXPERTS]])
    rest = (ids, routing, gate_up, down, functional.silu, EXPERTS)
    assert torch.equal(
        reference.gated_or_identity(hidden_states, *rest, identity),
        reference.gated_or_identity(hidden_states, *rest),
    )
    assert seen == [2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shared_gated(dtype):
    hidden_states, weights = torch.randn(3, 4, HIDDEN).to(dtype), torch.rand(3, 4, 2).to(dtype)
    gate, up = torch.randn(2, 2, INNER, HIDDEN).to(dtype)
    down = torch.randn(2, HIDDEN, INNER).to(dtype)

    def one_by_one(hidden_states, weights, gate, up, down):
        total = 0
        for expert in range(2):
            rows = functional.silu(functional.linear(hidden_states, gate[expert]))
            rows = rows * functional.linear(hidden_states, up[expert]) * weights[..., expert, None]
            total = total + functional.linear(rows, down[expert]).float()
        return total.to(hidden_states.dtype)

    def ours(*operands):
        return reference.shared_gated(*operands, functional.silu, 2)

    assert_matches(ours, one_by_one, [hidden_states, weights, gate, up, down])


def test_modules_by_a_mask():
    experts = [torch.nn.Linear(HIDDEN, HIDDEN) for _ in range(EXPERTS)]
    ids = torch.tensor([[0], [3], [3], [1]])
    mask = functional.one_hot(ids, EXPERTS)
    mask[2] = 0  # the expert's capacity was used up
    hidden_states, routing = torch.randn(4, HIDDEN), torch.rand(4, 1)
    spare = torch.nn.Linear(HIDDEN, HIDDEN)
    result = reference.modules(hidden_states, mask, routing, iter([*experts, spare]))
    for token, expert in enumerate([0, 3, None, 1]):
        expected = 0 * hidden_states[token]
        if expert is not None:
            expected = experts[expert](hidden_states[token, None])[0] * routing[token]
        torch.testing.assert_close(result[token], expected)


def test_batched_gated():
    rows = torch.randn(EXPERTS * 4, HIDDEN)
    gate_up, down = torch.randn(EXPERTS, HIDDEN, 2 * INNER), torch.randn(EXPERTS, INNER, HIDDEN)
    result = reference.batched_gated(rows, gate_up, down, functional.gelu, HIDDEN)
    for expert in range(EXPERTS):
        share = slice(4 * expert, 4 * expert + 4)
        gate, up = rows[share] @ gate_up[expert, :, :INNER], rows[share] @ gate_up[expert, :, INNER:]
        torch.testing.assert_close(result[share], (functional.gelu(gate) * up) @ down[expert])


def test_grouped_linear():
    sizes, weight = [2, 0, 3, 1, 1], torch.randn(EXPERTS, INNER, HIDDEN)
    rows = torch.randn(7, HIDDEN)
    owners = torch.tensor([0, 0, 2, 2, 2, 3, 4])
    expected = torch.stack([weight[owner] @ row for owner, row in zip(owners, rows, strict=True)])
    torch.testing.assert_close(reference.grouped_linear(rows, sizes, weight), expected)
