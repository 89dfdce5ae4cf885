"""What every backend of experts with stacked weights keeps: the reference's results and every gradient of them."""

from functools import partial

import pytest
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.kernels import declared
from tests.kernels.matching import assert_matches, close, gradients
from tests.kernels.moe_experts.backends import BACKENDS, COMPOSED, LAYOUTS, SOME_LAYOUTS, every
from tests.kernels.moe_experts.formulas import CASES, EXPERTS, HIDDEN, LIMIT, SENTINEL, TOP_K
from veomni_hook.kernels.moe_experts.variants import OP, Layout
from veomni_hook.kernels.selection.registry import load_attribute
from veomni_hook.kernels.shared.activations import FUNCTIONS

#: Their activation is no operand.
ALPHA = {name for name in CASES if "alpha" in name}
every_backend = pytest.mark.parametrize("backend", BACKENDS, indirect=True)


def of_torch_or(others, without=frozenset()):
    """All variants of the torch backend, and ``others`` of those that one layout is as good as another for."""
    return lambda b: [name for name in b.stacked if name not in without] if b.name == "torch" else others


every_variant = every(lambda backend: backend.stacked)
every_layout = every(of_torch_or(LAYOUTS))
some_layouts = every(of_torch_or(LAYOUTS), soon=SOME_LAYOUTS.__contains__)
# Of operators, which composed ones are not.
every_gate = every(of_torch_or(LAYOUTS, COMPOSED))
some_gates = every(of_torch_or(LAYOUTS, COMPOSED), soon=SOME_LAYOUTS.__contains__)


@pytest.fixture
def backend(request):
    if request.param == "triton":
        pytest.importorskip("triton")
    if request.param == "npu":
        request.getfixturevalue("operators")
    return BACKENDS[request.param]


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(5)


@every_backend
def test_every_variant_is_declared(backend):
    stacked = {name for name, row in OP.variants.items() if isinstance(row.form, Layout)}
    composed = set() if backend.name == "torch" else COMPOSED
    assert backend.declared.keys() & OP.variants.keys() == (stacked | {"gated_or_identity"}) - composed


@pytest.mark.sample(2)
@every_variant
@pytest.mark.parametrize("tokens", [1, 17, pytest.param(300, marks=pytest.mark.slow)])
def test_equals_the_reference(backend, name, tokens):
    if backend.name == "triton" and backend.device == "cpu":
        tokens = min(tokens, 40)  # more would take the interpreter minutes
    for dtype in backend.dtypes:
        # A single row in 16 bits may be little more than the rounding of what it is added up of; among many, a value
        # is rounded across the limit, where it has no gradient.
        most = 40 if name.endswith("clamped_after") else 300
        if dtype.itemsize > 2 or 1 < tokens <= most:
            backend.assert_same(name, backend.operands(name, dtype, tokens=tokens))


@pytest.mark.sample(6)
@some_layouts
@pytest.mark.parametrize("other", [torch.bfloat16, torch.float64], ids=str)
def test_routing_weights_of_another_dtype(backend, name, other):
    backend.assert_same(name, backend.operands(name, torch.float32, other))


@pytest.mark.sample(16)
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
def test_odd_routings(backend, name, ids):
    operands = backend.operands(name, ids=ids.expand(-1, TOP_K))
    operands[1:3] = [each[:, : ids.shape[1]] for each in operands[1:3]]
    backend.assert_same(name, operands)


@every_gate
@pytest.mark.parametrize("tokens", [0, 4])
def test_where_no_expert_has_a_token_everything_is_zero(backend, name, tokens):
    operands = backend.operands(name, ids=torch.full((tokens, TOP_K), SENTINEL))
    floating = [each.is_floating_point() for each in operands]
    (found,), grads = gradients(backend.side(name), operands, floating)
    assert found.shape == (tokens, HIDDEN) and not found.any()
    for grad, of, want in zip(grads, operands, floating, strict=True):
        assert grad is None if not want else grad.shape == of.shape and not grad.any()


@pytest.mark.sample(11)
@every_layout
def test_memory_that_nobody_writes_does_not_show(backend, name, monkeypatch):
    filled = torch.empty

    def empty(*args, **options):
        made = filled(*args, **options)
        return made.fill_(float("nan")) if made.is_floating_point() else made

    monkeypatch.setattr(torch, "empty", empty)
    operands = backend.operands(name, ids=torch.tensor([[1, 1, 3], [SENTINEL, 3, 1]]))
    floating = [each.is_floating_point() for each in operands]
    (found,), grads = gradients(backend.side(name), operands, floating)
    assert not found.isnan().any() and not grads[2].isnan().any() and grads[2][1, 0] == 0
    for grad in grads[3:]:
        assert not grad[[0, 2, 4]].any() and grad[[1, 3]].any() and not grad.isnan().any()


@pytest.mark.sample(6)
@every(of_torch_or(LAYOUTS), soon=SOME_LAYOUTS.__contains__, of_all=True)
@pytest.mark.parametrize("wanted", range(6))
def test_gradients_only_where_wanted(backend, name, wanted):
    operands = backend.operands(name)
    some = [each.is_floating_point() for each in operands]
    # Frozen experts, frozen hidden states and routing, everything frozen, and one operand at a time.
    some = {
        0: [*some[:3], *[False] * (len(some) - 3)],
        1: [False, False, False, *some[3:]],
        2: [False] * len(some),
    }.get(wanted) or [number == (2, 3, len(some) - 1)[wanted - 3] for number in range(len(some))]
    backend.assert_same(name, operands, wanted=some)


@pytest.mark.sample(2)
@some_layouts
def test_operands_that_are_not_contiguous(backend, name):
    operands = backend.operands(name)
    turned = [each.transpose(0, -1).contiguous().transpose(0, -1) for each in operands]
    apart = [torch.cat([each, each + 1], -1)[..., : each.shape[-1]] for each in operands]
    for changed in (turned, apart):
        assert not any(each.is_contiguous() for each in changed)
        backend.assert_same(name, changed)


@pytest.mark.sample(3)
@some_layouts
def test_a_gradient_that_is_expanded(backend, name):
    total, expected = (lambda *x, side=side: side(*x).sum() for side in backend.sides(name))
    assert_matches(total, expected, backend.operands(name))


@pytest.mark.sample(10)
@every(of_torch_or(["gated", "ungated"], COMPOSED | ALPHA), soon="gated".__eq__)
@pytest.mark.parametrize("activation", FUNCTIONS)
def test_every_activation(backend, name, activation):
    rest = (FUNCTIONS[activation], *CASES[name].rest[1:])
    assert_matches(*backend.sides(name, *rest), backend.operands(name), tolerance=1e-5)


@pytest.mark.sample(4)
@every(lambda backend: [name for name in backend.stacked if LIMIT in CASES[name].rest])
@pytest.mark.parametrize("limit", [0.25, pytest.param(7, marks=pytest.mark.slow), float("inf")])
def test_what_stands_at_the_limit_has_its_gradient(backend, name, limit):
    rest = tuple(limit if each == LIMIT else each for each in CASES[name].rest)
    operands = backend.operands(name)
    # All numbers are multiples of 1/4, so that many first products are at the limit exactly.
    operands[0], operands[3] = operands[0].round(), (operands[3] * 2).round() / 4
    assert_matches(*backend.sides(name, *rest), operands)


@pytest.mark.sample(4)
@some_layouts
@pytest.mark.parametrize("cast", [False, True], ids=["float32", "low"])
def test_under_autocast(backend, name, cast):
    with torch.autocast(backend.device, dtype=backend.low):
        operands = backend.operands(name, torch.float32, torch.float32, tokens=60)
        operands[0] = operands[0].to(backend.low if cast else torch.float32)
        backend.assert_same(name, operands, tolerance=2e-2)


@some_gates
def test_second_derivatives(backend, name):
    def squared(side):
        def run(*operands):
            leaves = [each for each in operands if each.is_floating_point()]
            first = torch.autograd.grad(side(*operands).square().sum(), leaves, create_graph=True)
            return sum(each.square().sum() for each in first)

        return run

    ours, expected = map(squared, backend.sides(name))
    assert_matches(ours, expected, backend.operands(name, tokens=5), tolerance=1e-4)


@pytest.mark.sample(4)
@every(of_torch_or(["gated"]))
@pytest.mark.parametrize("reentrant", [True, False])
def test_with_activation_checkpointing(backend, name, reentrant):
    side = backend.side(name)
    kept = partial(checkpoint, side, use_reentrant=reentrant)
    assert_matches(kept, side, backend.operands(name), exact=True)


@pytest.mark.sample(1)
@every(of_torch_or(sorted(SOME_LAYOUTS), COMPOSED), soon=SOME_LAYOUTS.__contains__, of_all=True)
@pytest.mark.parametrize("dynamic", [pytest.param(False, marks=pytest.mark.slow), True])
def test_is_traced_without_a_graph_break(backend, name, dynamic):
    torch._dynamo.reset()
    side = backend.side(name)
    compiled = torch.compile(side, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for tokens in (17, 40) if dynamic else (17,):
        assert_matches(compiled, side, backend.operands(name, tokens=tokens), exact=True)


@pytest.mark.sample(3)
@some_layouts
def test_equal_bits_from_run_to_run(backend, name):
    operands = backend.operands(name, tokens=40)
    wanted = [each.is_floating_point() for each in operands]
    (one, grads), (other, again) = (gradients(backend.side(name), operands, wanted) for _ in range(2))
    assert torch.equal(one[0], other[0])
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(grads, again, strict=True))


@every_backend
@pytest.mark.parametrize("with_weights", [True, False])
@pytest.mark.parametrize("identity", [None, torch.nn.Identity()], ids=["by number", "by module"])
def test_experts_past_the_last_return_their_input(backend, with_weights, identity):
    hidden_states, _, routing, gate_up, down = backend.operands("gated")
    ids = torch.randint(0, EXPERTS + 2, routing.shape, device=backend.device)
    gate_up = torch.cat([gate_up, torch.full_like(gate_up[:2], 1e30)])  # that nobody uses

    def call(function):
        def run(hidden_states, routing, *weights):
            weights = weights if with_weights else (None, None)
            rest = (functional.silu, EXPERTS, identity)
            asked = (None, hidden_states, ids, routing, *weights, *rest)
            assert load_attribute(backend.declared["gated_or_identity"].refuses)(*asked) is None
            return function(hidden_states, ids, routing, *weights, *rest)

        return run

    sides = map(call, declared.pair("moe_experts", "gated_or_identity", backend.name))
    assert_matches(*sides, [hidden_states, routing, gate_up, down])


@every_backend
def test_16_bits_are_added_up_in_float32(backend):
    # 256 experts of a token each add 1/4096 to 1: float16 alone would stay at 1.
    ids = torch.zeros(1, 257, dtype=torch.long, device=backend.device)
    weights = torch.full((1, 257), 2.0**-12, device=backend.device)
    weights[0, 0] = 1
    up, down = (torch.ones(1, size, 1, device=backend.device).half() for size in (2, 1))
    x = torch.ones(1, 1, device=backend.device).half()
    found = declared.kernel("moe_experts", "gated", backend.name)(
        x, ids, weights.half(), up, down, functional.relu
    )
    close(found, torch.tensor([[1 + 2.0**-4]], device=backend.device), 1e-6)
