"""Weights with low-rank adapters: kernels compute what the reference computes from the sums, and never form them."""

import pytest
import torch

from tests.kernels import declared
from tests.kernels.matching import assert_matches, close, gradients
from tests.kernels.moe_experts import formulas
from tests.kernels.moe_experts.backends import BACKENDS, LAYOUTS
from tests.kernels.moe_experts.formulas import CASES, EXPERTS, SENTINEL, TOP_K
from veomni_hook.errors import KernelError
from veomni_hook.kernels.moe_experts import forms, torch_by_expert, torch_grouped
from veomni_hook.kernels.moe_experts.low_rank import AdaptedWeight, Factors, Part, padded
from veomni_hook.kernels.selection.registry import load_attribute

BOTH = ["torch", "triton"]
SCALE = 0.75


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(5)


@pytest.fixture
def backend(request):
    if request.param == "triton":
        pytest.importorskip("triton")
    return BACKENDS[request.param]


both = pytest.mark.parametrize("backend", BOTH, indirect=True)


def places(name):
    """The positions of the stacked weights that have matrices."""
    return (3, 5) if "biased" in name else (3, 4)


def operands_of(backend, name, rank=3, dtype=torch.float32, of_adapters=None, adapted=(0, 1), **options):
    """The operands of a variant, and after them two factors for each adapted weight."""
    operands = backend.operands(name, dtype, **options)
    weights = [operands[places(name)[number]] for number in adapted]
    for weight in weights:
        _, first, second = weight.shape
        for shape in ((EXPERTS, first, rank), (EXPERTS, rank, second)):
            factor = (torch.randn(shape) * 0.5).to(of_adapters or dtype).to(backend.device)
            operands.append(factor)
    return operands


def side(backend, name, adapted=(0, 1)):
    """The kernel of a variant as a function of `operands_of`, and the reference of the sums."""
    count, rest = len(CASES[name].shapes) + 3, CASES[name].rest
    kernel, reference = declared.pair("moe_experts", name, backend.name)

    def summed(weight, left, right):
        # As PEFT: factors are rounded to the weight's dtype, and so is the sum.
        return torch.baddbmm(weight, left.to(weight.dtype), right.to(weight.dtype), alpha=SCALE)

    def ours(*tensors):
        operands, factors = [*tensors[:count]], tensors[count:]
        for number, (left, right) in zip(adapted, zip(factors[::2], factors[1::2], strict=True), strict=True):
            place = places(name)[number]
            operands[place] = AdaptedWeight(operands[place], (Part(left, right, SCALE),), not_formed)
        refuses = load_attribute(backend.declared[name].refuses)
        assert refuses(None, *operands, *rest) is None
        return kernel(*operands, *rest)

    def theirs(*tensors):
        operands, factors = [*tensors[:count]], tensors[count:]
        for number, pair in zip(adapted, zip(factors[::2], factors[1::2], strict=True), strict=True):
            operands[places(name)[number]] = summed(operands[places(name)[number]], *pair)
        return reference(*operands, *rest)

    return ours, theirs


def not_formed():
    raise AssertionError("the sum was formed")


def assert_same(backend, name, **options):
    adapted = options.get("adapted", (0, 1))
    assert_matches(*side(backend, name, adapted), operands_of(backend, name, **options), tolerance=1e-5)


@pytest.mark.sample(2)
@both
@pytest.mark.parametrize("name", LAYOUTS)
def test_results_and_every_gradient(backend, name):
    assert_same(backend, name)


def test_every_variant_of_the_torch_backend():
    backend = BACKENDS["torch"]
    for name in backend.stacked:
        if "jointly" not in name and "normalised" not in name:
            assert_same(backend, name)


@pytest.mark.sample(2)
@both
@pytest.mark.parametrize("rank", [1, 16, 20, pytest.param(96, marks=pytest.mark.slow), 256])
def test_ranks(backend, rank):
    assert_same(backend, "gated", rank=rank)


@pytest.mark.sample(2)
@both
@pytest.mark.parametrize("adapted", [(0,), (1,)], ids=["first", "second"])
@pytest.mark.parametrize("name", ["gated", "biased_interleaved_alpha_gated"])
def test_one_of_both_weights(backend, name, adapted):
    assert_same(backend, name, adapted=adapted)


@pytest.mark.sample(3)
@both
@pytest.mark.parametrize(
    "ids",
    [
        torch.full((4, TOP_K), 2),
        torch.tensor([[0, 0, 4], [4, SENTINEL, 4]]),
        torch.tensor([[3, 3, 1]], dtype=torch.int32),
    ],
    ids=["one expert", "some", "int32"],
)
def test_odd_routings(backend, ids):
    assert_same(backend, "gated", ids=ids)


@both
@pytest.mark.parametrize("tokens", [0, 4])
def test_where_no_expert_has_a_token_everything_is_zero(backend, tokens):
    operands = operands_of(backend, "gated", ids=torch.full((tokens, TOP_K), SENTINEL))
    floating = [each.is_floating_point() for each in operands]
    (found,), grads = gradients(side(backend, "gated")[0], operands, floating)
    assert not found.any()
    for grad, of, want in zip(grads, operands, floating, strict=True):
        assert grad is None if not want else grad.shape == of.shape and not grad.any()


@pytest.mark.sample(1)
@both
def test_frozen_weights_get_no_gradient(backend, monkeypatch):
    for home in (torch_by_expert, torch_grouped._Rows):
        monkeypatch.setattr(home, "weight_gradient" if home is torch_by_expert else "gradient", None)
    if backend.name == "triton":
        monkeypatch.setattr("veomni_hook.kernels.moe_experts.triton._weight_gradient", None)
    wanted = [True, False, True, False, False, *[True] * 4]
    operands = operands_of(backend, "gated")
    assert_matches(*side(backend, "gated"), operands, wanted, tolerance=1e-5)
    with pytest.raises(TypeError):
        gradients(side(backend, "gated")[0], operands, [True, False, *[True] * 7])


@pytest.mark.sample(3)
@both
@pytest.mark.parametrize("number", range(9))
def test_each_gradient_by_itself(backend, number):
    wanted = [number == each for each in range(9)]
    if number != 1:
        operands = operands_of(backend, "gated", tokens=5)
        assert_matches(*side(backend, "gated"), operands, wanted, tolerance=1e-5)


@pytest.mark.sample(1)
@both
def test_factors_in_float32_of_weights_in_16_bits(backend):
    low = backend.low
    operands = operands_of(backend, "gated", rank=4, dtype=low, of_adapters=torch.float32, tokens=60)
    ours, theirs = side(backend, "gated")
    wanted = [each.is_floating_point() for each in operands]
    exact = [each.double() if each.is_floating_point() else each for each in operands]
    (truth,), true_gradients = gradients(theirs, exact, wanted)
    (found,), found_gradients = gradients(ours, operands, wanted)
    (rounded,), rounded_gradients = gradients(theirs, operands, wanted)
    assert found.dtype is low and found_gradients[-1].dtype is torch.float32
    # At least as exact as a rounded sum.
    for one, other, of in zip(
        [found, *found_gradients], [rounded, *rounded_gradients], [truth, *true_gradients], strict=True
    ):
        if of is not None:
            assert (one.double() - of).norm() <= 1.1 * (other.double() - of).norm()


@both
def test_factors_of_any_strides(backend):
    operands = operands_of(backend, "gated")
    # As PEFT stores B: the expert is the fastest dimension.
    operands[5] = operands[5].permute(1, 2, 0).contiguous().permute(2, 0, 1)
    operands[6] = operands[6].transpose(1, 2).contiguous().transpose(1, 2)
    assert_matches(*side(backend, "gated"), operands, tolerance=1e-5)


@pytest.mark.sample(1)
@both
def test_autocast(backend):
    operands = operands_of(backend, "gated", tokens=40)
    ours, theirs = side(backend, "gated")

    def low(*tensors):
        with torch.autocast(backend.device, dtype=backend.low):
            return ours(*tensors)

    assert_matches(low, theirs, operands, tolerance=3e-2)


@pytest.mark.sample(1)
@both
def test_second_derivatives_and_a_retained_graph(backend):
    leaves = [
        each.requires_grad_(each.is_floating_point()) for each in operands_of(backend, "gated", tokens=4)
    ]
    floating = [each for each in leaves if each.requires_grad]
    sums = []
    for function in side(backend, "gated"):
        result = function(*leaves)
        first = torch.autograd.grad(result.square().sum(), floating, create_graph=True)
        sums.append(torch.autograd.grad(sum(each.square().sum() for each in first), floating))
        again = torch.autograd.grad(function(*leaves).sum(), floating, retain_graph=True)
        result = function(*leaves).sum()
        runs = [torch.autograd.grad(result, floating, retain_graph=True) for _ in range(2)]
        for run in runs:
            close(run, again, 1e-6)
    close(*sums, 1e-4)


@pytest.mark.slow
def test_gradients_are_derivatives():
    backend = BACKENDS["torch"]
    operands = operands_of(backend, "gated", rank=2, dtype=torch.float64, tokens=4)
    leaves = [each.requires_grad_(each.is_floating_point()) for each in operands]
    torch.autograd.gradcheck(side(backend, "gated")[0], leaves)


@pytest.mark.parametrize("name", ["gated", "gated_transposed", "ungated"])
def test_grouped_products(name, monkeypatch):
    from veomni_hook.kernels.moe_experts import torch as ours

    monkeypatch.setattr(ours, "torch_by_expert", torch_grouped)
    monkeypatch.setattr(formulas, "HIDDEN", 16)
    monkeypatch.setitem(CASES, name, CASES[name].resized({12: 16, 10: 8, 20: 16}))
    try:
        torch._grouped_mm(torch.ones(1, 8), torch.ones(1, 8, 8), offs=torch.ones(1, dtype=torch.int32))
    except (AttributeError, RuntimeError, NotImplementedError) as error:
        pytest.skip(f"this torch has none on a CPU: {error}")
    for rank in (3, 4):
        assert_same(BACKENDS["torch"], name, rank=rank)
        assert_same(BACKENDS["torch"], name, rank=rank, adapted=(rank - 3,))


def test_several_adapters_of_one_weight():
    backend = BACKENDS["torch"]
    x, ids, routing, up, down = backend.operands("gated")
    pairs = [(torch.randn(EXPERTS, up.shape[1], r), torch.randn(EXPERTS, r, up.shape[2])) for r in (2, 5)]
    parts = tuple(Part(*pair, scale) for pair, scale in zip(pairs, (0.5, -2.0), strict=True))
    total = up + sum(scale * left @ right for left, right, scale in parts)
    kernel, reference = declared.pair("moe_experts", "gated", "torch")
    found = kernel(x, ids, routing, AdaptedWeight(up, parts, not_formed), down, torch.nn.functional.silu)
    close(found, reference(x, ids, routing, total, down, torch.nn.functional.silu), 1e-5)


@pytest.mark.slow
@both
def test_the_operators_keep_their_contracts(backend):
    declared.kernel("moe_experts", "gated", backend.name)  # defines the operators
    tensors = operands_of(backend, "gated")
    operands, rest = forms.taken_apart([*tensors[:5], *CASES["gated"].rest])
    form = forms.form_of("gated", operands, rest)
    factors = (tensors[6], tensors[5], tensors[8], tensors[7], SCALE, SCALE)
    operator = getattr(torch.ops.veomni_hook, f"moe_experts_{backend.name}_adapted")
    if backend.name == "torch":
        torch.library.opcheck(operator.default, (*operands, *factors, *form, True))
        torch.library.opcheck(operator.default, (*operands, *factors, *form, False))
    _, *kept = operator(*operands, *factors, *form, True)
    grad = torch.randn_like(tensors[0])
    back = getattr(torch.ops.veomni_hook, f"moe_experts_{backend.name}_adapted_backward")
    needed = [True, True, True, False, True, False, *[True] * 4]
    for wanted in (needed, [False, True, *[False] * 8]):
        call = (grad, *operands, *factors, *kept, *form, wanted, False)
        torch.library.opcheck(back.default, call)


def test_what_a_padded_rank_adds_is_zeros(monkeypatch):
    filled = torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *a, **k: filled(*a, **k).fill_(float("nan")))
    factors = Factors(torch.ones(2, 3, 4), torch.ones(2, 5, 3), SCALE)
    into, out = padded(factors, torch.float32, 8)
    assert torch.equal(into[:, :3], factors.into) and torch.equal(out[..., :3], factors.out)
    assert (
        into.shape == (2, 8, 4)
        and out.shape == (2, 5, 8)
        and not into[:, 3:].any()
        and not out[..., 3:].any()
    )


def test_auto_prefers_the_kernel_to_a_sum_of_all_experts():
    operands = BACKENDS["torch"].operands("gated")
    loses = load_attribute(BACKENDS["torch"].declared["gated"].loses)
    assert "upstream" in loses(None, *operands)
    operands[3] = AdaptedWeight(operands[3], (), not_formed)
    assert loses(None, *operands) is None


def test_a_rank_that_the_device_code_does_not_take():
    pytest.importorskip("triton")
    operands = operands_of(BACKENDS["triton"], "gated", rank=513)
    up = AdaptedWeight(operands[3], (Part(*operands[5:7], SCALE),), not_formed)
    refuses = load_attribute(BACKENDS["triton"].declared["gated"].refuses)
    assert "rank 513" in refuses(None, *operands[:3], up, operands[4], torch.nn.functional.silu)


def weight():
    parts = (Part(torch.ones(2, 3, 1), torch.ones(2, 1, 4), 2.0),)
    base = torch.zeros(2, 3, 4, requires_grad=True)
    return AdaptedWeight(base, parts, lambda: base + 2.0), base


def test_an_adapted_weight_is_the_sum_to_whoever_reads_it():
    adapted, base = weight()
    assert adapted.shape == (2, 3, 4) and adapted.dtype is torch.float32 and adapted.ndim == 3
    assert adapted.device == base.device and len(adapted) == 2 and adapted.size(1) == 3 and not adapted._sums
    assert torch.equal(adapted[1], torch.full((3, 4), 2.0))
    assert torch.equal(torch.nn.functional.linear(torch.ones(4), adapted[0]), torch.full((3,), 8.0))
    assert type(adapted.transpose(1, 2)) is torch.Tensor and adapted.requires_grad
    (adapted * 3).sum().backward()
    assert torch.equal(base.grad, torch.full_like(base, 3.0))
    assert adapted.total() is adapted.total()  # computed once


def test_an_adapted_weight_is_not_read_below_autograd():
    adapted, _ = weight()
    with torch._C.DisableTorchFunctionSubclass(), pytest.raises(KernelError, match="below autograd"):
        adapted + 1


def test_other_backends_refuse_it():
    operands = BACKENDS["torch"].operands("gated")
    operands[3] = AdaptedWeight(operands[3], (), not_formed)
    assert "AdaptedWeight" in forms.refuses(None, *operands, torch.nn.functional.silu)
