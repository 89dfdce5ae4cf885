"""Which keys queries see, read from masks; attention on them against torch's own."""

import pytest
import torch
from torch.nn import functional

from veomni_hook.batch_invariance import attention
from veomni_hook.batch_invariance.segments import Segment, of_mask
from veomni_hook.errors import KernelError


def causal(queries, keys, window=0):
    place = torch.arange(queries)[:, None] + keys - queries
    key = torch.arange(keys)[None, :]
    seen = key <= place
    return seen & (key > place - window) if window else seen


def masks(*rows):
    return torch.stack(rows)[:, None]


PADDED, SAMPLE = causal(6, 6), torch.tensor([0, 1, 2, 2, 2, 3, 3])
PADDED[:, :2] = False
ADDED = torch.zeros(1, 1, 4, 4).masked_fill(~causal(4, 4), torch.finfo(torch.float32).min)


@pytest.mark.parametrize(
    ("mask", "segments"),
    [
        (masks(causal(5, 5)), [Segment(0, (0, 5), (0, 5), True)]),
        (masks(causal(2, 7)), [Segment(0, (0, 2), (0, 7), True)]),
        (masks(PADDED, causal(6, 6)), [Segment(0, (2, 6), (2, 6), True), Segment(1, (0, 6), (0, 6), True)]),
        # The first query of a sample sees only itself: a window of one, as the samples of one position before it.
        (
            masks(causal(7, 7) & (SAMPLE[:, None] == SAMPLE[None, :])),
            [
                Segment(0, (0, 3), (0, 3), True, 1),
                Segment(0, (3, 5), (2, 5), True),
                Segment(0, (5, 7), (5, 7), True),
            ],
        ),
        (masks(causal(9, 9, window=4)), [Segment(0, (0, 9), (0, 9), True, 4)]),
        (torch.ones(1, 1, 3, 4, dtype=torch.bool), [Segment(0, (0, 3), (0, 4), False)]),
        (ADDED, [Segment(0, (0, 4), (0, 4), True)]),
    ],
    ids=[
        "a row",
        "a cache",
        "padding on the left",
        "packed samples",
        "a window",
        "all see all",
        "added numbers",
    ],
)
def test_segments_of_masks(mask, segments):
    assert of_mask(mask) == tuple(segments)


@pytest.mark.parametrize(
    ("mask", "reason"),
    [
        (torch.tensor([[[[True, False, True]]]]), "gaps"),
        (torch.full((1, 1, 2, 2), -1.5), "adds other numbers than 0 and -inf"),
        (torch.stack([causal(3, 3), ~causal(3, 3)])[None], "for all heads"),
    ],
)
def test_masks_that_are_refused(mask, reason):
    with pytest.raises(KernelError, match=reason):
        of_mask(mask)


class Module(torch.nn.Module):
    is_causal = True


@pytest.mark.parametrize(
    ("queries", "keys", "mask"),
    [
        (70, 70, None),
        (150, 150, masks(causal(150, 150, window=40), causal(150, 150))),
        (3, 140, masks(causal(3, 140), causal(3, 140))),
        (1, 66, None),
        (66, 66, torch.ones(2, 1, 66, 66, dtype=torch.bool)),
    ],
)
def test_attention_and_gradients(queries, keys, mask):
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(2, heads, length, width, dtype=torch.float64, requires_grad=True)
        for heads, length, width in ((4, queries, 24), (2, keys, 24), (2, keys, 16))
    )
    found, _ = attention.sdpa(Module(), q, k, v, mask, scaling=0.3)
    right = functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None and queries > 1, scale=0.3, enable_gqa=True
    ).transpose(1, 2)
    torch.testing.assert_close(found, right)
    upstream = torch.randn_like(found)
    for one, other in zip(
        torch.autograd.grad(found, (q, k, v), upstream),
        torch.autograd.grad(right, (q, k, v), upstream),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


def test_rows_that_see_nothing_are_zero():
    mask = masks(causal(4, 4))
    mask[..., :2] = False
    q = k = v = torch.ones(1, 1, 4, 8)
    found, _ = attention.sdpa(Module(), q, k, v, mask)
    assert found[0, :, 0, 0].tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"softcap": 30.0}, "softcap"),
        ({"dropout": 0.1}, "dropout"),
        ({"sliding_window": 4, "attention_mask": masks(causal(1, 4))}, "window of 4 keys"),
    ],
)
def test_calls_that_are_refused(options, reason):
    q, k = torch.ones(1, 1, 1, 8), torch.ones(1, 1, 4, 8)
    with pytest.raises(KernelError, match=reason):
        attention.sdpa(Module(), q, k, k, **{"attention_mask": None, **options})


@pytest.mark.parametrize("window", [0, 40])
def test_bits_of_a_shorter_call(window):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, heads, 150, 32) for heads in (4, 2, 2))
    whole, _ = attention.sdpa(
        Module(), q, k, v, masks(causal(150, 150, window)), sliding_window=window or None
    )
    for length in (30, 64, 97):
        parts = (each[:, :, :length] for each in (q, k, v))
        found, _ = attention.sdpa(Module(), *parts, masks(causal(length, length, window)))
        assert torch.equal(found, whole[:, :length])
    if not window:
        last, _ = attention.sdpa(Module(), q[:, :, -1:], k, v, None)
        assert torch.equal(last, whole[:, -1:])
