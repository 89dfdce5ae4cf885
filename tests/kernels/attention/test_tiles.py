"""Attention with sinks in tiles against the formula: outputs and all gradients, under any dense mask."""

from types import SimpleNamespace

import pytest
import torch

from tests.kernels import declared
from tests.kernels.matching import DEVICE, assert_matches, close

pytest.importorskip("triton")

from veomni_hook.kernels.attention import tiles

#: Batch, heads, heads of keys, queries, keys, width, width of values.
SIZES = [
    (1, 4, 1, 5, 9, 16, 16),  # one group
    (2, 6, 2, 19, 70, 24, 40),  # three heads a group; odd numbers; values of another width
    (1, 70, 1, 3, 66, 16, 16),  # more heads than a tile has rows
    (1, 2, 2, 40, 40, 32, 32),  # a head each
]
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * (DEVICE == "cuda")
VARIANTS = ["sinks", "sinks_float32_softmax", "sinks_rescaled"]
SCALE = 0.4


def mask_of(batch, queries, keys, dtype=torch.float32, share=0.4):
    """A mask of chosen keys: some queries see none, and some tiles of keys are seen by nobody."""
    seen = torch.rand(batch, 1, queries, keys, device=DEVICE) < share
    seen[..., keys // 3 :] &= torch.rand(batch, 1, queries, 1, device=DEVICE) < 0.5
    seen[:, :, queries // 2] = False
    return torch.zeros(seen.shape, device=DEVICE, dtype=dtype).masked_fill_(~seen, torch.finfo(dtype).min)


def operands(batch, heads, kv, queries, keys, width, value_width, dtype=torch.float32):
    torch.manual_seed(3)
    shapes = (batch, heads, queries, width), (batch, kv, keys, width), (batch, kv, keys, value_width)
    tensors = [torch.randn(shape, device=DEVICE).to(dtype) for shape in shapes]
    return [*tensors, torch.randn(heads, device=DEVICE).to(dtype)]


def attention(f, mask, groups, shared=False):
    """A function of the tensors with gradients: queries, keys, values (left out if shared), sinks."""

    def run(query, key, *rest):
        value, sinks = (key, *rest) if shared else rest
        module = SimpleNamespace(sinks=sinks, num_key_value_groups=groups, training=True)
        return f(query, key, value, mask, module, SCALE)[0]

    return run


def compared(variant, tensors, mask, shared=False, **options):
    groups = tensors[0].shape[1] // tensors[1].shape[1]
    both = declared.kernel("attention", variant, "tiles"), declared.reference("attention", variant)
    assert_matches(*(attention(f, mask, groups, shared) for f in both), tensors, **options)


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_results_and_gradients_are_the_formulas(size, dtype):
    batch, _, _, queries, keys, *_ = size
    tensors = operands(*size, dtype=dtype)
    compared("sinks_float32_softmax", tensors, mask_of(batch, queries, keys, dtype))


@pytest.mark.sample(1)
@pytest.mark.parametrize("variant", VARIANTS)
def test_keys_that_are_the_values(variant):
    query, key, _, sinks = operands(2, 8, 1, 21, 70, 64, 64)
    mask = mask_of(2, 21, 70)
    mask[:, :, 10, 0] = 0  # the formula of `sinks_rescaled` needs a key
    compared(variant, [query, key, sinks], mask, shared=True)


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "size", [(2, 6, 2, 19, 70, 24), (1, 70, 1, 3, 66, 16), (1, 2, 2, 40, 40, 32)], ids=str
)
def test_gradients_of_keys_that_are_the_values(size, dtype):
    batch, _, _, queries, keys, width = size
    query, key, _, sinks = operands(*size, width, dtype=dtype)
    mask = mask_of(batch, queries, keys, dtype)
    compared("sinks_float32_softmax", [query, key, sinks], mask, shared=True)


def test_strided_keys_that_are_the_values():
    query, key, _, sinks = operands(2, 4, 2, 36, 50, 32, 32)
    query = query.transpose(1, 2).contiguous().transpose(1, 2)[:, :, ::2, ::2]
    key = key.transpose(0, 1).contiguous().transpose(0, 1)[..., 16:]
    compared("sinks", [query, key, sinks], mask_of(2, 18, 50), shared=True)


def test_the_widest_heads():
    query, key, _, sinks = operands(1, 16, 1, 3, 20, 512, 512)
    compared("sinks", [query, key, sinks], mask_of(1, 3, 20), shared=True)


def test_a_mask_for_all_rows_of_a_batch():
    compared("sinks", operands(2, 4, 2, 17, 33, 16, 16), mask_of(1, 17, 33))


@pytest.mark.parametrize("hidden", [float("-inf"), torch.finfo(torch.float32).min])
def test_what_a_mask_adds(hidden):
    """Any number is added to a score; the smallest number and -inf hide a key."""
    mask = torch.randn(1, 1, 17, 40, device=DEVICE)
    mask[..., 5:20] = hidden
    compared("sinks", operands(1, 4, 2, 17, 40, 16, 16), mask)


def test_a_mask_in_another_dtype_and_strided():
    mask = mask_of(1, 17, 40, torch.float16).mT.contiguous().mT
    tensors = operands(1, 4, 2, 17, 40, 16, 16)
    truth = attention(declared.reference("attention", "sinks"), mask.float(), 2)(*tensors)
    close(attention(tiles.with_sinks, mask, 2)(*tensors), truth, 3e-6)


def test_strided_operands():
    query, key, value, sinks = operands(2, 4, 2, 36, 50, 32, 32)
    query = query.transpose(1, 2).contiguous().transpose(1, 2)[:, :, ::2, ::2]
    compared(
        "sinks",
        [query, key[..., 16:], value.transpose(0, 1).contiguous().transpose(0, 1), sinks],
        mask_of(2, 18, 50),
    )


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "wanted", [(True, False, False, False), (False, True, False, True), (False, False, True, False)]
)
def test_few_wanted_gradients(wanted):
    compared("sinks", operands(1, 4, 2, 7, 20, 16, 16), mask_of(1, 7, 20), wanted=wanted)


def test_no_queries_and_no_keys():
    for queries, keys in ((0, 4), (3, 0)):
        compared(
            "sinks", operands(1, 4, 2, queries, keys, 16, 16), torch.zeros(1, 1, queries, keys, device=DEVICE)
        )


def test_only_tiles_that_are_seen_are_visited():
    """Keys of other tiles are not read: numbers there that are none do not matter."""
    query, key, value, sinks = operands(1, 4, 1, 8, 256, 16, 16)
    mask = torch.full((1, 1, 8, 256), torch.finfo(torch.float32).min, device=DEVICE)
    mask[..., 64:100] = 0
    found = attention(tiles.with_sinks, mask, 4)
    truth = found(query, key, value, sinks)
    key[:, :, 128:], value[:, :, :64] = float("nan"), float("nan")
    assert torch.equal(found(query, key, value, sinks), truth)


@pytest.mark.slow
def test_the_same_bits_again():
    tensors = operands(2, 6, 2, 40, 200, 24, 24)
    mask = mask_of(2, 40, 200)
    found = []
    for _ in range(2):
        leaves = [each.clone().requires_grad_() for each in tensors]
        out = attention(tiles.with_sinks, mask, 3)(*leaves)
        found.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_under_autocast():
    tensors = operands(1, 4, 2, 17, 40, 16, 16)
    mask = mask_of(1, 17, 40)
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float16
    with torch.autocast(DEVICE, dtype=dtype):
        found = attention(tiles.with_sinks, mask, 2)(*tensors)
        truth = attention(declared.reference("attention", "sinks"), mask, 2)(*tensors)
    assert found.dtype == truth.dtype == dtype
    close(found, truth, 2e-2)


@pytest.mark.sample(1)
@pytest.mark.parametrize("shared", [False, True])
def test_in_compiled_code(shared):
    """One graph; the operators and their backward are known to it."""
    query, key, value, sinks = operands(1, 4, 2, 17, 40, 16, 16)
    mask, module = mask_of(1, 17, 40), torch.nn.Module()
    module.sinks = torch.nn.Parameter(sinks)

    def run(query, key, value):
        return tiles.with_sinks(query, key, key if shared else value, mask, module, SCALE)[0]

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    found = []
    for f in (run, compiled):
        leaves = [each.clone().requires_grad_() for each in (query, key, value)]
        out = f(*leaves)
        wanted = [*leaves[: 2 if shared else 3], module.sinks]
        found.append([out, *torch.autograd.grad(out.square().sum(), wanted)])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.slow
def test_operators_are_known_to_torch():
    query, key, value, sinks = operands(1, 4, 2, 7, 20, 16, 16)
    mask = mask_of(1, 7, 20)[:, 0]
    forward, backward = (
        getattr(torch.ops.veomni_hook, name) for name in ("attention_tiles", "attention_tiles_backward")
    )
    for values in (value, None):
        torch.library.opcheck(forward, (query, key, values, mask, sinks, SCALE))
        out, lse = forward(query, key, values, mask, sinks, SCALE)
        torch.library.opcheck(backward, (query, key, values, mask, out, lse, torch.ones_like(out), SCALE))


def test_what_is_refused():
    query, key, value, sinks = operands(1, 4, 2, 7, 20, 16, 16)
    mask = mask_of(1, 7, 20)
    owner = torch.nn.Module()

    def refused(mask=mask, dropout=0.0, query=query, key=key, value=value):
        module = SimpleNamespace(sinks=sinks)
        return tiles.refuses(owner, query, key, value, mask, module, SCALE, dropout)

    assert refused() is None
    assert refused(mask=None) == "there is no attention mask"
    assert refused(mask=mask[..., :-1]) == "the attention mask is (1, 1, 7, 19), not (1, 1, 7, 20)"
    assert "torch.bool" in refused(mask=mask == 0)
    assert refused(mask=mask.clone().requires_grad_()) == "the attention mask wants a gradient"
    assert "dropout (0.5)" in refused(dropout=0.5)
    assert "torch.float64" in refused(query=query.double())
    wide = [torch.zeros(1, 2, 7, 600, device=DEVICE), torch.zeros(1, 2, 20, 600, device=DEVICE)]
    assert "at most 512" in refused(query=wide[0], key=wide[1], value=wide[1])
    assert refused(query=query[:, :, :1]) == "there is one query: decoding"


@pytest.mark.parametrize(
    ("queries", "keys", "dtype", "reason"),
    [
        (2048, 1, torch.bfloat16, None),
        (1, 1, torch.bfloat16, "fewer than 1024 queries"),
        (2048, 2, torch.bfloat16, "keys of their own"),
        (2048, 1, torch.float32, "in float32"),
    ],
)
def test_auto_takes_what_was_measured(queries, keys, dtype, reason):
    query, key = (torch.empty(1, heads, queries, 16, dtype=dtype) for heads in (4, keys))
    found = tiles.loses(None, query, key)
    assert found is None if reason is None else reason in found
