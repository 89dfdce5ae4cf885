"""Pairs of queries and keys by torch's flash attention on a GPU, against their formula in float32."""

import pytest
import torch

from veomni_hook.parallel import fused_pairs
from veomni_hook.parallel.partial_attention import Formula, Results, add_gradients, attend, empty, merge
from veomni_hook.parallel.ring_pairs import Pair

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
LENGTH = 300
#: A block that is seen in full, and the process's own.
PAIRS = (Pair((0, LENGTH), (0, LENGTH)), Pair((0, LENGTH), (LENGTH, LENGTH), triangle=True))


def attended(operands, upward, formula):
    query, key, value = operands
    sums = empty(query, value.shape[3])
    for pair in PAIRS:
        keys, values = (x.narrow(2, *pair.keys) for x in (key, value))
        merge(sums, pair.queries, attend(query, keys, values, pair, formula))
    output = (sums.output / sums.total).to(query.dtype)
    along = (upward.to(sums.total) * output).sum(3, keepdim=True)
    results = Results(sums.largest, sums.total, output, upward.to(sums.total), along)
    gradients = [torch.zeros_like(x, dtype=torch.float32) for x in operands]
    for pair in PAIRS:
        of_pair = [x.narrow(2, *pair.keys) for x in (key, value, *gradients[1:])]
        add_gradients((query, *of_pair[:2]), pair, formula, results, (gradients[0], *of_pair[2:]))
    return output, *gradients


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("width", [64, 128, 256])
def test_outputs_and_gradients(monkeypatch, width, dtype):
    torch.manual_seed(0)
    query = torch.randn(2, 8, LENGTH, width, device="cuda", dtype=dtype)
    # As they travel: in one block, of fewer heads.
    block = torch.randn(2, 2, 2 * LENGTH, 2 * width, device="cuda", dtype=dtype)
    operands = query, block[..., :width], block[..., width:]
    upward = torch.randn_like(query)
    assert fused_pairs.fits(query, operands[2])
    found = attended(operands, upward, Formula(0.1))
    monkeypatch.setattr(fused_pairs, "fits", lambda *_: False)
    exact = [x.float() for x in operands]
    for one, other in zip(found, attended(exact, upward.float(), Formula(0.1)), strict=True):
        assert (one.float() - other).norm() / other.norm() < 1e-2
