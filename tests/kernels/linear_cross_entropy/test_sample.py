import pytest
import torch

from veomni_hook.kernels.linear_cross_entropy.linear_call import differ, sample


@pytest.mark.parametrize(
    "shape", [(3, 5), (700, 512), (1 << 13, 96), (96, 1 << 13), (5, 1 << 17), (1 << 19, 1)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_row_and_column_is_looked_at(shape, dtype):
    weight = torch.randn(shape).to(dtype)
    taken = sample(weight, None)
    assert not differ(taken, weight.clone(), None)
    assert taken.weight.numel() <= max(1 << 18, 2 * max(shape))
    for row in {0, 1, shape[0] // 2, shape[0] - 1}:
        other = weight.clone()
        other[min(row, shape[0] - 1)] += 1
        assert differ(taken, other, None)
    for column in {0, shape[1] // 3, shape[1] - 1} if shape[0] >= shape[1] else ():
        other = weight.clone()
        other[:, column] += 1
        assert differ(taken, other, None)


def test_small_weights_are_compared_as_a_whole():
    weight = torch.zeros(61, 32)
    taken = sample(weight, None)
    weight.data[17, 11] = 1e-30
    assert differ(taken, weight, None)


def test_bias_dtype_shape_and_what_is_not_contiguous():
    weight, bias = torch.randn(40, 30), torch.randn(40)
    taken = sample(weight, bias)
    assert not differ(taken, weight, bias)
    assert differ(taken, weight, bias + 1)
    assert differ(taken, weight, None)
    assert differ(taken, weight.double(), bias)
    assert differ(taken, weight[:20], bias)
    big = torch.randn(600, 700).t()
    assert not differ(sample(big, None), big, None) and differ(sample(big, None), big * 2, None)


def test_numbers_that_are_none_are_equal_to_themselves():
    weight = torch.full((4, 4), torch.nan)
    assert not differ(sample(weight, None), weight, None)
