"""The gated product of an MLP: ``activation(gate) * up`` and its variants; the projections stay modules.

Guards ask with ``slot.kernel(mlp, x, activation)``, where ``x`` is a tensor available before the projections,
and call ``kernel(gate, up, activation, ...)`` after them, with ``gate`` and ``up`` both
``[..., intermediate]``. If upstream evaluates operands in another order, they are passed by keyword. The
activation is the module's own: a kernel refuses those that it does not support. `variants` declares the op.
"""
