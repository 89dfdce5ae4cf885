"""SonicMoE's side of the problems, where the distribution sonic-moe is installed.

It takes part with its whole block: its router's weights stay in float32, and its kernels compile for a minute
or two at each new shape.
"""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec

import torch

from veomni_hook.tools.bench.problem import Side

__all__ = ["block", "side"]


def side(device: str, top_k: int) -> tuple[dict[str, Side], dict[str, str]]:
    """Return the side ``sonic`` of a block of experts, or why there is none; on a CPU both are empty."""
    if device != "cuda":
        return {}, {}
    if find_spec("sonicmoe") is None:
        return {}, {"sonic": "sonic-moe is not installed"}
    return {"sonic": partial(block, top_k)}, {}


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
