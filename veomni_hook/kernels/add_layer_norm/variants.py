"""The variants of the addition and its norm: named after those of nn_layer_norm."""

from __future__ import annotations

from veomni_hook.kernels.nn_layer_norm.variants import VARIANTS as NORMS
from veomni_hook.kernels.selection.declaration import Variant
from veomni_hook.kernels.selection.table import ANYWHERE, TRITON, backend, op

__all__ = ["OP", "VARIANTS"]

# Not automatic for the reason that `veomni_hook.kernels.nn_layer_norm.variants` gives.
_TRITON = backend(
    "triton",
    "..layer_norm.modules:sum_{variant}",
    refuses="..layer_norm.modules:refuses_sum",
    loses="..layer_norm.modules:loses",
    requires=TRITON,
    priority=10,
    traceable=True,
    invariant=("cuda",),
    description="reads the sum once; the backward adds both gradients of the sum",
    automatic=False,
)

VARIANTS = {
    "rounded_once": Variant(
        f"x = residual + hidden_states; {NORMS['rounded_once'].formula}",
        "..layer_norm.reference:sum_{variant}",
        kernels=(_TRITON,),
        refuses="..layer_norm.skipped_calls:refuses",
    ),
}
OP = op(
    "add_layer_norm",
    VARIANTS,
    invariant=ANYWHERE,
    yields="..layer_norm.skipped_calls:chosen_apart",
    parts=("nn_layer_norm",),
)
