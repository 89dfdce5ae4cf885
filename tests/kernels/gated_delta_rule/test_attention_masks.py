"""Attention beside linear attention: where it would mix the samples of a row, the model raises an error."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from veomni_hook.errors import SamplesError
from veomni_hook.kernels.gated_delta_rule.boundaries import found, refuse

PACKED = torch.tensor([[0, 1, 0, 1, 2, 0]])
ENDS = torch.tensor([0, 2, 5, 6])
NUMBERS = torch.tensor([[0, 0, 1, 1, 1, 2]])
ONES = torch.ones(1, 6, dtype=torch.long)
BLOCKS = torch.block_diag(torch.ones(2, 2), torch.ones(3, 3), torch.ones(1, 1)).tril().bool()[None, None]
LENGTHS = {"cu_seq_lens_q": ENDS, "cu_seq_lens_k": ENDS, "max_length_q": 3, "max_length_k": 3}
MASKED = ("eager", "sdpa", "flex_attention")
FLASH = ("flash_attention_2", "kernels-community/flash-attn3")
BOTH = ["linear_attention", "full_attention"]


class Cache:
    def get_seq_length(self):
        return 0


def model(implementation="sdpa", kinds=BOTH, use_cache=True):
    owner = nn.Module()
    owner.config = SimpleNamespace(
        layer_types=kinds, _attn_implementation=implementation, use_cache=use_cache
    )
    return owner


def call(owner, position_ids=PACKED, mask=None, cache=None, use_cache=False, rows=1, **kwargs):
    return found(owner, kwargs, position_ids, mask, cache, torch.zeros(rows, 6, 8), use_cache)


def error(owner, **given):
    with pytest.raises(SamplesError, match=r"samples share a row, and .* does not keep them apart") as caught:
        call(owner, **given)
    assert caught.value.where == "Module"
    return f"{caught.value.what}; {caught.value.fix}"


@pytest.mark.parametrize("implementation", MASKED)
def test_masks_keep_samples_apart_that_positions_show(implementation):
    owner = model(implementation)
    for given in ({}, {"cu_seq_lens_q": ENDS}, {"seq_idx": NUMBERS}, LENGTHS):
        call(owner, **given)
        call(owner, position_ids=torch.stack([PACKED] * 4), **given)
    call(owner, rows=2, cu_seq_lens_q=torch.tensor([0, 2, 5, 6, 8, 11, 12]))


@pytest.mark.parametrize("given", [{"cu_seq_lens_q": ENDS}, {"seq_idx": NUMBERS}, LENGTHS])
@pytest.mark.parametrize("implementation", MASKED)
def test_boundaries_that_positions_do_not_show_are_an_error(implementation, given):
    owner = model(implementation)
    assert "which were not passed; pass position_ids" in error(owner, position_ids=None, **given)
    assert "count on where a sample begins" in error(owner, position_ids=torch.arange(6)[None], **given)
    some = torch.tensor([[0, 1, 0, 1, 2, 3]])
    assert "count on where a sample begins" in error(owner, position_ids=some, **given)
    assert "four rows, those of text" in error(owner, position_ids=torch.stack([PACKED] * 3), **given)
    assert "four rows, those of text" in error(owner, position_ids=torch.stack([PACKED] * 3))


@pytest.mark.parametrize("given", [{}, {"cu_seq_lens_q": ENDS}, {"seq_idx": NUMBERS}])
def test_a_cache_hides_samples_from_masks(given):
    for use_cache, cache in ((True, None), (None, None), (False, Cache())):
        assert "beside a cache; pass use_cache=False" in error(
            model(), use_cache=use_cache, cache=cache, **given
        )
    call(model(use_cache=False), use_cache=None, **given)


@pytest.mark.parametrize("given", [{}, {"cu_seq_lens_q": ENDS}, {"seq_idx": NUMBERS}])
def test_a_mask_hides_samples_from_masks(given):
    padded = ONES.clone()
    padded[:, 5:] = 0
    for mask in (ONES, padded, {"full_attention": None, "linear_attention": ONES}, {"full_attention": ONES}):
        assert "beside an attention_mask; leave attention_mask out" in error(model(), mask=mask, **given)
    for mask in (BLOCKS, {"full_attention": BLOCKS, "conv": None}):
        call(model(), mask=mask, use_cache=True, **given)


@pytest.mark.parametrize("implementation", FLASH)
def test_flash_attention_takes_lengths_or_positions_of_one_row(implementation):
    owner = model(implementation)
    padded = torch.tensor([[1, 1, 1, 1, 1, 0]])
    two = torch.tensor([0, 2, 5, 6, 8, 11, 12])
    for given in ({}, LENGTHS, {"seq_idx": NUMBERS}, {"mask": ONES}, {"use_cache": True}):
        call(owner, **given)
    call(owner, position_ids=None, **LENGTHS)
    call(owner, rows=2, **{**LENGTHS, "cu_seq_lens_q": two})
    for given in ({"cu_seq_lens_q": ENDS}, {**LENGTHS, "max_length_k": None}):
        assert "max_length_q and max_length_k" in error(owner, position_ids=None, **given)
    assert "pass cu_seq_lens_q, cu_seq_lens_k" in error(owner, rows=2)
    assert "where each begins with 0" in error(owner, position_ids=PACKED + 3)
    assert "takes precedence over boundaries; leave" in error(owner, mask=padded, **LENGTHS)


@pytest.mark.parametrize("implementation", [*MASKED, *FLASH])
def test_attention_without_masks_of_positions_mixes_samples(implementation):
    def without(owner, **kwargs):
        return found(owner, kwargs, PACKED, None, None, torch.zeros(1, 6, 8), False, masks_positions=False)

    for given in ({}, LENGTHS):
        with pytest.raises(SamplesError, match="no positions reach it") as caught:
            without(model(implementation), **given)
        assert caught.value.fix == "pass one sample a row"
    without(model(implementation, kinds=["linear_attention"]))


def test_attention_that_cannot_leak_is_not_checked():
    mixes = {"position_ids": None, "cu_seq_lens_q": ENDS, "use_cache": True, "mask": ONES}
    for owner in (nn.Module(), model(kinds=["linear_attention", "conv"]), model("my_attention")):
        assert call(owner, **mixes)["cu_seq_lens_q"] is ENDS
    one = {**mixes, "cu_seq_lens_q": torch.tensor([0, 6])}
    assert call(model(), **one)["cu_seq_lens_q"] is one["cu_seq_lens_q"]


def test_compiled_code_checks_the_boundaries_that_it_was_given():
    owner = model()

    @torch.compile(backend="eager")
    def compiled(position_ids, ends):
        return len(found(owner, {"cu_seq_lens_q": ends}, position_ids, None, None, PACKED, False)) + ends

    assert torch.equal(compiled(PACKED, ENDS), ENDS + 1)
    with pytest.raises(SamplesError, match="which were not passed"):
        compiled(None, ENDS)


def test_models_that_packages_keep_apart_are_checked_as_well():
    given = (PACKED, None, None, torch.zeros(1, 6, 8))
    refuse(model(), {"seq_idx": NUMBERS}, *given, False, ())
    with pytest.raises(SamplesError, match="beside a cache"):
        refuse(model(), {"seq_idx": NUMBERS}, *given, True, ())
