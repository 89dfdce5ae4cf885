"""Modes that intercept the functions which a kernel would not call (`torch.overrides.TorchFunctionMode`)."""

from __future__ import annotations

import torch

__all__ = ["HARMLESS", "active", "intercepting"]

#: Modes that leave the results of functions as they are: they choose devices for new tensors, how an index is
#: traced, and nothing. Names, because importing one of them would load dynamo.
HARMLESS = frozenset(
    (
        "torch.utils._device.DeviceContext",
        "torch._dynamo._trace_wrapped_higher_order_op.TransformGetItemToIndex",
        "torch.overrides.BaseTorchFunctionMode",
    )
)

# Bound here, because every guard asks. The name is new in a release of torch that dynamo traces, too.
active = torch._C._len_torch_function_stack


def intercepting() -> str | None:
    """Return which active mode may change what upstream's functions compute, or None.

    Modes for dispatched operators are no concern of this: the operators of kernels show themselves to these.
    """
    for place in range(active()):
        kind = type(torch._C._get_function_stack_at(place))
        name = f"{kind.__module__}.{kind.__qualname__}"
        if name not in HARMLESS:
            return f"the TorchFunctionMode {name} is active: it may change what upstream's functions compute"
    return None
