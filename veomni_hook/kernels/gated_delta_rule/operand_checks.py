"""Whether a kernel may compute a call of the gated delta rule, and where the user's package does."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch

from veomni_hook.kernels.shared import hub_functions
from veomni_hook.kernels.shared.hub_functions import is_upstreams
from veomni_hook.kernels.shared.operand_checks import not_plain, untraceable
from veomni_hook.kernels.shared.origin import name_of
from veomni_hook.kernels.shared.samples import unfit_ends

__all__ = ["refuses", "refuses_channels", "yields"]

_LEAST_CAPABILITY = (8, 0)


def refuses(  # noqa: PLR0911 - one return a refusal; the operands
    owner: object,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None,
    output_final_state: object,
    use_qk_l2norm_in_kernel: object,
    cu_seqlens: torch.Tensor | None,
    upstream: object,
) -> str | None:
    """Return why this call must run the upstream code, or None. Operands: see `reference.scalar_decay`."""
    if not is_upstreams(upstream, owner):
        return f"the function was replaced by {name_of(upstream)}"
    optional = [tensor for tensor in (initial_state, cu_seqlens) if tensor is not None]
    if (reason := not_plain(query, key, value, g, beta, *optional) or untraceable()) is not None:
        return reason
    if query.dim() != 4 or query.shape != key.shape or value.dim() != 4:
        return f"query, key and value are {_sizes(query, key, value)}"
    rows, positions, heads, _ = value.shape
    if query.shape[:2] != value.shape[:2] or not query.shape[2] or heads % query.shape[2]:
        return f"query, key and value are {_sizes(query, key, value)}"
    if g.shape != value.shape[:3] or beta.shape != value.shape[:3]:
        return f"g and beta are {_sizes(g, beta)}, values {_sizes(value)}"
    if not all(tensor.is_floating_point() for tensor in (query, key, value, g, beta)):
        return "an operand is no floating-point tensor"
    samples = rows
    if cu_seqlens is not None:
        if (reason := unfit_ends(cu_seqlens, rows * positions)) is not None:
            return reason
        samples = cu_seqlens.numel() - 1
    state = (samples, heads, query.shape[3], value.shape[3])
    if initial_state is not None and initial_state.shape != state:
        return f"the initial state is {_sizes(initial_state)}, not {list(state)}"
    return None


def refuses_channels(
    owner: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *others: Any,
) -> str | None:
    """Return why this call must run the upstream code, or None. Operands: see `reference.channel_decay`."""
    if query.dim() != 4 or query.shape[:3] != value.shape[:3] or g.shape != query.shape:
        return f"query, value and g are {_sizes(query, value, g)}"
    return not_plain(g) or refuses(owner, query, key, value, g[..., 0], beta, *others)


def _sizes(*tensors: torch.Tensor) -> str:
    return ", ".join(str(list(tensor.shape)) for tensor in tensors)


def yields(owner: Any, *operands: Any) -> str | None:
    """Return the package's function that computes a call, because the user has installed it, or None.

    Where Triton computes the call, it takes precedence over flash-linear-attention: a step took 0.7 of the
    time with a decay for each head, or channel, and with Triton 3.4 to 3.7.0 the other's backward raises an
    error on Hopper.
    """
    reason = hub_functions.yields(owner, *operands)
    home = str(getattr(hub_functions.running(operands[-1]), "__module__", ""))
    if reason is None or home.partition(".")[0] != "fla" or not _runs_triton(operands[0].device):
        return reason
    from veomni_hook.kernels.gated_delta_rule import rule, triton

    if operands[3].dim() == 3:
        refused = refuses(owner, *operands) or triton.refuses(owner, *operands)
    else:  # a decay for each channel
        refused = refuses_channels(owner, *operands) or rule.unfit(owner, *operands)
    return reason if refused else None


def _runs_triton(device: torch.device) -> bool:
    if device.type != "cuda" or find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) >= _LEAST_CAPABILITY
