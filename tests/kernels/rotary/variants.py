"""Both sides of the variants, and operands for them."""

import torch

from tests.kernels import declared
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


def call(
    backend,
    variant,
    x=F32,
    table=F32,
    batch=2,
    heads=(3, 2),
    length=5,
    width=16,
    rotated=None,
    cos_batch=None,
):
    """Both sides of a variant as functions of the tensors that turn, and these."""
    heads_at = 2 if variant in ("pairs_doubled_single", "complex_pairs") else 1
    rotated = rotated or (width // 2 if variant in PARTIAL else width)
    cos, sin = tables(variant, cos_batch or batch, length, rotated, table)
    if variant in BROADCAST:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    given = {"cos": cos, "sin": sin}
    if variant == "half_split_gathered":
        given["position_ids"] = at(torch.randint(0, length, (batch, length)))
        given |= {"cos": cos[0], "sin": sin[0]}
    if variant in COMPLEX:
        given = {"freqs": torch.complex(cos.float(), sin.float())}
    xs = [states(batch, number, length, width, x, heads_at) for number in heads]
    if variant.endswith("_single"):
        xs = xs[:1]

    def side(function):
        if variant.endswith("_single"):
            return lambda x: function(x, **given)
        return lambda q, k: function(q=q, k=k, **given)

    return *map(side, declared.pair("rotary", variant, backend)), xs
