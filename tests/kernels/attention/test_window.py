"""Attention in a sliding window: which masks are noted, and what models compute, on a CPU.

torch's flash attention runs on GPUs only: its operator is exchanged for a formula that gets a window, not a
mask. The patched functions stand in the installed transformers while a test runs.
"""

from __future__ import annotations

import inspect
import sys
import types
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM, masking_utils
from transformers.integrations import sdpa_attention
from transformers.models.mistral import modeling_mistral

import veomni_hook
from veomni_hook.kernels.attention import flash, masked, windows
from veomni_hook.kernels.explain import collect
from veomni_hook.kernels.selection.declaration import Requirement
from veomni_hook.kernels.selection.registry import registry
from veomni_hook.patches.engine import Origin, patch_source

WINDOW, LENGTH = 5, 12
CREATE = "create_sliding_window_causal_mask"
LEFT = torch.tensor([[0, 0, 0, *[1] * (LENGTH - 3)], [1] * LENGTH])
PACKED = torch.tensor([[*range(7), *range(LENGTH - 7)]]).expand(2, -1)


@cache
def patched_code(module: types.ModuleType) -> types.CodeType:
    source = Path(inspect.getsourcefile(module)).read_text(encoding="utf-8")
    origin = Origin(module.__name__, "x.py", "transformers", "test")
    return compile(patch_source(source, [], origin, idioms=True).text, "patched", "exec")


def patched(module: types.ModuleType) -> types.ModuleType:
    """A copy of a module of the installed transformers, as the hook patches it."""
    copy = types.ModuleType(module.__name__)
    copy.__package__ = module.__name__.rpartition(".")[0]
    exec(patched_code(module), vars(copy))
    return copy


def window(positions: int, keys: int) -> torch.Tensor:
    """The mask of a window by definition, ``[positions, positions]``."""
    ahead = torch.arange(positions)[:, None] - torch.arange(positions)
    return (ahead >= 0) & (ahead < keys)


def windowed(query, key, value, *others, scale, window_size_left, window_size_right):
    """What the operator computes: ``[batch, length, heads, width]``, causal, in a window."""
    assert others == (None, None, query.shape[1], query.shape[1], 0.0, True, False)
    assert window_size_right == 0
    mask = window(query.shape[1], window_size_left + 1)[None, None]
    heads = (each.transpose(1, 2) for each in (query, key, value))
    return (masked.sliding_window(*heads, mask, SimpleNamespace(training=True), scale)[0],)


@pytest.fixture(autouse=True)
def _on_a_cpu(monkeypatch):
    monkeypatch.setattr(windows, "_DEVICES", ("cpu",))
    monkeypatch.setattr(flash, "_OPERATOR", windowed)
    monkeypatch.setattr(flash, "_DTYPES", (torch.float32, torch.bfloat16))
    monkeypatch.setattr(flash, "SHORTEST", 2)
    with registry.restored():
        for kernel in registry.kernels():
            if kernel.backend == "flash":
                registry.replace(replace(kernel, requires=Requirement(devices=("cpu",))))
        yield


@pytest.fixture
def slot(monkeypatch):
    """Exchange both functions where a Mistral looks them up; returns the slot."""
    masks, attention = patched(masking_utils), patched(sdpa_attention)
    monkeypatch.setattr(modeling_mistral, CREATE, getattr(masks, CREATE))
    monkeypatch.setitem(
        masking_utils.LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING, "sliding_attention", getattr(masks, CREATE)
    )
    monkeypatch.setattr(masking_utils, CREATE, getattr(masks, CREATE))
    functions = modeling_mistral.ALL_ATTENTION_FUNCTIONS._global_mapping
    monkeypatch.setitem(functions, "sdpa", attention.sdpa_attention_forward)
    monkeypatch.setitem(sys.modules, sdpa_attention.__name__, attention)
    return attention.veomni_attention_sliding_window


def model(**changes: Any) -> MistralForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 31, "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    return MistralForCausalLM(MistralConfig(**sizes | heads | {"sliding_window": WINDOW} | changes)).train()


def results(network, **inputs: Any) -> list[torch.Tensor]:
    ids = torch.randint(0, 31, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    network.zero_grad()
    output = network(input_ids=ids, labels=ids, **inputs)
    output.loss.backward()
    return [output.loss.detach(), output.logits.detach(), *(one.grad.clone() for one in network.parameters())]


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
    monkeypatch.setattr(windows, "_is_capturing", lambda mask: True)
    read, unread = (torch.ones(1, 1, 4, 4, dtype=torch.bool) for _ in range(2))
    windows.note_window(read, None, 3)
    windows.note_window(unread, torch.ones(1, 4), 3)
    assert windows.window_of(read) == 3 and windows.window_of(unread) is None


def test_a_changed_or_sliced_mask_is_unknown():
    mask = torch.ones(1, 1, 4, 4, dtype=torch.bool).tril()
    windows.note_window(mask, None, 3)
    assert windows.window_of(mask) == 3
    assert windows.window_of(mask[:, :, :2]) is None
    mask[0, 0, 3, 0] = False
    assert windows.window_of(mask) is None


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
    noted = None if mask is None else windows.window_of(mask)
    assert noted == (keys if mask is not None and alone and padding in {None, "ones"} else None)
    if noted is not None:
        assert torch.equal(mask.expand(2, 1, -1, -1)[1, 0], window(LENGTH, keys))
    assert (mask is None) <= (keys > LENGTH)
