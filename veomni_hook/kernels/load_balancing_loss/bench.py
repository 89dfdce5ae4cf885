"""The load-balancing loss of all layers: forward reads their logits, backward reads and writes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from veomni_hook import accelerator
from veomni_hook.kernels.problem import Problem, made, sides_of

__all__ = ["problems"]

# Layers, tokens, experts, experts of a token. With 48 layers of 32,768 tokens upstream's code, as it is and
# compiled, did not finish in a minute on an H200.
_ACCELERATOR = ((16, 16384, 128, 8), (8, 8192, 64, 8))
_CPU = ((8, 2048, 64, 8), (4, 4096, 128, 8))


def problems(device: str, *, quick: bool) -> Iterator[Problem]:
    """Yield every size."""
    for layers, tokens, experts, top_k in _ACCELERATOR if device in accelerator.TYPES else _CPU:
        logits = [made(tokens, experts, device=device) for _ in range(layers)]
        size = sum(layer.nbytes for layer in logits)
        yield Problem(
            op="load_balancing_loss",
            shape=f"{layers} x {tokens} x {experts}, top {top_k}",
            leaves=logits,
            sides=sides_of(
                "load_balancing_loss", "softmax_topk", device, call=_of_layers, experts=experts, top_k=top_k
            ),
            limit="bytes",
            work={"forward": size, "backward": 2 * size},
            incoming={"backward": [torch.ones((), device=device)]},
        )


def _of_layers(loss: Callable[..., object], *layers: torch.Tensor, experts: int, top_k: int) -> torch.Tensor:
    value = loss(layers, experts, top_k, None)
    assert isinstance(value, torch.Tensor)  # noqa: S101
    return value
