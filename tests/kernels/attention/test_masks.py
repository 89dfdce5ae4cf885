"""Which masks are known to be transformers' own, and their blocks."""

import gc
import sys
from types import SimpleNamespace

import pytest
import torch

from tests.kernels.attention.flexible import upstreams_mask
from veomni_hook.kernels.attention import masks
from veomni_hook.kernels.attention.masks import BLOCK, known, watch


def test_a_mask_is_known_by_identity():
    mask = upstreams_mask(1, 9)
    assert known(mask).is_unchanged()
    for other in (mask.clone(), mask[:, :, :, :], mask.to(torch.bfloat16), mask.expand(2, 1, 9, 9)):
        assert known(other) is None


def test_a_mask_that_was_written_to_is_not_trusted():
    mask = upstreams_mask(1, 9)
    mask[0, 0, 3, 3] = 0.5
    assert not known(mask).is_unchanged()


def test_masks_of_inference_mode_are_unknown_because_they_have_no_version():
    with torch.inference_mode():
        assert known(upstreams_mask(1, 9)) is None


def test_a_deleted_mask_is_forgotten():
    gc.collect()
    before = len(masks._KNOWN)
    made = [upstreams_mask(1, 9) for _ in range(5)]
    assert len(masks._KNOWN) == before + 5
    del made
    gc.collect()
    assert len(masks._KNOWN) == before


def test_blocks_do_not_keep_the_mask():
    mask = upstreams_mask(1, 9)
    known(mask).blocks(uniform=False)
    held = known(mask).dense
    del mask
    gc.collect()
    assert held() is None


def test_masks_are_watched_once_and_upstreams_are_returned():
    upstream = sys.modules["transformers.masking_utils"]
    watch()
    functions = upstream.ALL_MASK_ATTENTION_FUNCTIONS
    watching = functions["eager"]
    watch()
    assert functions["eager"] is watching
    assert watching.__wrapped__ is upstream.eager_mask
    assert functions["sdpa"] is upstream.sdpa_mask


def test_nothing_is_remembered_while_compiling(monkeypatch):
    known_names = {"eager": lambda length: torch.zeros(1, 1, length, length)}
    functions = SimpleNamespace(_global_mapping=known_names, register=known_names.__setitem__)
    module = SimpleNamespace(ALL_MASK_ATTENTION_FUNCTIONS=functions)
    monkeypatch.setitem(sys.modules, "transformers.masking_utils", module)
    watch()
    eager_mask = known_names["eager"]
    assert known(mask := eager_mask(9)).dense() is mask
    before = len(masks._KNOWN)
    made = torch.compile(lambda x: (x + 1, eager_mask(9)), backend="eager", fullgraph=True)(torch.zeros(1))[1]
    assert len(masks._KNOWN) == before
    assert known(made) is None


def test_the_blocks_are_computed_once():
    found = known(mask := upstreams_mask(1, 9))
    assert found.blocks(uniform=False) is found.blocks(uniform=False)
    assert found.blocks(uniform=False) is not found.blocks(uniform=True)
    assert mask is found.dense()


PADDED = torch.tensor([[0] * 150 + [1] * 250, [1] * 390 + [0] * 10])


@pytest.mark.parametrize("length", [9, 128, 400])
@pytest.mark.parametrize("how", [{}, {"window": 130}, {"attention_mask": PADDED}])
@pytest.mark.parametrize("uniform", [False, True])
def test_blocks_are_those_of_the_mask(length, how, uniform):
    if "attention_mask" in how:
        length = 400
    mask = upstreams_mask(2, length, **how)
    blocks = known(mask).blocks(uniform=uniform)
    visible = mask == 0
    sees = visible.any(-1)
    assert torch.equal(blocks.sees, sees[:, 0].float())
    if uniform:
        visible = visible | ~sees[..., None]
    assert blocks.mask.seq_lengths == (length, length)
    for row in range(2):
        for query in range(0, length, BLOCK):
            partial, full = set(), set()
            for key in range(0, length, BLOCK):
                part = visible[row, 0, query : query + BLOCK, key : key + BLOCK]
                if part.all() and part.numel() == BLOCK * BLOCK:
                    full.add(key // BLOCK)
                elif part.any():
                    partial.add(key // BLOCK)
            held = blocks.mask
            place = (row, 0, query // BLOCK)
            assert set(held.kv_indices[place][: held.kv_num_blocks[place]].tolist()) == partial
            assert set(held.full_kv_indices[place][: held.full_kv_num_blocks[place]].tolist()) == full
    read = torch.tensor([[blocks.mask.mask_mod(1, 0, q, k) for k in range(5)] for q in range(5)])
    assert torch.equal(read, visible[1, 0, :5, :5])
