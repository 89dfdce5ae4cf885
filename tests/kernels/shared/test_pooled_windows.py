"""Attention to keys that are pooled from windows of positions: samples that share a row are those that are alone."""

import importlib

import pytest
import torch
from torch import nn
from transformers import DynamicCache

from tests.kernels.matching import close, grads_of
from tests.kernels.patched_qwen3 import load
from tests.veomni.configurations import CONFIGURATIONS, VOCABULARY
from veomni_hook.errors import SamplesError
from veomni_hook.kernels.selection.process_choice import set_active

FAMILY = "deepseek_v4"
#: Windows are of 2 positions in one layer and of 4 in another; the first rows' samples fill none of 4.
ROWS = {
    "short": [[3, 1, 2, 3]],
    "uneven": [[7, 9]],
    "many": [[1, 7, 9, 3, 1, 2, 12]],
    "two rows": [[5, 7], [9, 1, 2]],
    "a row without keys": [[1, 1, 1], [3]],
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Upstream's model and the patched one, with equal weights."""
    name = f"transformers.models.{FAMILY}"
    home = pytest.importorskip(f"{name}.modeling_{FAMILY}")
    patched = load(tmp_path_factory.mktemp(FAMILY), home.__name__)
    _, config, sizes = CONFIGURATIONS[FAMILY]
    config = getattr(importlib.import_module(f"{name}.configuration_{FAMILY}"), config)
    config = config(**{**sizes, "output_router_logits": False})
    torch.manual_seed(0)
    theirs, ours = (each.DeepseekV4ForCausalLM(config).train() for each in (home, patched))
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, 0.0, 0.2)
    table = theirs.model.layers[0].mlp.gate.tid2eid
    table.copy_(torch.rand(len(table), 4).argsort(1)[:, : table.shape[1]])
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def ids(rows, positions):
    torch.manual_seed(1)
    return torch.randint(3, VOCABULARY, (rows, positions))


def counted(lengths):
    return torch.stack([torch.cat([torch.arange(length) for length in row]) for row in lengths])


def step(model, calls, weights):
    """Logits of calls as one list of positions, and the gradients of a weighted sum."""
    model.zero_grad()
    logits = torch.cat([model(use_cache=False, **call).logits.flatten(0, 1) for call in calls])
    (logits * weights).sum().backward()
    return logits.detach(), {name: each.clone() for name, each in grads_of(model).items()}


def agree(found, expected, tolerance=2e-5):
    close(found[0], expected[0], tolerance)
    # Sums that cancel, in float32: 2.2e-4 on one processor. A leak changes logits by 1e-2.
    close(found[1], expected[1], 50 * tolerance)


@pytest.mark.parametrize("lengths", ROWS.values(), ids=ROWS)
def test_packed_samples_are_separate_ones(pair, lengths):
    theirs, ours = pair
    rows, positions = ids(len(lengths), sum(lengths[0])), counted(lengths)
    alone = [
        {"input_ids": part}
        for row, own in zip(rows, lengths, strict=True)
        for part in row[None].split(own, 1)
    ]
    weights = torch.randn(rows.numel(), VOCABULARY)
    expected = step(theirs, alone, weights)
    call = {"input_ids": rows, "position_ids": positions}
    agree(step(ours, [call], weights), expected)
    ends = torch.tensor([0, *(length for row in lengths for length in row)]).cumsum(0)
    agree(step(ours, [call | {"cu_seq_lens_q": ends}], weights), expected)
    if lengths == ROWS["uneven"]:
        leaked = step(theirs, [call], weights)[0]
        assert (leaked - expected[0]).abs().max() > 0.01 * expected[0].abs().max()


def test_checkpoints_and_compiled_layers_keep_samples_apart(pair):
    _, ours = pair
    rows = ids(1, 16)
    call = {"input_ids": rows, "position_ids": counted([[7, 9]])}
    weights = torch.randn(16, VOCABULARY)
    expected = step(ours, [call], weights)
    ours.gradient_checkpointing_enable()
    agree(step(ours, [call], weights), expected, 1e-6)
    ours.gradient_checkpointing_disable()
    # The layers leave the graph: boundaries are values.
    compiled = torch.compile(ours.model.layers[2].self_attn, backend="eager")
    given = arguments()
    close(compiled(**given)[0], ours.model.layers[2].self_attn(**given)[0], 1e-6)


def test_rows_of_one_sample_run_upstreams_code(pair):
    theirs, ours = pair
    rows, weights = ids(2, 9), torch.randn(18, VOCABULARY)
    expected = step(theirs, [{"input_ids": rows}], weights)
    agree(step(ours, [{"input_ids": rows}], weights), expected)
    agree(step(ours, [{"input_ids": rows, "cu_seq_lens_q": torch.tensor([0, 9, 18])}], weights), expected)
    found, generated = (
        model.eval().generate(rows, max_new_tokens=4, do_sample=False, use_cache=True)
        for model in (ours, theirs)
    )
    assert torch.equal(found, generated)


#: What cannot keep samples apart: further arguments, and the reason.
MIXED = {
    "a new cache": ({"use_cache": True}, "position_ids beside a cache"),
    "a cache that goes on": ({"use_cache": True, "cache": 3}, "they continue a cache"),
    "a mask of padding": ({"attention_mask": torch.ones(1, 16)}, "position_ids beside an attention_mask"),
    "no positions": (
        {"cu_seq_lens_q": torch.tensor([0, 7, 16]), "position_ids": None},
        "made of position_ids",
    ),
}


@pytest.mark.parametrize("case", MIXED)
def test_what_would_mix_samples_is_an_error(pair, case):
    more, reason = MIXED[case]
    _, ours = pair
    call = {"input_ids": ids(1, 16), "position_ids": counted([[7, 9]]), "use_cache": False} | more
    if call.pop("cache", 0):
        call["past_key_values"] = DynamicCache(config=ours.config)
        ours(ids(1, 3), past_key_values=call["past_key_values"], use_cache=True)
    with pytest.raises(SamplesError, match=reason):
        ours(**call)


def arguments(**more):
    """The arguments of a layer's attention, for two samples of 4 positions."""
    torch.manual_seed(3)
    return {
        "hidden_states": torch.randn(1, 8, 32),
        "position_embeddings": {"compress": (torch.randn(1, 8, 4), torch.randn(1, 8, 4))},
        "position_ids": counted([[4, 4]]),
        "attention_mask": torch.zeros(1, 1, 8, 8),
        "cu_seq_lens_q": torch.tensor([0, 4, 8]),
    } | more


def test_attention_refuses_what_it_cannot_separate(pair):
    _, ours = pair
    layer = ours.model.layers[2].self_attn
    for more, reason in (
        ({"attention_mask": None}, "its mask is a NoneType"),
        ({"cu_seq_lens_q": torch.tensor([0, 8, 16])}, "it has 8 of 16 positions"),
        ({"past_key_values": DynamicCache(config=ours.config)}, "a cache holds windows of the whole row"),
    ):
        with pytest.raises(SamplesError, match=reason) as caught:
            layer(**arguments(**more))
        assert caught.value.where == "DeepseekV4Attention (layer 2)"


def test_a_layer_that_loses_boundaries_is_an_error(pair, monkeypatch):
    _, ours = pair
    layer = ours.model.layers[1].self_attn
    own = layer.forward
    monkeypatch.setattr(layer, "forward", lambda *args, cu_seq_lens_q, **kwargs: own(*args, **kwargs))
    with pytest.raises(SamplesError, match="did not get their boundaries"):
        ours(input_ids=ids(1, 16), position_ids=counted([[7, 9]]), use_cache=False)


def test_a_process_without_the_hook_runs_upstreams_code(pair):
    theirs, ours = pair
    call = {"input_ids": ids(1, 16), "position_ids": counted([[7, 9]]), "use_cache": False}
    call["cu_seq_lens_q"] = torch.tensor([0, 7, 16])
    set_active(False)
    try:
        assert torch.equal(ours(**call).logits, theirs(**call).logits)
    finally:
        set_active(True)
