"""Boundaries of samples that share rows: from lengths, and from the number of each position's sample."""

import pytest
import torch

from veomni_hook.errors import SamplesError
from veomni_hook.kernels.shared.samples import ends_of, indices_of, last_of_rows, of_rows


def ends(*given, **named):
    found = of_rows(*given, **named)
    return None if found is None else [*ends_of(found)]


@pytest.mark.parametrize(
    ("cu_seqlens", "expected"),
    [
        ([0, 3, 10], [0, 3, 5, 10]),  # the end of a row ends a sample
        ([0, 3, 3, 5, 10], [0, 3, 5, 10]),  # no sample is empty
        ([0, 5, 10], None),
        ([0, 10], None),
    ],
)
def test_boundaries_divide_every_row(cu_seqlens, expected):
    assert ends(2, 5, torch.tensor(cu_seqlens), None) == expected


@pytest.mark.parametrize("cu_seqlens", [[0, 4, 3, 10], [0, 11], [-1, 10], [0, 7], [3], []])
def test_boundaries_that_do_not_fit_raise(cu_seqlens):
    with pytest.raises(SamplesError, match="boundaries"):
        of_rows(2, 5, torch.tensor(cu_seqlens), None)
    with pytest.raises(SamplesError, match=r"are \[1, 10\], the batch is \[2, 5\]"):
        of_rows(2, 5, None, torch.zeros(1, 10))


def test_a_sample_begins_where_its_number_changes():
    numbers = torch.tensor([[7, 7, 2, 2, 7], [7, 7, 7, 7, 7]])
    assert ends(2, 5, None, numbers) == [0, 2, 4, 5, 10]


def test_lengths_come_before_numbers_and_neither_means_rows():
    assert ends(1, 4, torch.tensor([0, 1, 4]), torch.tensor([[0, 0, 1, 1]])) == [0, 1, 4]
    assert of_rows(1, 4, None, None) is None


def test_boundaries_are_found_once_for_a_tensor():
    given = torch.tensor([0, 1, 4])
    first = of_rows(1, 4, given, None)
    assert of_rows(1, 4, given, None) is first and first.dtype == torch.int32
    given[1] = 2
    assert ends(1, 4, given, None) == [0, 2, 4]


def test_what_follows_from_boundaries():
    bounds = torch.tensor([0, 2, 5, 6, 10])
    assert indices_of(bounds, 2).tolist() == [[0, 0, 1, 1, 1], [2, 3, 3, 3, 3]]
    assert indices_of(bounds, 2).dtype == torch.int32
    assert last_of_rows(bounds, 2) == [1, 3]
