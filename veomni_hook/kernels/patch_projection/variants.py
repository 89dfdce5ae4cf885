"""The variants of convolutions whose stride is their kernel: one, for any number of dimensions."""

from __future__ import annotations

from veomni_hook.kernels.selection.declaration import Variant
from veomni_hook.kernels.selection.table import backend, checked_reference, op

__all__ = ["OP", "VARIANTS"]

# In compiled code by name only: Inductor calls the same library for a convolution as PyTorch does, and on a
# CPU the product won 2.7 times and more, but no GPU was measured.
_TORCH = backend(
    "torch",
    ".torch:{variant}",
    refuses=".rules:refuses",
    loses=".rules:loses",
    description="one product of torch's; without a copy where the input has the kernel's size",
    traceable=True,
)

VARIANTS = {
    "disjoint_blocks": Variant(
        "y[:, :, i] = weight . x[block i] + bias, for blocks of the kernel's size side by side",
        kernels=(_TORCH, checked_reference(".rules:refuses")),
    ),
}
OP = op("patch_projection", VARIANTS)
