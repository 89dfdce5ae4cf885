"""Sums of rows at given places: through the interpreter on a CPU (conftest sets it up), compiled on a GPU."""

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels.matching import DEVICE
from veomni_hook.kernels.moe_experts.triton_sums import sum_places
from veomni_hook.parallel.expert_copies import copies_of


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("by_place", [True, False])
@pytest.mark.parametrize(("rows", "places", "columns"), [(9, 2, 33), (5, 7, 16), (1, 1, 8), (4, 12, 20)])
def test_sums_of_copies(rows, places, columns, by_place, dtype):
    torch.manual_seed(0)
    wanted = torch.rand(rows, places, device=DEVICE) < 0.6
    wanted[0] = False
    count = int(wanted.sum())
    copies = copies_of(wanted, by_place=by_place).first(count)
    assert copies.sources.shape == (count,)
    assert torch.equal((copies.places < count).to(wanted.dtype), wanted)
    values = torch.randn(count, columns, device=DEVICE).to(dtype)
    expected = torch.zeros(rows, columns, device=DEVICE).index_add(0, copies.sources, values.float())
    torch.testing.assert_close(sum_places(values, copies.places), expected.to(dtype))


def test_no_copies_and_no_rows():
    places = torch.zeros(3, 2, dtype=torch.int32, device=DEVICE)
    assert sum_places(torch.empty(0, 8, device=DEVICE), places).tolist() == [[0.0] * 8] * 3
    assert sum_places(torch.empty(0, 8, device=DEVICE), places[:0]).shape == (0, 8)
