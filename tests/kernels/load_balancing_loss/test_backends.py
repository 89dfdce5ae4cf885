"""The torch and the Triton backend (interpreted on a CPU) against the reference."""

import pytest
import torch

from tests.kernels.matching import DEVICE, assert_matches, close, gradients
from veomni_hook.kernels.load_balancing_loss import reference, row_weights
from veomni_hook.kernels.load_balancing_loss import torch as plain

pytest.importorskip("triton")

from veomni_hook.kernels.load_balancing_loss import triton as fused

BACKENDS = pytest.mark.parametrize("module", [plain, fused], ids=["torch", "triton"])
VARIANTS = pytest.mark.parametrize("variant", ["softmax_topk", "softmax_topk_in_dtype"])
BATCH, LENGTH = 2, 19
PADDED = torch.ones(BATCH, LENGTH, dtype=torch.int64)
PADDED[0, 6:] = 0
WEIGHTS = torch.rand(BATCH, LENGTH, generator=torch.Generator().manual_seed(0))
MASKS = {"none": None, "padding": PADDED, "bool": PADDED.bool(), "weights": WEIGHTS}
# A gradient is a small difference of probabilities, which the reference itself rounds: its own distance from
# float64 is up to 1.6e-2 in float16 and 8e-2 in bfloat16 (180 draws), ours up to 8e-3 and 1e-1 (where the
# interpreter cuts bfloat16 off).
OF_TRUTH = {torch.float32: 1e-5, torch.float16: 1.6e-2, torch.bfloat16: 0.12}


def layers(experts=5, count=3, dtype=torch.float32):
    # Apart enough to be apart in bfloat16, so that everybody chooses the same experts.
    rows = torch.stack([torch.randperm(experts) for _ in range(count * BATCH * LENGTH)])
    rows = rows * 0.3 + torch.rand(rows.shape) * 0.1
    return [each.to(DEVICE, dtype) for each in rows.reshape(count, -1, experts).unbind()]


def loss(module, variant, mask, top_k=2):
    mask = None if mask is None else mask.to(DEVICE)
    return lambda *logits: getattr(module, variant)(logits, logits[0].shape[1], top_k, mask)


@pytest.mark.sample(8)
@BACKENDS
@VARIANTS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_equals_the_reference(module, variant, dtype, mask):
    given = layers(dtype=dtype)
    found, expected = (loss(each, variant, mask)(*given) for each in (module, reference))
    # The interpreter cuts bfloat16 off where a GPU rounds.
    torch.testing.assert_close(found, expected, rtol=1e-2 if dtype is torch.bfloat16 else 1e-5, atol=0)
    (_, grads), (_, truths) = (
        gradients(loss(*side), logits, [True] * len(given))
        for side, logits in (
            ((module, variant, mask), given),
            ((reference, variant, mask), [each.double() for each in given]),
        )
    )
    for grad, truth in zip(grads, truths, strict=True):
        assert grad.dtype is dtype
        close(grad, truth, OF_TRUTH[dtype])


@BACKENDS
@pytest.mark.parametrize("mask", [None, PADDED], ids=["none", "padding"])
def test_the_means_of_one_variant_are_rounded(module, mask):
    # The interpreter cuts bfloat16 off, and rounds float16.
    given = [each * 3 for each in layers(dtype=torch.float16)]
    exact, rounded = (loss(reference, variant, mask)(*given) for variant in VARIANTS.args[1])
    assert exact != rounded
    for variant, expected in zip(VARIANTS.args[1], (exact, rounded), strict=True):
        torch.testing.assert_close(loss(module, variant, mask)(*given), expected, rtol=1e-5, atol=0)


@BACKENDS
@pytest.mark.parametrize(("experts", "top_k"), [(1, 1), (8, 7), (60, 4), (33, 1)])
def test_other_sizes(module, experts, top_k, monkeypatch):
    monkeypatch.setattr(fused, "_TILE", 256)
    given = layers(experts, count=4)
    sides = [loss(each, "softmax_topk", PADDED, top_k) for each in (module, reference)]
    assert_matches(*sides, given, tolerance=1e-5)


@BACKENDS
def test_equals_are_chosen_once(module):
    given = [torch.zeros(BATCH * LENGTH, 6, device=DEVICE)]
    assert loss(module, "softmax_topk", None)(*given).item() == pytest.approx(2.0)


@BACKENDS
def test_gradients_only_where_wanted(module):
    sides = [loss(each, "softmax_topk", None) for each in (module, reference)]
    assert_matches(*sides, layers(), [True, False, True])


@BACKENDS
def test_strided_and_shifted_layers(module):
    held = torch.randn(BATCH * LENGTH * 5 + 1, device=DEVICE)[1:].reshape(-1, 5)
    given = [held, torch.randn(5, BATCH * LENGTH, device=DEVICE).t()]
    for each in given:
        assert row_weights.refuses(None, tuple(given), 5, 2, None) is None
        assert each.shape == (BATCH * LENGTH, 5)
    values = [loss(each, "softmax_topk", None)(*given) for each in (module, reference)]
    torch.testing.assert_close(*values)


@BACKENDS
@VARIANTS
def test_under_autocast(module, variant):
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        sides = [loss(each, variant, PADDED) for each in (module, reference)]
        assert_matches(*sides, layers(dtype=torch.bfloat16))


@BACKENDS
def test_is_traced_without_a_graph_break(module):
    call = loss(module, "softmax_topk", PADDED)
    assert_matches(torch.compile(call, fullgraph=True, backend="aot_eager"), call, layers())


def test_the_operators_keep_their_contracts():
    given = layers()
    kept = torch.rand(BATCH * LENGTH, device=DEVICE)
    for mask in (None, kept):
        call = (given[0], given, mask, 2, torch.float32)
        torch.library.opcheck(torch.ops.veomni_hook.load_balancing_sums.default, call)
        call = (given[0], given, mask, torch.rand(5, device=DEVICE), torch.float32)
        torch.library.opcheck(torch.ops.veomni_hook.load_balancing_gradient.default, call)


@BACKENDS
def test_equal_bits_from_run_to_run(module):
    given = layers(count=5)
    (one, grads), (other, again) = (
        gradients(loss(module, "softmax_topk", MASKS["weights"]), given, [True] * 5) for _ in range(2)
    )
    assert torch.equal(one[0], other[0])
    assert all(torch.equal(a, b) for a, b in zip(grads, again, strict=True))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"gate_logits": None}, "not a tuple"),
        ({"gate_logits": ()}, "not a tuple"),
        ({"gate_logits": (torch.zeros(38, 5), torch.zeros(37, 5))}, "differ"),
        ({"gate_logits": (torch.zeros(38, 5, dtype=torch.int64),)}, "int64"),
        ({"num_experts": 6}, "num_experts"),
        ({"num_experts": None}, "not an int"),
        ({"top_k": 6}, "top_k"),
        ({"attention_mask": torch.ones(38)}, "[batch, length]"),
        ({"attention_mask": torch.ones(2, 18)}, "[batch, length]"),
        ({"attention_mask": torch.ones(2, 19).bfloat16()}, "bfloat16"),
        ({"attention_mask": torch.ones(2, 19).requires_grad_()}, "gradient"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_refuses(change, reason):
    call = {"gate_logits": tuple(layers()), "num_experts": 5, "top_k": 2, "attention_mask": PADDED.to(DEVICE)}
    upstream = (None,)
    assert row_weights.refuses(None, *call.values(), *upstream) is None
    assert reason in row_weights.refuses(None, *(call | change).values(), *upstream)


def test_the_fused_one_refuses_what_no_program_holds():
    assert "float64" in fused.refuses(None, (torch.zeros(4, 5, dtype=torch.float64),), 5, 2)
    assert "at most 1024" in fused.refuses(None, (torch.zeros(4, 2000),), 2000, 2)
