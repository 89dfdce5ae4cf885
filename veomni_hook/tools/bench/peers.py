"""Sides of the problems from other packages: QuACK's kernels (quack-kernels), SonicMoE's block (sonic-moe).

Their functions are called as their users call them. What an installed release does not have is a failed side.
SonicMoE takes part with its whole block: its router's weights stay in float32, and its kernels compile for a
minute or two at each new shape.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch

from veomni_hook.tools.bench.problem import Side

__all__ = ["add_rms_norm", "block", "linear_cross_entropy", "rms_norm", "rotary", "side"]


#: The package and the distribution of a side, by the first word of its name.
_PACKAGES = {"quack": ("quack", "quack-kernels"), "sonic": ("sonicmoe", "sonic-moe")}


def side(device: str, name: str, call: Side | str) -> tuple[dict[str, Side], dict[str, str]]:
    """Return the sides ``{name: call}`` and why there is none here; one of both is empty.

    ``call`` is a reason where the package has no such kernel. On a CPU, where it has none at all, both are
    empty.
    """
    if device != "cuda":
        return {}, {}
    package, distribution = _PACKAGES[name.partition(",")[0]]
    if find_spec(package) is None:
        return {}, {name: f"{distribution} is not installed"}
    return ({}, {name: call}) if isinstance(call, str) else ({name: call}, {})


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return ``weight * xhat`` of rows ``[rows, columns]``, multiplied in float32."""
    from quack.rmsnorm import rmsnorm

    y: torch.Tensor = rmsnorm(x, weight, eps=eps)
    return y


def add_rms_norm(
    residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of rows ``[rows, columns]`` and its norm."""
    from quack.rmsnorm import rmsnorm

    normalised, total = rmsnorm(x, weight, residual=residual, eps=eps, prenorm=True)
    return total, normalised


def rotary(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rotated ``q`` and ``k`` ``[batch, heads, length, head_dim]`` by ``[length, head_dim / 2]``."""
    from quack.rotary import apply_rotary_emb

    turned, other = (apply_rotary_emb(x.transpose(1, 2), cos, sin).transpose(1, 2) for x in (q, k))
    return turned, other


def linear_cross_entropy(x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the mean loss; the weight's gradient is summed in float32."""
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    loss: torch.Tensor = chunked_linear_cross_entropy(x, weight, target)
    return loss


def block(
    top_k: int, x: torch.Tensor, router: torch.Tensor, up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """Return a softmax router and gated experts of ``x`` ``[tokens, hidden]``, without an auxiliary loss.

    ``up`` is ``[experts, 2 * inner, hidden]``, rows of the gate first, as in checkpoints.
    """
    from sonicmoe.enums import ActivationType
    from sonicmoe.functional import moe_TC_softmax_topk_layer

    stream = torch.cuda.current_stream().cuda_stream
    forward_only = not torch.is_grad_enabled()
    weights = up.permute(1, 2, 0), None, down.permute(1, 2, 0), None
    y: torch.Tensor = moe_TC_softmax_topk_layer(
        x, router, *weights, top_k, stream, ActivationType.SWIGLU, forward_only, concat_layout=True
    )[0]
    return y
