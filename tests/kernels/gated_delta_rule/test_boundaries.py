"""Where the samples of a row begin: by the positions that a model is given."""

import pytest
import torch
from torch import nn

from veomni_hook.errors import SamplesError
from veomni_hook.kernels.gated_delta_rule.boundaries import found


class Cache:
    def __init__(self, length):
        self.length = length

    def get_seq_length(self):
        return self.length


def ends(position_ids, mask=None, cache=None, rows=1):
    position_ids = torch.tensor(position_ids)
    mask = None if mask is None else torch.tensor(mask)
    inputs = torch.zeros(rows, position_ids.shape[-1], dtype=torch.long)
    kwargs = {"use_cache": False}
    given = found(nn.Module(), kwargs, position_ids, mask, cache, inputs, None)
    assert kwargs == {"use_cache": False}
    return given["cu_seq_lens_q"].tolist() if given is not kwargs else None


@pytest.mark.parametrize(
    ("position_ids", "expected"),
    [
        ([[0, 1, 2, 3]], None),
        ([[7, 8, 9, 10]], None),
        ([[0, 1, 0, 1]], [0, 2, 4]),
        ([[0, 0, 0, 1]], [0, 1, 2, 4]),  # samples of one position
        ([[0, 1, 5, 6]], [0, 2, 4]),  # as for transformers' masks
        ([[3, 4, 3, 4]], [0, 2, 4]),
    ],
)
def test_a_sample_begins_where_positions_do_not_count_on(position_ids, expected):
    assert ends(position_ids) == expected


def test_every_row_has_its_samples():
    assert ends([[0, 1, 2, 3], [0, 1, 0, 1]], rows=2) == [0, 4, 6, 8]
    assert ends([[0, 1, 0, 1]], rows=2) == [0, 2, 4, 6, 8]


@pytest.mark.parametrize(
    ("position_ids", "mask", "expected"),
    [
        ([[1, 1, 0, 1, 2]], [[0, 0, 1, 1, 1]], None),  # padding on the left
        ([[0, 1, 2, 1, 1]], [[1, 1, 1, 0, 0]], None),  # and on the right
        ([[1, 0, 1, 0, 1]], [[0, 1, 1, 1, 1]], [0, 3, 5]),
        ([[0, 1, 0, 1, 1]], [[1, 1, 1, 1, 0]], [0, 2, 5]),
        ([[0, 1, 0, 1, 2]], [[1, 1, 1, 1, 1, 1, 1]], [0, 2, 5]),
        ([[0, 1, 2, 1, 3]], [[1, 1, 1, 0, 1]], None),  # a hole, as `generate` numbers it
        ([[0, 1, 2, 3, 4]], [[1, 1, 0, 0, 1]], None),  # and where all positions are numbered
        ([[1, 0, 1, 1, 2, 0]], [[0, 1, 1, 0, 1, 1]], [0, 5, 6]),
        ([[0, 1, 0, 0, 1]], [[1, 1, 0, 1, 1]], [0, 3, 5]),  # padding between samples
        ([[0, 1, 0, 3, 4]], [[1, 1, 0, 1, 1]], [0, 3, 5]),
    ],
)
def test_padding_is_no_sample(position_ids, mask, expected):
    assert ends(position_ids, mask) == expected


def test_positions_of_images():
    """Text of two, an image of 2 x 2, text; then a sample that begins with an image."""
    time = [0, 1, 2, 2, 2, 2, 4, 0, 0, 0, 0, 2]
    height = [0, 1, 2, 2, 3, 3, 4, 0, 0, 1, 1, 2]
    width = [0, 1, 2, 3, 2, 3, 4, 0, 1, 0, 1, 2]
    three = [[time], [height], [width]]
    assert ends(three) == [0, 7, 12]
    assert ends([[each[0][:7]] for each in three]) is None
    text = [[[*range(7), *range(5)]], *three]
    assert ends(text) == [0, 7, 12]
    assert ends([[[*range(12)]], *three]) is None
    kept = [[1, 1, 0, *[1] * 9]]
    assert ends([[[0, 1, 9, *axis[0][3:]]] for axis in three], kept) == [0, 7, 12]


def test_text_that_counts_from_below_0_is_one_sample():
    """transformers 5.2 adds what the images of the batch before saved to positions of text."""
    first, second = [-2, -1, 0, 1, 2], [-2, -2, -2, -1, 0]
    mask = [[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]]
    assert ends([[first, second]] * 3, mask, rows=2) is None
    assert ends([[[-1, 0, 1, -1, 0]]] * 3) == [0, 3, 5]


def test_a_sample_of_one_position_in_three_rows():
    assert ends([[[0, 0, 1]], [[0, 0, 1]], [[0, 0, 1]]]) == [0, 1, 3]


def test_a_cache_that_holds_positions_goes_on():
    assert ends([[0, 1, 0, 1]], cache=Cache(4)) is None
    assert ends([[0, 1, 0, 1]], cache=Cache(0)) == [0, 2, 4]


def test_given_boundaries_stay():
    inputs, owner, packed = torch.zeros(1, 4, 8), nn.Module(), torch.tensor([[0, 1, 0, 1]])
    for name, bounds in (("cu_seq_lens_q", [0, 1, 4]), ("seq_idx", [[0, 0, 0, 1]])):
        kwargs = {name: torch.tensor(bounds)}
        given = found(owner, kwargs, packed, None, None, inputs, None)
        assert given == kwargs and given[name] is kwargs[name]
    kwargs = {"cu_seq_lens_q": None}
    given = found(owner, kwargs, packed, None, None, inputs, None)
    assert given["cu_seq_lens_q"].tolist() == [0, 2, 4]
    assert found(owner, {}, None, None, None, inputs, None) == {}
    assert found(owner, {}, torch.tensor([[0, 0]]), None, None, None, None) == {}


def test_boundaries_that_are_no_tensor_are_an_error():
    for name in ("cu_seq_lens_q", "seq_idx"):
        with pytest.raises(SamplesError, match="the boundaries are a list") as caught:
            found(nn.Module(), {name: [0, 2, 4]}, None, None, None, torch.zeros(1, 4, 8), None)
        assert caught.value.where == name and caught.value.fix == "pass a tensor of integers"


def test_compiled_code_asserts_that_a_row_is_one_sample():
    owner = nn.Module()

    @torch.compile(backend="eager", fullgraph=True)
    def compiled(position_ids, mask):
        kwargs = found(owner, {}, position_ids, mask, None, position_ids, None)
        return len(kwargs) + position_ids

    for mask in (None, torch.ones(1, 4)):
        assert torch.equal(compiled(torch.arange(4)[None], mask), torch.arange(4)[None])
        with pytest.raises(RuntimeError, match="compiled code of Module cannot keep apart"):
            compiled(torch.tensor([[0, 1, 0, 1]]), mask)
    for positions, mask in (([1, 1, 0, 1], [0, 0, 1, 1]), ([0, 1, 7, 2], [1, 1, 0, 1])):
        compiled(torch.tensor([positions]), torch.tensor([mask]))
