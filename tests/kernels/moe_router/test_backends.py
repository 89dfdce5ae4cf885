"""The torch and the Triton backend (interpreted on a CPU) against the reference."""

import math
from functools import partial

import pytest
import torch
from transformers.activations import ACT2FN

from tests.kernels.batches import assert_batch_invariant
from tests.kernels.dispatched import without_waits
from tests.kernels.matching import DEVICE, assert_matches, close, gradients
from veomni_hook.kernels.moe_router import given, reference
from veomni_hook.kernels.moe_router import torch as plain
from veomni_hook.kernels.moe_router.variants import LAYOUTS
from veomni_hook.kernels.selection.registry import load_attribute, registry

pytest.importorskip("triton")

from veomni_hook.kernels.moe_router import triton as fused

BACKENDS = pytest.mark.parametrize("module", [plain, fused], ids=["torch", "triton"])
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# More than a program takes of few experts.
TOKENS = 37
SQRT_SOFTPLUS = ACT2FN["sqrtsoftplus"] if "sqrtsoftplus" in ACT2FN else None
#: The variants and what is fixed of them, called with logits, a bias, and the number of experts of a token.
KINDS = {
    "softmax": ("softmax_topk", (False,)),
    "softmax, normalised": ("softmax_topk", (True,)),
    "topk, softmax": ("topk_softmax", ()),
    "sigmoid": ("biased_topk", (torch.sigmoid, 1e-20, True)),
    "sqrt softplus": ("biased_topk", (SQRT_SOFTPLUS, 0.25, True)),
    "groups": ("grouped_topk", (4, 2, False, -math.inf, True)),
    "groups, normalised": ("grouped_topk", (4, 2, True, 0.0, True)),
    "one group": ("grouped_topk", (1, 1, True, -math.inf, True)),
    # Combinations of axes that are not in the table.
    "sigmoid, not divided": ("biased_topk_of_any_score", (torch.sigmoid, False, 0.0, True)),
    "groups by sqrt softplus": ("grouped_topk_of_any_score", (4, 2, SQRT_SOFTPLUS, True, 0.25, 0.0, True)),
}
EVERY_KIND = pytest.mark.parametrize(
    "kind",
    [
        pytest.param(name, marks=pytest.mark.skipif(None in each[1], reason="this release has none"))
        for name, each in KINDS.items()
    ],
)
# Upstream rounds after every operation, and its gradients are small differences: its own distance from
# float64 is up to 3e-2 in bfloat16 (sqrt of softplus), and the interpreter cuts bfloat16 off.
OF_TRUTH = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}


def function_of(module, variant):
    """The function of a variant in a module of formulas or of kernels."""
    if variant not in LAYOUTS:
        return getattr(module, variant)
    return (module.of if module in (reference, given) else module.kernel)(variant)


def call(module, kind, bias, top_k):
    """The routing of ``kind``, of logits alone."""
    variant, others = KINDS[kind]
    function = function_of(module, variant)
    if variant.endswith("softmax") or variant.startswith("softmax"):
        return lambda logits: function(logits, top_k, *others)
    if variant.startswith("grouped"):
        others = (bias.numel(), *others)
    return lambda logits: function(logits, bias, top_k, *others)


def apart(experts, dtype, tokens=TOKENS):
    """Logits, and a bias, whose scores differ in every dtype, as do those of four groups: no ties."""
    size = experts // 4
    rows = [
        torch.rand(4, size).argsort() / (2.2 * size) + torch.rand(4, 1).argsort(0) / 2 for _ in range(tokens)
    ]
    logits = torch.stack(rows).flatten(1) - 1 if tokens else torch.zeros(0, experts)
    return logits.to(DEVICE, dtype), (torch.rand(experts) * 1e-6).to(DEVICE)


def weighed(routing):
    """The weights at the place of each expert: one tensor says both."""

    def dense(logits):
        weights, indices = routing(logits)
        return torch.zeros_like(logits, dtype=weights.dtype).scatter(-1, indices, weights)

    return dense


def test_every_variant_has_both_kernels():
    every = registry.ops()["moe_router"].variants
    for backend, module in (("torch", plain), ("triton", fused)):
        kernels = {each.variant: each for each in registry.kernels("moe_router") if each.backend == backend}
        assert kernels.keys() == set(every)
        for variant, kernel in kernels.items():
            loaded = load_attribute(kernel.load)
            home = loaded.func if variant in LAYOUTS else loaded
            assert home.__module__ == module.__name__
            assert callable(load_attribute(kernel.refuses))


def assert_routes_alike(module, kind, logits, bias, top_k):
    """Equal indices, and weights and gradients as near to those of float64 as the dtype allows."""
    ours, upstream = (call(each, kind, bias, top_k) for each in (module, reference))
    (weights, indices), (grad,) = gradients(ours, [logits], [True])
    (expected, places), _ = gradients(upstream, [logits], [True])
    assert indices.dtype is torch.int64 and weights.dtype is expected.dtype
    assert torch.equal(indices, places)
    (truth, _), (slope,) = gradients(
        partial(_at, call(reference, kind, bias.double(), top_k), places), [logits.double()], [True]
    )
    close(weights, truth, OF_TRUTH[logits.dtype])
    assert grad.dtype is logits.dtype and grad.shape == logits.shape
    # One normalised weight is 1, and its gradient nothing but rounding.
    within = OF_TRUTH[logits.dtype] * max(slope.abs().max().item(), 0.25)
    assert torch.allclose(grad.double(), slope, rtol=0, atol=within)


def _at(routing, places, logits):
    weights, indices = routing(logits)
    assert torch.equal(indices, places)
    return weights, indices


@pytest.mark.sample(16)
@BACKENDS
@EVERY_KIND
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("experts", "top_k"), [(8, 2), (60, 4), pytest.param(8, 1, marks=pytest.mark.slow)])
def test_equals_the_reference(module, kind, dtype, experts, top_k):
    logits, bias = apart(experts, dtype)
    assert_routes_alike(module, kind, logits, bias, top_k)


@pytest.mark.sample(8)
@BACKENDS
@EVERY_KIND
@pytest.mark.parametrize(
    ("experts", "top_k"),
    [
        *((128, 8), (512, 32), (4, 4)),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ((160, 6), (256, 8), (384, 8))),
    ],
)
def test_many_experts(module, kind, experts, top_k):
    if kind.startswith("groups") and experts == 4:
        pytest.skip("upstream's code takes two experts of each group")
    logits, bias = torch.randn(3, experts, device=DEVICE), torch.rand(experts, device=DEVICE) * 0.1
    assert_routes_alike(module, kind, logits, bias, top_k)


@pytest.mark.sample(13)
@BACKENDS
@pytest.mark.parametrize("groups", [(2, 1), (3, 2), (5, 4), (6, 1), (30, 29), (1, 1), (60 // 2, 3)])
@pytest.mark.parametrize("fill", [0.0, -math.inf])
def test_groups_of_other_sizes(module, groups, fill):
    logits, bias = torch.randn(9, 60, device=DEVICE), torch.randn(60, device=DEVICE) * 0.1 + 0.5
    others = bias, 2, 60, *groups, True, fill, True
    sides = [
        lambda logits, each=each: function_of(each, "grouped_topk")(logits, *others)
        for each in (module, reference)
    ]
    assert torch.equal(sides[0](logits)[1], sides[1](logits)[1])
    assert_matches(*map(weighed, sides), [logits], tolerance=1e-5)


@BACKENDS
@pytest.mark.parametrize(("fill", "expected"), [(-math.inf, {0, 1}), (0.0, {2, 3})])
def test_what_the_other_groups_count_as(module, fill, expected):
    # Below zero, the good group is better than minus infinity and worse than zero.
    logits = torch.tensor([[4.0, 3.0, -4.0, -4.0]], device=DEVICE)
    bias = torch.tensor([-3.0, -3.0, -5.0, -5.0], device=DEVICE)
    found = module.kernel("grouped_topk")(logits, bias, 2, 4, 2, 1, False, fill, False)[1]
    assert set(found[0].tolist()) == expected


@BACKENDS
@pytest.mark.parametrize("bias_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["sigmoid", "groups", "one group"])
def test_the_bias_may_have_another_dtype(module, kind, bias_dtype):
    # Of the same dtype, the sum is rounded to it: the interpreter cuts bfloat16 off.
    for dtype in (torch.float16, torch.float32):
        logits, _ = apart(8, dtype)
        bias = (torch.randperm(8) * 4.0).to(DEVICE, bias_dtype)
        sides = [call(each, kind, bias, 3)(logits) for each in (module, reference)]
        assert torch.equal(sides[0][1], sides[1][1])
        assert sides[0][0].dtype is sides[1][0].dtype is dtype
        torch.testing.assert_close(sides[0][0], sides[1][0])


@pytest.mark.parametrize("kind", ["sigmoid", "groups", "one group"])
def test_the_choice_is_rounded_where_upstream_rounds(kind):
    # In float16 all of these sums are equal, and the first is taken; in float32 the last one is the largest.
    logits = torch.linspace(-2, 2, 8, device=DEVICE).half()[None]
    for dtype, expected in ((torch.float16, 0), (torch.float32, 7)):
        bias = torch.full((8,), 4096.0, device=DEVICE, dtype=dtype)
        assert call(fused, kind, bias, 1)(logits)[1].tolist() == [[expected]]


@BACKENDS
@EVERY_KIND
def test_nothing_to_route(module, kind):
    logits, bias = apart(8, torch.float32, tokens=0)
    sides = [call(each, kind, bias, 2) for each in (module, reference)]
    assert sides[0](logits)[1].shape == sides[1](logits)[1].shape == (0, 2)
    assert_matches(*map(weighed, sides), [logits])


@BACKENDS
@EVERY_KIND
def test_strided_logits(module, kind):
    wide, bias = apart(16, torch.float32)
    wide = wide[:, torch.randperm(16)]
    bias = bias[:8]
    for logits in (wide[:, 3:11], wide[:, 1:9][::2], wide.t().contiguous().t()[:, :8]):
        assert_routes_alike(module, kind, logits, bias, 2)


@BACKENDS
@EVERY_KIND
def test_weights_may_be_written_to(module, kind):
    # As `weights *= scale` does.
    def scaled(routing, logits):
        weights, indices = routing(logits)
        weights *= 2.5
        return weights, indices

    if kind == "topk, softmax" and module is plain:
        pytest.skip("nor is that possible upstream")
    logits, bias = apart(8, torch.float32)
    ours = partial(scaled, call(module, kind, bias, 2))
    upstream = weighed(call(reference, kind, bias, 2))
    assert_matches(weighed(ours), lambda logits: upstream(logits) * 2.5, [logits], tolerance=1e-5)


def test_of_equals_the_first():
    logits = torch.zeros(3, 12, device=DEVICE)
    logits[1, 5:] = 1.0
    logits[2, ::2] = -0.0
    bias = torch.zeros(12, device=DEVICE)
    for kind in KINDS:
        if None not in KINDS[kind][1]:
            found = call(fused, kind, bias, 4)(logits)[1].tolist()
            assert found[0] == found[2] == [0, 1, 2, 3]
            # Two groups of three have none but the larger ones.
            assert found[1] == ([6, 7, 8, 9] if kind.startswith("groups") else [5, 6, 7, 8])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_not_finite_is_ordered_as_by_torch(dtype):
    values = [1.0, math.nan, -math.inf, math.inf, -1.0, 0.0, 65504.0, -65504.0]
    logits = torch.tensor([values, values[::-1]], device=DEVICE, dtype=dtype)
    # Nothing is twice there, so the order is a fact.
    expected = torch.topk(logits, 8)[1]
    weights, indices = fused.topk_softmax(logits, 8)
    assert torch.equal(indices, expected) and weights.isnan().all()
    finite = logits[:, [0, 2, 4, 5]]
    assert torch.equal(fused.topk_softmax(finite, 4)[1], torch.topk(finite, 4)[1])


@BACKENDS
@pytest.mark.parametrize("normalise", [True, False])
def test_nan_spoils_its_own_token(module, normalise):
    logits = torch.randn(5, 8, device=DEVICE)
    logits[2, 3] = math.nan
    found, expected = (each.softmax_topk(logits, 2, normalise)[0] for each in (module, reference))
    assert torch.equal(found.isnan(), expected.isnan())


@pytest.mark.sample(3)
@BACKENDS
@EVERY_KIND
def test_is_traced_without_a_graph_break(module, kind):
    logits, bias = apart(8, torch.float32)
    routing = call(module, kind, bias, 2)
    torch._dynamo.reset()  # every kind is one more form of the same code
    compiled = torch.compile(routing, fullgraph=True, backend="aot_eager")
    assert_matches(*map(weighed, (compiled, routing)), [logits], tolerance=1e-5)


@BACKENDS
@EVERY_KIND
def test_equal_bits_from_run_to_run(module, kind):
    logits, bias = torch.randn(TOKENS, 24, device=DEVICE), torch.randn(24, device=DEVICE) * 0.1
    (one, grads), (other, again) = (
        gradients(call(module, kind, bias, 4), [logits], [True]) for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip([*one, *grads], [*other, *again], strict=True))


@pytest.mark.parametrize("kind", ["softmax", "sigmoid", "groups"])
def test_equal_bits_in_any_batch(kind):
    bias = torch.randn(24, device=DEVICE) * 0.1
    routing = call(fused, kind, bias, 4)
    assert_batch_invariant(lambda logits: routing(logits)[0], [torch.randn(64, 24, device=DEVICE)], [])


def test_the_operators_keep_their_contracts():
    logits, bias = apart(8, torch.float32)
    ops = torch.ops.veomni_hook
    indices = torch.topk(logits, 2)[1]
    for form in (
        (None, None, 0, 2, True, 1, 1),
        (bias, None, 1, 2, True, 1, 1),
        (bias, None, 1, 2, False, 4, 2),
        (None, indices, 0, 2, True, 1, 1),
    ):
        torch.library.opcheck(ops.moe_router.default, (logits, *form, 1e-20, 0.0, torch.float32))
    weights = torch.rand(TOKENS, 2, device=DEVICE)
    for saved, normalise, is_given in (
        (logits, False, False),
        (logits.gather(1, indices), True, False),
        (logits.gather(1, indices), True, True),
    ):
        form = 8, 0, normalise, is_given, 0.0
        torch.library.opcheck(ops.moe_router_backward.default, (saved, indices, weights, *form))


@BACKENDS
@EVERY_KIND
def test_the_bias_gets_no_gradient(module, kind):
    logits, bias = apart(8, torch.float32)
    weights, indices = call(module, kind, bias.requires_grad_(), 2)(logits.requires_grad_())
    assert not indices.requires_grad
    weights.sum().backward()
    assert bias.grad is None and logits.grad is not None
    assert not call(module, kind, bias, 2)(logits.detach())[0].requires_grad


@BACKENDS
def test_under_autocast(module):
    backend = "torch" if module is plain else "triton"
    logits, bias = apart(8, torch.bfloat16)
    with torch.autocast(DEVICE, dtype=torch.bfloat16), registry.restored():
        for kind, (variant, others) in KINDS.items():
            if None in others:
                continue
            registry.check("moe_router", variant)  # a combination becomes a variant
            (kernel,) = (each for each in registry.kernels("moe_router", variant) if each.backend == backend)
            if load_attribute(kernel.refuses)(None, logits) is not None:
                assert module is fused and variant != "softmax_topk"
                continue
            found, expected = (call(each, kind, bias, 2)(logits) for each in (module, reference))
            assert found[0].dtype is expected[0].dtype and torch.equal(found[1], expected[1])
            torch.testing.assert_close(found[0], expected[0], rtol=1e-2, atol=1e-2)


@BACKENDS
@pytest.mark.parametrize(
    ("logits", "reason"),
    [
        (torch.zeros(4, 8, dtype=torch.int64), "int64"),
        (torch.zeros(2, 4, 8), "[tokens, num_experts]"),
        (torch.zeros(4, 8).to_sparse(), "[tokens, num_experts]"),
    ],
    ids=["int", "3-D", "sparse"],
)
def test_refuses(module, logits, reason):
    assert reason in module.refuses(None, logits)
    assert module.refuses(None, torch.zeros(4, 8)) is None


def test_the_fused_one_refuses_what_no_program_holds():
    for refuses in (fused.refuses, fused.refuses_in_autocast):
        assert "float64" in refuses(None, torch.zeros(4, 8, dtype=torch.float64))
        assert "at most 512" in refuses(None, torch.zeros(4, 513))
        assert "at most 512" in refuses(None, torch.zeros(4, 0))


def test_refuses_what_a_guard_shows():
    logits, bias = torch.randn(5, 64, device=DEVICE), torch.zeros(64, device=DEVICE)
    softmax = partial(torch.softmax, dim=-1)
    for module in (plain, fused):
        assert "not supported" in module.refuses(None, logits, bias, 2, softmax, 0.0, True)
        assert module.refuses(None, logits, bias, 2, torch.sigmoid, 0.0, True) is None
        assert module.refuses(None, logits, 8, True) is None
        assert module.refuses(None, logits, bias, 8, 64, 4, 3, True, 0.0, True) is None
    for top_k in (33, 0, 2.0, True):
        assert "1 to 32" in fused.refuses(None, logits, top_k)
        assert plain.refuses(None, logits, top_k) is None
    assert "bias" in fused.refuses(None, logits, bias.double(), 2, torch.sigmoid, 0.0, True)
    for groups in ((32, 4, 3), (64, 64, 3), (64, 5, 3), (64, 4, 5)):
        assert "groups" in fused.refuses(None, logits, bias, 8, *groups, True, 0.0, True)


@pytest.fixture
def launches(monkeypatch):
    """How often the kernel ran."""
    found = []
    monkeypatch.setattr(fused, "_route", lambda *call, run=fused._route: found.append(call) or run(*call))
    return found


def test_what_the_guard_did_not_show_goes_the_upstream_way(launches):
    logits, bias = torch.randn(5, 64, device=DEVICE), torch.zeros(64, device=DEVICE)
    calls = [
        ("softmax_topk", (33, True)),
        ("topk_softmax", (40,)),
        ("biased_topk", (bias, 2, partial(torch.softmax, dim=-1), 0.0, True)),
        ("biased_topk", (bias.double(), 2, torch.sigmoid, 0.0, True)),
        ("biased_topk", (torch.zeros(128, device=DEVICE)[::2], 2, torch.sigmoid, 0.0, True)),
        ("grouped_topk", (bias, 33, 64, 4, 3, True, 0.0, True)),
    ]
    for variant, others in calls:
        found, expected = (function_of(each, variant)(logits, *others) for each in (fused, reference))
        assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
    assert not launches
    with pytest.raises(RuntimeError):
        fused.kernel("grouped_topk")(logits, bias, 2, 64, 64, 2, True, 0.0, True)  # no two experts in a group
    fused.softmax_topk(logits, 32, True)
    assert launches


def test_nothing_as_large_as_the_logits_is_kept():
    for kind, (_, others) in KINDS.items():
        if None in others or kind == "softmax":  # whose backward needs the probabilities of all
            continue
        logits, bias = apart(64, torch.float32)
        for module in (plain, fused):
            kept = []
            with torch.autograd.graph.saved_tensors_hooks(
                lambda x, kept=kept: kept.append(x) or x, lambda x: x
            ):
                call(module, kind, bias, 2)(logits.requires_grad_())
            large = [each for each in kept if each.numel() > TOKENS * 2]
            # A gather in PyTorch keeps what it reads.
            read = module is plain and not kind.endswith(("softmax", "softmax, normalised"))
            assert [each.data_ptr() for each in large] == [logits.data_ptr()] * read, (kind, module)


@BACKENDS
@EVERY_KIND
@pytest.mark.skipif(DEVICE == "cpu", reason="only a GPU can tell")
def test_nothing_waits_for_the_device(module, kind):
    logits, bias = apart(8, torch.float32)
    with without_waits():
        call(module, kind, bias, 2)(logits.requires_grad_())[0].sum().backward()


#: The formulas at given experts, called with ``indices`` last as well.
GIVEN = pytest.mark.parametrize("module", [given, plain, fused], ids=["given", "torch", "triton"])


@pytest.mark.sample(16)
@GIVEN
@EVERY_KIND
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("experts", "top_k"), [(8, 2), (60, 4)])
def test_given_experts_get_the_bits_of_chosen_ones(module, kind, dtype, experts, top_k):
    """As chosen: equal bits of weights and gradients. Any other experts: the formula at them, not a choice."""
    logits, bias = apart(experts, dtype)
    chooser = reference if module is given else module
    (weights, indices), (grad,) = gradients(call(chooser, kind, bias, top_k), [logits], [True])
    (again, same), (slope,) = gradients(at(module, kind, bias, top_k, indices), [logits], [True])
    assert torch.equal(again, weights) and torch.equal(same, indices)
    assert again.dtype is weights.dtype and torch.equal(slope, grad)
    others = torch.rand(TOKENS, experts, device=DEVICE).argsort(-1)[:, :top_k]
    # The first given expert is far from the best one: its exp would overflow in a kernel of the chosen ones.
    of_chosen = module is fused and kind in ("softmax, normalised", "topk, softmax")
    far = logits * (400 if of_chosen else 40)
    (weights, same), (grad,) = gradients(at(module, kind, bias, top_k, others), [far], [True])
    exact = at(given, "topk, softmax" if of_chosen else kind, bias.double(), top_k, others)
    (truth, _), (slope,) = gradients(exact, [far.double()], [True])
    assert torch.equal(same, others)
    close(weights, truth, OF_TRUTH[dtype])
    within = OF_TRUTH[dtype] * max(slope.abs().max().item(), 0.25)
    assert torch.allclose(grad.double(), slope, rtol=0, atol=within)


def at(module, kind, bias, top_k, indices):
    """The routing of ``kind`` at given experts, of logits alone."""
    variant, others = KINDS[kind]
    first = () if variant in ("softmax_topk", "topk_softmax") else (bias,)
    more = (bias.numel(),) if variant.startswith("grouped") else ()
    function = function_of(module, variant)
    return lambda logits: function(logits, *first, top_k, *more, *others, indices=indices)
