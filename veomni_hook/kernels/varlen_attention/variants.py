"""The variants of attention by segment: every position attends to its whole segment."""

from __future__ import annotations

from veomni_hook.kernels.selection.declaration import NPU, Requirement, Variant
from veomni_hook.kernels.selection.table import backend, op

__all__ = ["OP", "VARIANTS"]

_FLASH = backend(
    "flash",
    ".flash:{variant}",
    refuses=".flash:refuses",
    loses=".flash:loses",
    requires=Requirement(devices=("cuda",), min_capability=(8, 0), distributions=("torch>=2.6",), rocm=False),
    description="torch's flash attention with boundaries: one launch for all segments, half precision",
)
_FLASH_ATTN = backend(
    "flash_attn",
    ".flash:full_by_package",
    refuses=".flash:unfit",
    requires=Requirement(devices=("cuda",), min_capability=(8, 0), distributions=("flash_attn>=2.6",)),
    description="the package flash-attn, in the same way",
    automatic=False,
)
_NPU = backend(
    "npu",
    ".npu:{variant}",
    refuses=".npu:refuses",
    requires=NPU,
    priority=10,
    description="npu_fusion_attention: one launch for up to 1,024 segments",
)
_TORCH = backend(
    "torch",
    ".torch:{variant}",
    priority=-1,
    description="one call of scaled_dot_product_attention for all segments of a length; any dtype and device",
)

VARIANTS = {
    "full": Variant(
        "softmax(scaling * q @ k^T) @ v within each segment of cu_seqlens",
        kernels=(_FLASH, _FLASH_ATTN, _NPU, _TORCH),
        refuses=".operand_checks:refuses",
    ),
}
OP = op("varlen_attention", VARIANTS)
