"""Attention in a sliding window: which masks are noted, and what models compute, on a CPU."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from transformers import MistralConfig, masking_utils

import veomni_hook
from tests.kernels.attention.windows_on_a_cpu import (
    CREATE,
    LEFT,
    LENGTH,
    PACKED,
    model,
    patched,
    results,
    window,
    windowed,
)
from veomni_hook.kernels.attention import flash, windows
from veomni_hook.kernels.explain import collect

pytestmark = pytest.mark.usefixtures("windows_on_a_cpu")


def noted(mask: torch.Tensor, queries: int | None = None) -> int | None:
    return windows.window_of(mask, torch.empty(2, 4, queries or mask.shape[2], 8))


def taken(slot, network) -> list[str]:
    """The backend of the last call of each layer; nothing for those that have not asked."""
    layers = [layer.self_attn for layer in network.model.layers]
    return [outcome.backend for layer in layers if (outcome := slot.outcome(layer)) is not None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "inputs", [{}, {"attention_mask": torch.ones(2, LENGTH)}, {"use_cache": False}], ids=list
)
def test_a_window_is_computed_without_its_mask_and_equals_upstream(slot, dtype, inputs):
    network = model().to(dtype)
    found = results(network, **inputs)
    assert taken(slot, network) == ["flash"] * 2
    with veomni_hook.use_kernels("eager"):
        expected = results(network, **inputs)
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 0.05, "atol": 0.02}
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, **close)


def test_the_operator_is_what_computes(slot, monkeypatch):
    network = model()
    before = results(network)
    monkeypatch.setattr(flash, "_OPERATOR", lambda *given, **named: (2 * windowed(*given, **named)[0],))
    assert not torch.allclose(before[1], results(network)[1])


@pytest.mark.parametrize(
    "inputs",
    [
        {"attention_mask": LEFT},
        {"attention_mask": LEFT.flip(1)},
        {"position_ids": PACKED, "use_cache": False},
    ],
    ids=["left", "right", "packed"],
)
def test_masks_that_hold_more_than_a_window_stay_with_upstream(slot, inputs):
    network = model()
    found = results(network, **inputs)
    assert taken(slot, network) == []
    with veomni_hook.use_kernels("eager"):
        expected = results(network, **inputs)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def test_nothing_is_read_while_a_graph_is_captured(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    read, unread = (torch.ones(1, 1, 4, 4, dtype=torch.bool) for _ in range(2))
    windows.note_window(read, None, 3)
    windows.note_window(unread, torch.ones(1, 4), 3)
    assert noted(read) == 3 and noted(unread) is None


def test_a_changed_or_sliced_mask_is_unknown():
    mask = torch.ones(1, 1, 4, 4, dtype=torch.bool).tril()
    windows.note_window(mask, None, 3)
    assert noted(mask) == 3
    assert noted(mask[:, :, :2]) is None and noted(mask, queries=5) is None
    mask[0, 0, 3, 0] = False
    assert noted(mask) is None


@pytest.mark.parametrize(
    ("change", "dtype", "reason"),
    [
        ({"attention_dropout": 0.1}, torch.float32, "has dropout"),
        ({"head_dim": 12}, torch.float32, "multiple of 8"),
        ({}, torch.float64, "half precision"),
    ],
    ids=["dropout", "width", "dtype"],
)
def test_calls_that_flash_attention_cannot_take_stay_with_upstream(slot, change, dtype, reason):
    network = model(**change).to(dtype)
    torch.manual_seed(5)
    found = results(network)
    assert taken(slot, network) == ["eager"] * 2
    assert reason in slot.outcome(network.model.layers[0].self_attn).reason
    torch.manual_seed(5)
    with veomni_hook.use_kernels("eager"):
        assert torch.equal(found[1], results(network)[1])


def test_decoding_with_a_cache_equals_upstream(slot):
    network = model().eval()
    ids = torch.randint(1, 31, (1, LENGTH))
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    found = network.generate(ids, **options)
    assert taken(slot, network)
    with veomni_hook.use_kernels("eager"):
        assert torch.equal(found, network.generate(ids, **options))


def test_inference_mode_has_no_versions_and_stays_with_upstream(slot):
    network = model().eval()
    ids = torch.randint(1, 31, (1, LENGTH))
    with torch.inference_mode():
        found = network(ids).logits
        assert taken(slot, network) == []
        with veomni_hook.use_kernels("eager"):
            assert torch.equal(found, network(ids).logits)


def test_explain_has_a_row_for_each_layer_that_asked(slot):
    network = model()
    assert not [row for row in collect.rows_of_model(network, "cpu") if row.op == "attention"]
    results(network)
    rows = [row for row in collect.rows_of_model(network, "cpu") if row.op == "attention"]
    assert [(row.place, row.variant, row.backend) for row in rows] == [
        (f"model.layers.{number}.self_attn", "sliding_window", "flash") for number in range(2)
    ]


def test_sdpa_chosen_by_name_leaves_the_kernel_to_torch_as_well(slot):
    network = model(attn_implementation="sdpa")
    results(network)
    assert taken(slot, network) == ["flash"] * 2


def test_eager_attention_gets_its_own_mask(slot):
    network = model(attn_implementation="eager")
    results(network)
    assert taken(slot, network) == []


@pytest.mark.parametrize("keys", [1, 5, LENGTH - 1, LENGTH, LENGTH + 3])
@pytest.mark.parametrize("padding", [None, "ones", "left", "right"])
@pytest.mark.parametrize("how", ["plain", "packed", "and", "or"])
def test_a_noted_mask_is_exactly_a_window(keys, padding, how):
    create = getattr(patched(masking_utils), CREATE)
    names = inspect.signature(create).parameters
    masks = {None: None, "ones": torch.ones(2, LENGTH), "left": LEFT, "right": LEFT.flip(1)}
    offered: dict[str, Any] = {
        "config": MistralConfig(sliding_window=keys, attn_implementation="sdpa"),
        "attention_mask": masks[padding],
        "past_key_values": None,
        "cache": None,
        "cache_position": torch.arange(LENGTH),
        "inputs_embeds": torch.zeros(2, LENGTH, 4),
        "input_embeds": torch.zeros(2, LENGTH, 4),
        "position_ids": PACKED if how == "packed" else None,
        "and_mask_function": (lambda b, h, q, k: k != 2) if how == "and" else None,
        "or_mask_function": (lambda b, h, q, k: k == 2) if how == "or" else None,
    }
    mask = create(**{name: value for name, value in offered.items() if name in names})
    # transformers looks for packed samples only where there is no padding mask.
    alone = how == "plain" or (how == "packed" and padding is not None)
    found = None if mask is None else noted(mask)
    assert found == (keys if mask is not None and alone and padding in {None, "ones"} else None)
    if found is not None:
        assert torch.equal(mask.expand(2, 1, -1, -1)[1, 0], window(LENGTH, keys))
    assert (mask is None) <= (keys > LENGTH)
