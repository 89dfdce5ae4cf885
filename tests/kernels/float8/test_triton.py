"""The casts to float8: through the interpreter on a CPU, compiled on a GPU.

The interpreter does not round to float8, so its rows are made of numbers of the format times their scale.
"""

import pytest
import torch

from tests.kernels.matching import DEVICE
from veomni_hook.kernels.float8 import reference

pytest.importorskip("triton")

from veomni_hook.kernels.float8 import triton as kernels

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 16), (7, 48), (130, 64), (3, 20000), (200, 144)]


def exact(shape, dtype):
    """Rows of normal numbers of the format, times powers of two."""
    torch.manual_seed(0)
    q = torch.randn(shape).to(reference.FLOAT8).float()
    q = torch.where(q.abs() < 2**-5, 0.5, q)
    q[:, 0] = 448
    q[::2, 0] = 480  # beyond the format: the scale is 2
    rows = 2.0 ** torch.randint(-8, 4, (shape[0], 1))
    return (q * rows).to(DEVICE, dtype)


def assert_same(found, expected):
    (q, scale), (other, of_other) = found, expected
    assert torch.equal(scale.nan_to_num(-1), of_other.nan_to_num(-1))
    assert q.is_contiguous() and q.dtype is reference.FLOAT8
    rows = scale.isfinite()[:, 0]
    assert torch.equal(q.float()[rows], other.float()[rows])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_and_columns_are_those_of_the_definition(shape, dtype):
    x = exact(shape, dtype)
    assert_same(kernels.quantised(x), reference.quantised(x))
    columns = x.t().contiguous()
    assert_same(kernels.quantised_columns(columns), reference.quantised(x))


def test_rows_that_are_not_finite_have_no_scale():
    x = exact((8, 48), torch.float32)
    x[1, 7], x[2, 3], x[3, 40], x[4] = torch.inf, torch.nan, -torch.inf, 0
    for found in (kernels.quantised(x), kernels.quantised_columns(x.t().contiguous())):
        assert found[1].isnan()[:, 0].tolist() == [number in {1, 2, 3} for number in range(8)]
        assert found[1][4] == 2.0**-108
        assert_same(found, reference.quantised(x))


def test_numbers_of_tokens_share_their_launches():
    """Triton specialises a number on being 1 and on being a multiple of 16: others take the normal launch once."""
    kernels._of_columns.cache_clear()
    kernels._turn.cache_clear()
    for rows in (32, 48, 160, 33, 7):
        x = torch.randint(1, 9, (rows, 64), device=DEVICE).bfloat16()
        factors = 2.0 ** torch.randint(0, 2, (rows, 1), device=DEVICE)
        found = kernels.quantised_columns(x, factors)
        assert_same(found, reference.quantised((x * factors).t()))
        q, _ = kernels.quantised(x)
        assert torch.equal(kernels.turned(q).float(), q.float().t())
    assert kernels._of_columns.cache_info().currsize == kernels._turn.cache_info().currsize == 2


def test_strides_and_nothing():
    x = exact((24, 96), torch.bfloat16)
    assert_same(kernels.quantised(x[::2, :48]), reference.quantised(x[::2, :48]))
    assert_same(kernels.quantised(x.t().contiguous().t()), reference.quantised(x))
    assert_same(kernels.quantised_columns(x[::2].t()), reference.quantised(x[::2]))
    for shape in ((0, 48), (48, 0)):
        assert kernels.quantised(x.new_empty(shape))[0].shape == shape
        assert kernels.quantised_columns(x.new_empty(shape))[0].shape == shape[::-1]


@pytest.mark.skipif(DEVICE == "cpu", reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rounding_is_that_of_torch(dtype):
    x = torch.randn(512, 2048, device=DEVICE).to(dtype)
    assert_same(kernels.quantised(x), reference.quantised(x))
    assert_same(kernels.quantised_columns(x), reference.quantised(x.t()))


@pytest.mark.skipif(DEVICE == "cpu", reason="needs an NVIDIA GPU")
def test_a_layer_on_a_gpu_is_that_on_a_cpu():
    from veomni_hook.kernels.float8.linear import float8_linear

    x, w, bias, dy = (torch.randn(shape) for shape in ((96, 256), (512, 256), (512,), (96, 512)))
    results = []
    for device in ("cpu", DEVICE):
        leaves = [tensor.to(device, torch.bfloat16, copy=True).requires_grad_() for tensor in (x, w, bias)]
        y = float8_linear(*leaves)
        y.backward(dy.to(device, torch.bfloat16))
        results.append([tensor.double().cpu() for tensor in (y, *(leaf.grad for leaf in leaves))])
    for one, other in zip(*results, strict=True):
        assert (one - other).norm() < 1e-2 * other.norm()
