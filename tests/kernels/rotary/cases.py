"""Calls of rotary."""

import torch

from tests.kernels import declared
from tests.kernels.contract import DEVICE, DTYPES, Case, in_order
from tests.kernels.rotary.variants import HALF_WIDTH, PARTIAL
from veomni_hook.kernels.slot.arguments import operand_names

#: Batch, heads of queries and keys, length, head_dim, batch of the tables; and, where it is not the usual part, what turns.
SIZES = [
    (2, 3, 2, 5, 16, 2), (2, 3, 2, 5, 16, 1), (2, 3, 2, 1, 16, 2), (2, 3, 2, 0, 16, 2), (0, 3, 2, 5, 16, 0),
    (2, 3, 2, 5, 12, 2), (2, 5, 1, 9, 80, 2), (2, 40, 8, 3, 4, 2), (1, 1, 1, 700, 4, 1),
]  # fmt: skip
#: Tables that have a dimension for the heads.
BROADCAST = {
    "half_width_halves_single", "half_width_pairs_single", "pairs_fp32_broadcast",
    "half_split_first_positions_single", "pairs_partial_fp64_single",
}  # fmt: skip
#: Tables or operands of another form.
OTHERS = {
    "half_split_after_prefix", "half_split_first_positions_single", "half_split_gathered",
    "half_split_gathered_with_value", "half_split_of_angles_fp32_single", "half_split_packed_heads",
    "half_split_sections", "pairs_partial_fp64_single", "sections",
}  # fmt: skip
PAIRED = {"pairs_matrix", "pairs_fp32", "pairs_fp32_broadcast", "complex_pairs", "complex_pairs_moved"}
#: Upstream texts of these differ in where gradients of a query in float16 or bfloat16 are rounded.
AMBIGUOUS = {"half_split_fp32_as_query", "pairs_fp32_as_query"}


def operands(variant, size, dtype, others):
    batch, q_heads, k_heads, length, width, tables, *rotated = size
    (rotated,) = rotated or [width // 2 if variant in PARTIAL else width]
    angle = torch.randn(tables, length, rotated // 2 if variant in HALF_WIDTH else rotated)
    cos, sin = angle.cos().to(others), (angle * 1.5).sin().to(others)
    if variant in BROADCAST:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    if "gathered" in variant:
        cos, sin = cos[0], sin[0]
    if variant == "half_split_sections":
        cos, sin = (torch.stack([x, x.flip(0), -x]) for x in (cos, sin))
    if variant == "half_split_after_prefix":
        cos, sin = cos[0, 2:], sin[0, 2:]
    heads_last = variant in {"pairs_doubled_single", "complex_pairs", "half_split_of_angles_fp32_single"}

    def states(heads):
        if variant == "half_split_packed_heads":
            return torch.randn(batch, length, heads * width).to(dtype)
        x = torch.randn(batch, length, heads, width).to(dtype)
        return x if heads_last else x.transpose(1, 2)

    made = {
        "q": states(q_heads), "k": states(k_heads), "v": states(k_heads), "x": states(q_heads), "cos": cos, "sin": sin,
        "freqs": torch.complex(cos.float(), sin.float()) if "complex" in variant else torch.randn(3, batch, length, width // 2),
        "angles": torch.randn(length, width // 2), "position_ids": torch.randint(0, length or 1, (batch, length)),
        "mrope_section": [1, 2, 1], "num_heads": q_heads, "head_size": width,
        "tables": torch.randn(batch, length, 1, 1, width),
    }  # fmt: skip
    return in_order("rotary", variant, made)


def case(variant):
    formula = declared.reference("rotary", variant)

    def asked(rule, *operands):
        return rule(*operands, formula)

    turned = [name for name in operand_names("rotary", variant) if name in "qkvx"] or ["freqs"]
    # Upstream's code cannot pair columns of no rows.
    sizes = [each for each in SIZES if variant not in PAIRED or 0 not in each]
    return Case(
        lambda *of: operands(variant, *of),
        [(2, 3, 3, 5, 8, 2)] if variant in OTHERS else sizes,
        gpu=[(2, 8, 2, 5, width, 2) for width in (128, 80)],
        rows=turned,
        fixed=("cos", "sin", "angles", "tables", *(() if "freqs" in turned else ("freqs",))),
        spared=turned,
        # Tables that are repeated.
        kept=dict.fromkeys(("torch", "npu", "triton"), 2),
        rule=asked,
        exact=() if variant in AMBIGUOUS or "complex" in variant else ("torch", "triton"),
        # The interpreter cuts float32 off where bfloat16 is rounded.
        dtypes=DTYPES if DEVICE == "cuda" else DTYPES[:2],
    )
