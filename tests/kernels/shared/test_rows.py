"""Tensors as rows."""

import pytest
import torch

from veomni_hook.kernels.shared.rows import contiguous_strides, readable, rows_at, rows_of

X = torch.arange(4 * 6 * 8 * 10).view(4, 6, 8, 10)


def test_what_collapses_is_one_step():
    assert rows_of(X) == (1, 1, 10, 0, 0)
    assert rows_of(X[:, :, 0]) == (1, 1, 80, 0, 0)
    assert rows_of(X[:0]) == (1, 1, 10, 0, 0)
    assert rows_of(X.transpose(1, 2)) == (8, 6, 480, 10, 80)
    assert rows_of(X[0, 0, 0]) == rows_of(X[0, 0, :1]) == (1, 1, 10, 0, 0)


@pytest.mark.parametrize(
    "x",
    [X, X.transpose(1, 2), X[..., 2:5], X[:, ::2], X[1:2], X[:, 0], X.permute(2, 1, 0, 3), X[0, 0, 0], X[:1].expand(3, 6, 8, 10)],
    ids=lambda x: f"{tuple(x.shape)} {x.stride()}",
)  # fmt: skip
def test_every_row_is_where_it_is_said_to_be(x):
    rows = rows_of(x)
    assert rows is not None
    n1, n2, s0, s1, s2 = rows
    base = X.view(-1)[x.storage_offset() :]
    flat = x.reshape(-1, x.shape[-1])
    for number, row in enumerate(flat):
        begin = number // n2 // n1 * s0 + number // n2 % n1 * s1 + number % n2 * s2
        assert torch.equal(base[begin : begin + len(row)], row)


@pytest.mark.parametrize(
    "x",
    [X.transpose(2, 3), torch.zeros(2, 3, 4, 5, 6).permute(3, 1, 0, 2, 4)],
    ids=["columns apart", "four steps"],
)
def test_what_cannot_be_said_is_copied(x):
    assert rows_of(x) is None
    copied, rows = readable(x)
    assert copied.is_contiguous() and torch.equal(copied, x)
    assert rows == (1, 1, x.shape[-1], 0, 0)


def test_what_can_be_said_is_not_copied():
    assert readable(X.transpose(1, 2))[0].data_ptr() == X.data_ptr()


@pytest.mark.parametrize(
    "x",
    [X, X.transpose(1, 2), X[:0], X[:, :1], X[:1], X[0, 0, 0], X[:, :0], torch.ones(1, 4).t(), torch.ones(1, 1).expand(1, 1)],
    ids=lambda x: f"{tuple(x.shape)} {x.stride()}",
)  # fmt: skip
def test_shapes_and_strides_say_what_the_tensor_says(x):
    assert rows_at(x.shape, x.stride()) == rows_of(x)
    assert (rows_at(x.shape, x.stride()) == (1, 1, x.shape[-1], 0, 0)) >= x.is_contiguous()
    assert contiguous_strides(x.shape) == torch.empty(x.shape).stride()
