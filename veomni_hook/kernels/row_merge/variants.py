"""The variants of merged rows: what happens to a row at the mask."""

from __future__ import annotations

from veomni_hook.kernels.selection.declaration import Requirement, Variant
from veomni_hook.kernels.selection.table import ANYWHERE, TRITON, backend, op

__all__ = ["OP", "VARIANTS"]

#: How a kernel asserts something on the device.
_ASSERTS = Requirement(devices=("cpu", "cuda"))


_KERNELS = (
    backend(
        "triton",
        ".triton:{variant}",
        refuses=".triton:refuses",
        requires=TRITON,
        priority=10,
        traceable=True,
        invariant=("cuda",),
        description="one launch in each direction; nothing is read on the host",
    ),
    backend(
        "torch",
        ".torch:{variant}",
        loses=".rules:loses",
        requires=_ASSERTS,
        traceable=True,
        invariant=("cpu", "cuda"),
        description="gathers in both directions; nothing is read on the host",
    ),
)

VARIANTS = {
    "rows": Variant(
        "source[cumsum(mask) - 1] where mask, else inputs: masked_scatter of rows",
        kernels=_KERNELS,
        refuses=".rules:refuses",
    ),
    "rows_added": Variant(
        "hidden_states + source[cumsum(mask) - 1] where mask, else hidden_states",
        kernels=_KERNELS,
        refuses=".rules:refuses_added",
    ),
}
OP = op("row_merge", VARIANTS, invariant=ANYWHERE)
