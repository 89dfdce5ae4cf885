"""Attention in a sliding window under ``torch.compile``: one graph without a mask, equal to upstream."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch._dynamo.backends.common import aot_autograd
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, MistralConfig, masking_utils

import veomni_hook
from tests.kernels.attention.windows_on_a_cpu import (
    CREATE,
    LEFT,
    LENGTH,
    PACKED,
    SIZES,
    WINDOW,
    batch,
    model,
    results,
    window,
    windowed,
)
from tests.kernels.dispatched import compiled, nodes
from veomni_hook.kernels.attention import flash, traced_masks
from veomni_hook.kernels.selection.process_choice import set_choice

CLOSE = {torch.float32: {"rtol": 1e-5, "atol": 1e-5}, torch.bfloat16: {"rtol": 0.05, "atol": 0.02}}
OPERATOR = torch.ops.aten._flash_attention_forward


@pytest.fixture(autouse=True)
def _compiled_anew(windows_on_a_cpu):
    torch._dynamo.reset()


def forward(run) -> None:
    """A training step's forward."""
    assert run(input_ids=batch(), labels=batch(), use_cache=False).loss.isfinite()


def upstreams(network, **inputs: Any) -> list[torch.Tensor]:
    with veomni_hook.use_kernels("eager"):
        return results(network, **inputs)


def agree(found, expected, dtype=torch.float32):
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, **CLOSE[dtype])


def masked(counter) -> list[bool]:
    """Whether each attention in the graphs, with those inside checkpoints, has upstream's mask."""
    calls = [node for node in nodes(counter) if node.target is functional.scaled_dot_product_attention]
    return [not node.kwargs.get("enable_gqa") for node in calls]


def outcomes(slot, network) -> list[str]:
    found = [slot.traced(layer.self_attn) for layer in network.model.layers]
    return [each.backend if each.backend == "flash" else each.reason for each in found if each is not None]


def gemma3(**changes: Any) -> Gemma3ForCausalLM:
    torch.manual_seed(0)
    kinds = ["sliding_attention", "full_attention"]
    config = Gemma3TextConfig(**SIZES | {"sliding_window": WINDOW, "layer_types": kinds} | changes)
    return Gemma3ForCausalLM(config).train()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("checkpointed", "dtype"),
    [
        (False, torch.bfloat16),
        (True, torch.float32),
        pytest.param(False, torch.float32, marks=pytest.mark.slow),
        pytest.param(True, torch.bfloat16, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_window_is_computed_without_its_mask_and_equals_upstream(slot, dtype, checkpointed):
    network = model().to(dtype)
    if checkpointed:
        network.gradient_checkpointing_enable({"use_reentrant": False})
    expected = upstreams(network, use_cache=False)
    run, counter = compiled(network)
    for _ in range(2):
        agree(results(network, run, use_cache=False), expected, dtype)
    assert counter.frame_count == 1 and masked(counter) == [False] * len(masked(counter))
    assert outcomes(slot, network) == ["flash"] * 2


@pytest.mark.slow
def test_layers_without_a_window_have_no_mask_either(slot):
    network = gemma3()
    expected = upstreams(network, use_cache=False)
    run, counter = compiled(network)
    found = results(network, run, use_cache=False)
    assert counter.frame_count == 1
    assert outcomes(slot, network) == ["flash"]
    agree(found, expected)


def test_the_graphs_have_torchs_operator_and_no_mask(slot, monkeypatch):
    """The operator has no code for a CPU: the graphs are looked at, and results are empty."""
    monkeypatch.setattr(flash, "_OPERATOR", OPERATOR)
    graphs = []

    def compiler(graph, inputs):
        graphs.append(graph)
        results = [node and node.meta["val"] for node in next(iter(reversed(graph.graph.nodes))).args[0]]

        def run(inputs):
            return [each if each is None else torch.zeros(each.shape, dtype=each.dtype) for each in results]

        run._boxed_call = True
        return run

    backend = aot_autograd(fw_compiler=compiler, bw_compiler=compiler)
    network = model().bfloat16()
    run = torch.compile(network, backend=backend, fullgraph=True)
    run(input_ids=batch(), labels=batch(), use_cache=False).loss.backward()
    forward, backward = ([str(node.target) for node in graph.graph.nodes] for graph in graphs)
    assert forward.count("aten._flash_attention_forward.default") == 2
    assert backward.count("aten._flash_attention_backward.default") == 2
    calls = [node for node in graphs[0].graph.nodes if "_flash_attention_forward" in str(node.target)]
    assert [node.kwargs["window_size_left"] for node in calls] == [WINDOW - 1] * 2
    assert not {"aten.bitwise_and.Tensor", "aten.le.Tensor"} & {*forward}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("inputs", "backend"),
    [
        ({"attention_mask": torch.ones(2, LENGTH)}, "eager"),
        ({"attention_mask": LEFT}, "aot_eager"),
        ({"position_ids": PACKED, "use_cache": False}, "eager"),
        ({"position_ids": torch.arange(LENGTH)[None], "use_cache": False}, "eager"),
    ],
    ids=["ones", "left", "packed", "whole"],
)
def test_what_only_values_can_tell_stays_with_upstream(slot, inputs, backend):
    network = model()
    expected = upstreams(network, **inputs)
    run, counter = compiled(network, backend)
    agree(results(network, run, **inputs), expected)
    assert masked(counter) == [True] * 2 and outcomes(slot, network) == []


@pytest.fixture
def switched_off():
    torch.backends.cuda.enable_flash_sdp(False)
    yield
    torch.backends.cuda.enable_flash_sdp(True)


#: The reason, what is changed of the model, its dtype, and what is changed of the backend.
REFUSED = {
    "has dropout": ({"attention_dropout": 0.1}, torch.float32, {}),
    "multiple of 8": ({"head_dim": 12}, torch.float32, {}),
    "half precision": ({}, torch.float64, {}),
    "fewer than 13 queries": ({}, torch.float32, {"SHORTEST": LENGTH + 1}),
    "has no window here": ({}, torch.float32, {"_HAS_WINDOW": False}),
    "switched off in torch": ({}, torch.float32, {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("reason", REFUSED)
def test_what_refuses_uncompiled_refuses_compiled(slot, reason, monkeypatch, request):
    change, dtype, constants = REFUSED[reason]
    if "switched off" in reason:
        request.getfixturevalue("switched_off")
    for name, value in constants.items():
        monkeypatch.setattr(flash, name, value)
    network = model(**change).to(dtype)
    run, counter = compiled(network, "eager")
    forward(run)
    assert masked(counter) == [True] * 2
    assert all(reason in each for each in outcomes(slot, network))


@pytest.mark.slow
def test_compiled_code_does_not_outlive_a_change_of_the_choice(slot):
    network = model()
    run, counter = compiled(network, "eager")
    for choice, with_mask in {"auto": False, "attention=eager": True, "eager": True}.items():
        counter.graphs.clear()
        set_choice(choice)
        forward(run)
        forward(run)
        assert masked(counter) == [with_mask] * 2, choice
    set_choice("auto")
    forward(run)
    assert counter.frame_count == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dynamic", "checkpointed"),
    [
        (None, False),
        pytest.param(True, True, marks=pytest.mark.slow),
        pytest.param(True, False, marks=pytest.mark.slow),
        pytest.param(None, True, marks=pytest.mark.slow),
    ],
)
def test_lengths_that_change_are_compiled_once(slot, dynamic, checkpointed):
    network = model()
    if checkpointed:
        network.gradient_checkpointing_enable({"use_reentrant": False})
    run, counter = compiled(network, dynamic=dynamic)
    counts = []
    for length in (12, 17, 9, 30):
        ids = batch(length)
        expected = upstreams(network, ids=ids, use_cache=False)
        agree(results(network, run, ids, use_cache=False), expected)
        counts.append(counter.frame_count)
    assert counts[0 if dynamic else 1] == counts[-1] <= 2
    assert not any(masked(counter))


def test_layers_that_are_compiled_one_by_one_stay_with_upstream(slot):
    network = model()
    expected = upstreams(network, use_cache=False)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    for layer in network.model.layers:
        layer.compile(backend=counter, fullgraph=True)
    found = results(network, use_cache=False)
    assert all(masked(counter)) and outcomes(slot, network) == []
    agree(found, expected)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "strict", [True, *(pytest.param(each, marks=pytest.mark.slow) for each in (False, None))]
)
def test_an_exported_program_has_its_mask(slot, strict, monkeypatch):
    monkeypatch.setattr(flash, "_OPERATOR", lambda *given, **named: (2 * windowed(*given, **named)[0],))
    network = model().eval()
    if strict is None:
        program = torch._dynamo.export(network)(batch(), use_cache=False).graph_module
    else:
        program = torch.export.export(network, (batch(),), {"use_cache": False}, strict=strict).module()
    found = program(batch(), use_cache=False).logits
    with veomni_hook.use_kernels("eager"):
        torch.testing.assert_close(found, network(batch()).logits)


def written(mask):
    mask[0, 0, 3, 0] = True
    return mask


def written_through_a_view(mask):
    mask[0][0, 3].fill_(True)
    return mask


def read(mask):
    mask[0].to(torch.int32), torch.where(mask, 0.0, 1.0), mask.shape
    return mask


#: What compiled code does with a mask before attention, and what is known of it then.
USES = {
    "nothing": (lambda mask: mask, 3),
    "read": (read, 3),
    "written": (written, None),
    "written through a view": (written_through_a_view, None),
    "inverted in place": (lambda mask: mask.logical_not_(), None),
    "inverted": (lambda mask: torch.logical_not(mask, out=mask), None),
    "combined in place": (lambda mask: mask.__iand__(torch.tensor(False)), None),
    "a part": (lambda mask: mask[:1], None),
    "a copy": (lambda mask: mask.clone(), None),
    "an unknown use": (lambda mask: (mask, torch.ops.aten.alias(mask).fill_(True))[0], None),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("dynamic", [pytest.param(True, marks=pytest.mark.slow), False])
def test_a_mask_that_may_have_changed_is_unknown(slot, use, dynamic):
    change, known = USES[use]
    seen = []
    create = getattr(masking_utils, CREATE)
    names = inspect.signature(create).parameters
    config = MistralConfig(sliding_window=3, attn_implementation="sdpa")

    def attention(query):
        length = query.shape[2]
        offered = {
            "config": config, "attention_mask": None, "past_key_values": None, "cache": None,
            "cache_position": torch.arange(length), "inputs_embeds": query[:, 0],
        }  # fmt: skip
        mask = change(create(**{name: value for name, value in offered.items() if name in names}))
        seen.append(traced_masks.keys_seen(mask, query))
        return query + 1, mask

    run = torch.compile(attention, backend="eager", fullgraph=True, dynamic=dynamic)
    run(torch.zeros(1, 4, 9, 8))
    assert seen == [known]
    del seen[:]
    with veomni_hook.use_kernels("eager"):
        assert torch.equal(run(torch.zeros(1, 4, 9, 8))[1], attention_mask(change, 9))


def attention_mask(change, length):
    return change(window(length, 3)[None, None].clone())


@pytest.mark.parametrize(("write", "found"), [(False, 1), (True, 0)])
def test_a_mask_that_is_written_to_inside_a_checkpoint(write, found):
    def attention(query):
        mask = torch.ones(query.shape[2:3] * 2, dtype=torch.bool) & True
        mask = mask[None, None]
        traced_masks.note(mask, 3)

        def layer(query):
            if write:
                mask[0].fill_(False)
            return query + (0 if traced_masks.keys_seen(mask, query) is None else 1)

        return checkpoint(layer, query, use_reentrant=False)

    run = torch.compile(attention, backend="eager", fullgraph=True)
    assert torch.equal(run(torch.zeros(1, 4, 9, 8)), torch.full((1, 4, 9, 8), float(found)))


@pytest.mark.sample(1)
@pytest.mark.parametrize("compile_it", [False, True])
def test_masks_of_a_function_that_the_user_registered_are_unknown(slot, monkeypatch, compile_it):
    create = inspect.unwrap(getattr(masking_utils, CREATE))  # from 5.24 on, it is decorated
    functions = create.__globals__["ALL_MASK_ATTENTION_FUNCTIONS"]
    upstream = masking_utils.sdpa_mask

    def mine(*given, **named):
        mask = upstream(*given, **named)
        return mask if mask is None else mask | (torch.arange(mask.shape[-1]) == 0)

    for each in (functions, masking_utils.ALL_MASK_ATTENTION_FUNCTIONS):  # dynamo guards on the second
        monkeypatch.setitem(each._global_mapping, "sdpa", mine)
    network = model()
    run = compiled(network, "eager")[0] if compile_it else network
    found = results(network, run, use_cache=False)
    agree(found, upstreams(network, use_cache=False))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("export", [False, True])
def test_a_mask_is_known_for_its_queries_and_not_in_an_exported_program(export):
    seen = []

    def attention(query):
        mask = torch.ones(query.shape[2:3] * 2, dtype=torch.bool) & True
        mask = mask[None, None]
        traced_masks.note(mask, 3)
        seen.extend(traced_masks.keys_seen(mask, each) for each in (query, query[:, :, 1:]))
        return query + 1

    run = (
        torch._dynamo.export(attention)
        if export
        else torch.compile(attention, backend="eager", fullgraph=True)
    )
    run(torch.zeros(1, 4, 9, 8))
    assert seen == [None if export else 3, None]
