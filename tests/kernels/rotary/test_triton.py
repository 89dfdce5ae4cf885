"""The Triton kernels: through the interpreter on a CPU (conftest sets it up), compiled on a GPU."""

from functools import partial

import pytest
import torch

from tests.kernels import declared
from tests.kernels.contract import call_of
from tests.kernels.matching import assert_matches
from tests.kernels.rotary.variants import BROADCAST, COMPLEX, DEVICE, PARTIAL, at, states, tables
from veomni_hook.kernels.rotary import operand_rules, reference
from veomni_hook.kernels.selection.registry import load_attribute

pytest.importorskip("triton")

from veomni_hook.kernels.rotary import triton as kernels

FUSED = declared.kernels("rotary", "triton")
F32, B16, F16 = torch.float32, torch.bfloat16, torch.float16


def test_declared():
    assert {kernel.priority for kernel in FUSED.values()} == {10}
    assert len(FUSED) == 29


def layouts():
    return {
        "heads together": lambda: torch.randn(2, 5, 3, 16).transpose(1, 2),
        "positions together": lambda: torch.randn(2, 3, 5, 16),
        "part of a projection": lambda: torch.randn(2, 5, 9, 16)[:, :, 3:6].transpose(1, 2),
        "batch inside": lambda: torch.randn(5, 2, 3, 16).permute(1, 2, 0, 3),
        "columns apart": lambda: torch.randn(16, 2, 5, 3).permute(1, 3, 2, 0),
        "one for all heads": lambda: torch.randn(2, 1, 5, 16).expand(2, 3, 5, 16),
    }


@pytest.mark.sample(6)
@pytest.mark.parametrize("incoming", layouts())
@pytest.mark.parametrize("given", layouts())
@pytest.mark.parametrize("variant", ["half_split", pytest.param("pairs_to_halves", marks=pytest.mark.slow)])
def test_any_strides_and_gradients_in_any_layout(variant, given, incoming):
    cos, sin = tables(variant, 2, 5, 16, F32)
    (kernel, upstream), results = declared.pair("rotary", variant, "triton"), []
    q, k = (at(layouts()[given]()).requires_grad_() for _ in range(2))
    dys = [at(layouts()[incoming]()) for _ in range(2)]
    for function in (kernel, upstream):
        ys = function(q, k, cos, sin)
        results.append([*ys, *torch.autograd.grad(ys, (q, k), dys)])
    for ours, truth in zip(*results, strict=True):
        assert torch.equal(ours, truth)
    outside = q.stride(2) >= q.stride(1)
    for result in results[0]:
        assert result.transpose(1, 2).is_contiguous() if outside else result.is_contiguous()


def test_a_gradient_that_is_one_number():
    call, grads = call_of("rotary", "half_split", "triton"), []
    for function in (call.ours, call.theirs):
        leaves = [x.detach().requires_grad_(want) for x, want in zip(call.tensors, call.wanted, strict=True)]
        sum(y.sum() for y in function(*leaves)).backward()
        grads += [leaf.grad for leaf in leaves[:2]]
    assert torch.equal(grads[0], grads[2]) and torch.equal(grads[1], grads[3])


@pytest.mark.parametrize("place", [0, 1, -2, -3])
def test_without_a_batch(place):
    heads_at = place % 3
    cos, sin = at(torch.randn(5, 16)), at(torch.randn(5, 16))
    xs = [at(torch.randn(5, heads, 16)) for heads in (4, 1)]
    xs = xs if heads_at == 1 else [x.transpose(0, 1) for x in xs]
    given = {"cos": cos, "sin": sin, "unsqueeze_dim": place}
    sides = [partial(f, **given) for f in (kernels.kernel("half_split_fp32"), reference.half_split_fp32)]
    assert operand_rules.rule("half_split")(None, *xs, cos, sin, place, reference.half_split) is None
    assert_matches(*sides, xs, exact=True)


def test_heads_after_positions():
    xs = [states(2, heads, 5, 16, F32, heads_at=2) for heads in (3, 2)]
    cos, sin = tables("half_split", 2, 5, 16, F32)
    sides = [
        partial(f, cos=cos, sin=sin, unsqueeze_dim=2)
        for f in (kernels.kernel("half_split"), reference.half_split)
    ]
    assert_matches(*sides, xs, exact=True)


def test_one_tensor_as_query_and_key():
    q, cos, sin = states(2, 3, 5, 16, F32), *tables("half_split", 2, 5, 16, F32)
    truth = reference.half_split(q, q, cos, sin)
    assert all(
        torch.equal(a, b) for a, b in zip(kernels.kernel("half_split")(q, q, cos, sin), truth, strict=True)
    )


def test_without_a_key():
    q = states(2, 3, 5, 16, F32)
    cos, sin = tables("half_split", 2, 5, 8, F32)
    alone = kernels.kernel("half_split_partial_optional_key")(q, cos, sin)
    assert torch.equal(alone, reference.half_split_partial_optional_key(q, cos, sin))
    cos, sin = tables("half_split", 2, 5, 16, F32)
    turned, nothing = kernels.kernel("pairs_to_halves_optional_key")(q, None, cos, sin)
    assert nothing is None and torch.equal(turned, reference.pairs_to_halves(q, q, cos, sin)[0])


def test_a_loss_of_one_output_only():
    call = call_of("rotary", "half_split", "triton")
    q, k, *tables = call.tensors
    call.ours(q.requires_grad_(), k.requires_grad_(), *tables)[1].sum().backward()
    assert q.grad is None and k.grad is not None


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [F32, B16])
def test_a_rows_bits_depend_on_that_row_alone(dtype):
    cos, sin = tables("half_split", 4, 37, 64, dtype)
    q, k = (states(4, heads, 37, 64, dtype) for heads in (6, 2))
    dys = [torch.randn(x.shape).to(x) for x in (q, k)]

    def run(batch, positions, heads):
        part = (batch, slice(None), positions)
        leaves = [x[part].detach() for x in (q, k)]
        leaves[0] = leaves[0][:, heads]
        leaves = [leaf.requires_grad_() for leaf in leaves]
        ys = kernels.kernel("half_split")(*leaves, cos[batch, positions], sin[batch, positions])
        incoming = [dys[0][part][:, heads], dys[1][part]]
        return [y.detach() for y in ys], torch.autograd.grad(ys, leaves, incoming)

    everything = slice(None)
    whole, again = run(everything, everything, everything), run(everything, everything, everything)
    alone = run(slice(2, 3), slice(30, 31), slice(4, 5))
    for one, other, single in zip(whole, again, alone, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
        assert torch.equal(one[0][2:3, 4:5, 30:31], single[0])
        assert torch.equal(one[1][2:3, :, 30:31], single[1])


def asked(variant="half_split", **change):
    """What the rule of a variant says about a call with something changed."""
    heads_at = 2 if variant in ("pairs_doubled_single", "complex_pairs") else 1
    width = 8 if variant in PARTIAL else 16
    cos, sin = tables(variant, 2, 5, width, F32)
    if variant in BROADCAST:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    operands = {"q": states(2, 3, 5, 16, F32, heads_at), "k": states(2, 2, 5, 16, F32, heads_at)}
    if variant.endswith("_single"):
        operands = {"x": operands["q"]}
    operands |= {"cos": cos, "sin": sin}
    if variant in COMPLEX:
        operands = {"q": operands["q"], "k": operands["k"], "freqs": torch.complex(cos, sin)}
    if variant == "half_split_gathered":
        operands |= {
            "cos": cos[0],
            "sin": sin[0],
            "position_ids": torch.zeros(2, 5, dtype=torch.int64, device=DEVICE),
        }
    if variant not in BROADCAST:
        operands["unsqueeze_dim"] = heads_at
    operands |= {
        name: value.to(DEVICE) if isinstance(value, torch.Tensor) and value.device.type == "cpu" else value
        for name, value in change.items()
    }
    if variant == "half_split_partial_optional_key":
        operands["k"] = operands.pop("k")
        operands["unsqueeze_dim"] = operands.pop("unsqueeze_dim")
    rule = load_attribute(FUSED[variant].refuses)
    return rule(None, *operands.values(), getattr(reference, variant))


@pytest.mark.parametrize("variant", FUSED)
def test_rules_take_what_models_give(variant):
    assert asked(variant) is None
    if "optional" in variant:
        assert asked(variant, k=None) is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"q": torch.randn(2, 3, 5, 16, dtype=torch.float64)}, "float64"),
        ({"sin": torch.randn(2, 5, 16, dtype=F16)}, "float16"),
        ({"k": torch.randn(2, 3, 5, 16, dtype=F16)}, "different dtypes"),
        ({"k": torch.randn(2, 3, 5, 16, device="meta")}, "on one device"),
        ({"k": torch.randn(3, 5, 16)}, "dimensions"),
        ({"k": torch.randn(2, 3, 4, 16)}, "do not match the positions"),
        ({"k": torch.randn(1, 3, 5, 16)}, "do not match the positions"),
        ({"cos": torch.randn(2, 5, 16).requires_grad_()}, "requires a gradient"),
        ({"cos": torch.randn(1, 5, 16)}, "different shapes"),
        ({"cos": torch.randn(2, 5, 8), "sin": torch.randn(2, 5, 8)}, "do not match the columns"),
        ({"cos": torch.randn(2, 5, 15), "sin": torch.randn(2, 5, 15)}, "even"),
        ({"cos": torch.randn(2, 5, 32), "sin": torch.randn(2, 5, 32)}, "do not match the columns"),
        ({"cos": torch.randn(5, 16), "sin": torch.randn(5, 16)}, "one dimension less"),
        ({"unsqueeze_dim": 0}, "not the dimension of the heads"),
        ({"unsqueeze_dim": 3}, "not the dimension of the heads"),
        ({"unsqueeze_dim": True}, "unsqueeze_dim is True"),
        ({"unsqueeze_dim": 5}, "unsqueeze_dim is 5"),
        ({"unsqueeze_dim": 2}, "do not match the positions"),
        ({"q": torch.nn.Buffer(torch.randn(2, 3, 5, 16)).as_subclass(type("Strange", (torch.Tensor,), {}))}, "Strange"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_refuses(change, reason):
    assert reason in asked(**{name: given for name, given in change.items()})


def test_refuses_other_complex_tables():
    freqs = torch.randn(2, 5, 8, dtype=torch.complex64)
    assert "complex128" in asked("complex_pairs", freqs=freqs.to(torch.complex128))
    assert "do not match the columns" in asked("complex_pairs", freqs=freqs[..., :4])
    assert "on one device" in asked("complex_pairs_moved", freqs=freqs.to("meta"))


def test_refuses_wide_heads_and_other_tables():
    wide = {"q": torch.randn(2, 3, 5, 2048), "k": torch.randn(2, 3, 5, 2048)}
    assert "at most 1024" in asked(**wide, cos=torch.randn(2, 5, 2048), sin=torch.randn(2, 5, 2048))
    assert "exactly the heads" in asked(
        "pairs_fp32_broadcast", cos=torch.randn(2, 3, 5, 16), sin=torch.randn(2, 3, 5, 16)
    )
    assert "integers" in asked("half_split_gathered", position_ids=torch.zeros(2, 5))
    assert "do not match the positions" in asked(
        "half_split_gathered", position_ids=torch.zeros(2, 4, dtype=torch.int64)
    )
