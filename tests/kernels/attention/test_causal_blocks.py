"""The blocks of a causal mask, beside the dense mask."""

import pytest
import torch

from tests.kernels.attention.windows_on_a_cpu import window
from veomni_hook.kernels.attention.causal_blocks import causal_blocks

BLOCK = 128


@pytest.mark.sample(14)
@pytest.mark.parametrize("length", [2, 127, 128, 129, 512, 700])
@pytest.mark.parametrize("keys", [0, 1, 2, 100, 127, 128, 129, 130, 255, 256, 257, 300, 384, 1000])
def test_blocks_are_those_of_the_mask(length, keys):
    blocks = causal_blocks(length, keys, torch.device("cpu"))
    visible = window(length, keys or length)
    assert blocks.seq_lengths == (length, length)
    count = -(-length // BLOCK)
    partial, full = torch.zeros(2, count, count, dtype=torch.bool)
    for row in range(count):
        for column in range(count):
            part = visible[row * BLOCK : (row + 1) * BLOCK, column * BLOCK : (column + 1) * BLOCK]
            # The last rows of an incomplete block do not matter.
            whole = (
                column < row
                and window(length + BLOCK, keys or 2 * length + BLOCK)[
                    row * BLOCK : (row + 1) * BLOCK, column * BLOCK : (column + 1) * BLOCK
                ].all()
            )
            full[row, column] = bool(whole)
            partial[row, column] = bool(part.any()) and not whole
    for expected, names in ((partial, ("kv", "q")), (full, ("full_kv", "full_q"))):
        for name, table in zip(names, (expected, expected.T), strict=True):
            numbers, places = getattr(blocks, f"{name}_num_blocks"), getattr(blocks, f"{name}_indices")
            for row, wanted in enumerate(table):
                listed = places[0, 0, row, : numbers[0, 0, row]].tolist()
                assert sorted(listed) == wanted.nonzero().flatten().tolist()
    at = torch.arange(min(length, 300))
    assert torch.equal(blocks.mask_mod(0, 0, at[:, None], at), visible[: len(at), : len(at)])
