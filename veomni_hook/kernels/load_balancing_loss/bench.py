"""The load-balancing loss of all layers: forward reads their logits, backward reads and writes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from veomni_hook import accelerator
from veomni_hook.kernels.problem import Problem, Side, beside, formula, made

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
            sides=_sides(device, experts, top_k),
            limit="bytes",
            work={"forward": size, "backward": 2 * size},
            incoming={"backward": [torch.ones((), device=device)]},
        )


def _sides(device: str, experts: int, top_k: int) -> dict[str, Side]:
    eager = partial(_of_layers, formula("load_balancing_loss", "softmax_topk"), experts, top_k)
    found: dict[str, Side] = {"eager": eager, "compile": torch.compile(eager, dynamic=False)}
    for name, side in beside("load_balancing_loss", "softmax_topk", device).items():
        found[name] = partial(_of_layers, side, experts, top_k)
    return found


def _of_layers(loss: Callable[..., object], experts: int, top_k: int, *layers: torch.Tensor) -> torch.Tensor:
    found = loss(layers, experts, top_k, None)
    assert isinstance(found, torch.Tensor)  # noqa: S101
    return found
