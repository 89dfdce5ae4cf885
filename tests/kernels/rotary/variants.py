"""Groups of variants, and tables and heads for them."""

import torch

from tests.kernels.matching import DEVICE

F32 = torch.float32
HALF_WIDTH = {
    "half_width_halves", "half_width_halves_single", "half_width_pairs", "half_width_pairs_single",
    "pairs_doubled_single", "pairs_trailing_fp32_single", "complex_pairs", "complex_pairs_moved",
}  # fmt: skip
COMPLEX = {"complex_pairs", "complex_pairs_moved"}
BROADCAST = {"half_width_halves_single", "half_width_pairs_single", "pairs_fp32_broadcast"}
PARTIAL = {
    "half_split_partial", "half_split_partial_optional_key", "pairs_partial", "pairs_partial_repeated",
    "pairs_trailing_fp32_single",
}  # fmt: skip


def at(device):
    return device.to(DEVICE)


def tables(variant, batch, length, rotated, dtype):
    angle = torch.randn(batch, length, rotated // 2 if variant in HALF_WIDTH else rotated)
    return [at(angle.cos().to(dtype)), at((angle * 1.5).sin().to(dtype))]


def states(batch, heads, length, width, dtype, heads_at=1):
    x = at(torch.randn(batch, length, heads, width).to(dtype))
    return x.transpose(1, 2) if heads_at == 1 else x
