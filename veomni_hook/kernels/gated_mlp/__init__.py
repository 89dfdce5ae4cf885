"""The gated middle of an MLP: ``activation(gate) * up``; the projections around it stay modules.

Guards ask with ``slot.kernel(mlp, x)`` before the projections and call ``kernel(gate, up)`` after them, both
``[..., intermediate]``.
"""

from __future__ import annotations

from veomni_hook.kernels.registry import Kernel, Op

OP = Op("gated_mlp", variants={"silu": "gate * sigmoid(gate) * up"})

KERNELS = (
    Kernel(
        op="gated_mlp",
        variant="silu",
        backend="torch",
        load="veomni_hook.kernels.gated_mlp.torch:gated_silu",
        refuses="veomni_hook.kernels.gated_mlp.torch:refuses",
        loses="veomni_hook.kernels.gated_mlp.torch:loses",
        description="in place without gradients; with them one activation is computed again, not kept",
    ),
)
