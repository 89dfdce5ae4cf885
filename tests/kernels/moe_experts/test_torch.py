"""What is the torch backend's own, `torch_grouped` on a CPU, too; `test_backends` has the rest."""

import pytest
import torch
from torch.nn import functional

from tests.kernels.moe_experts import formulas
from tests.kernels.moe_experts.backends import BACKENDS, COMPOSED, SOME_LAYOUTS
from tests.kernels.moe_experts.formulas import CASES, EXPERTS, HIDDEN, INNER, LIMIT, SENTINEL, inputs
from veomni_hook.kernels.moe_experts import autograd, torch_by_expert, torch_grouped, torch_routing
from veomni_hook.kernels.moe_experts import torch as ours

TORCH = BACKENDS["torch"]
side, refusal, assert_same = TORCH.side, TORCH.refusal, TORCH.assert_same
every_variant = pytest.mark.parametrize("name", TORCH.stacked)
every_gate = pytest.mark.parametrize("name", [name for name in TORCH.stacked if name not in COMPOSED])


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(5)


def test_of_frozen_experts_no_weight_gradient_is_computed(monkeypatch):
    monkeypatch.setattr(torch_by_expert, "weight_gradient", None)
    operands = inputs(CASES["gated"])
    assert_same("gated", operands, wanted=[True, False, True, False, False])
    with pytest.raises(TypeError):
        assert_same("gated", operands, wanted=[False, False, False, True, False])


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


def test_weights_of_another_dtype_need_autocast():
    operands = inputs(CASES["gated"])
    operands[0] = operands[0].bfloat16()
    assert "weights have dtype" in refusal("gated", operands)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_same("gated", operands)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "name",
    [
        name if name in SOME_LAYOUTS else pytest.param(name, marks=pytest.mark.slow)
        for name in TORCH.stacked
        if "float32" not in name
    ],
)
def test_gradients_are_derivatives(name):
    operands = inputs(CASES[name], torch.float64, tokens=4)
    leaves = [each.requires_grad_(each.is_floating_point()) for each in operands]
    torch.autograd.gradcheck(side(name), leaves)


@pytest.mark.sample(1)
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


def test_without_gradients_nothing_is_kept(monkeypatch):
    kept = []
    forward = torch_by_expert.forward

    def watched(*operands, **rest):
        found = forward(*operands, **rest)
        kept.append(len(found[1]))
        return found

    monkeypatch.setattr(torch_by_expert, "forward", watched)
    operands = inputs(CASES["gated"])
    side("gated")(*operands)
    with torch.no_grad():
        side("gated")(*[each.requires_grad_(each.is_floating_point()) for each in operands])
    side("gated")(*operands)
    assert kept == [0, 0, operands[1].numel()]


#: Rows of these sizes are multiples of 16 bytes.
ALIGNED = {HIDDEN: 16, INNER: 8, 2 * INNER: 16}


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
    operands = inputs(CASES[name].resized(ALIGNED), dtype, tokens=tokens)
    assert_same(name, operands)
    some = [True, False, *[False] * (len(operands) - 2)]
    assert_same(name, operands, wanted=some)


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
        (1, lambda x: x.float(), "expert ids have"),
        (2, lambda x: x > 0, "bool"),
        (3, lambda x: x[0], "weights"),
        (3, lambda x: x[1:], "weights"),
        (3, lambda x: x.double(), "weights have dtype torch.float64"),
        (4, lambda x: x.to("meta"), "meta"),
        (4, lambda x: x.as_subclass(type("Other", (torch.Tensor,), {})), "Other"),
        (5, lambda x: torch.tanh, "activation tanh is not supported"),
        (6, lambda x: None, "None is not a number"),
        (6, lambda x: torch.tensor(1.0), "is not a number"),
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
    assert "few numbers" in loses(None, 1, 4, 16, 16)
    x = type("OnGPU", (), {"device": torch.device("cuda")})
    assert "not measured" in ours.loses(None, x, None, None, None)
