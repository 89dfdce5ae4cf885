"""Patch embeddings: torch's convolution whose stride is its kernel, and its product.

The first two sizes on a GPU are the patches of a step of Qwen2.5-VL and of Qwen3-VL, each as large as the
kernel; the third is a batch of images, in which patches lie side by side. Pixels get no gradient, so the
least work of a step is two products: the result, and the gradient of the weight. The limit is the time of
these two alone, on rows that are there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from math import prod
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from veomni_hook import accelerator
from veomni_hook.kernels.patch_projection.torch import disjoint_blocks
from veomni_hook.kernels.problem import Problem, made

__all__ = ["problems"]

# Samples, channels, sizes of a sample, kernel, results.
_ACCELERATOR = (
    (43808, 3, (2, 14, 14), (2, 14, 14), 1280),
    (32768, 3, (2, 16, 16), (2, 16, 16), 1152),
    (64, 3, (336, 336), (14, 14), 1024),
)
_CPU = ((1024, 3, (2, 14, 14), (2, 14, 14), 1280), (8, 3, (224, 224), (16, 16), 768))
_KINDS: dict[int, Callable[..., nn.Module]] = {2: nn.Conv2d, 3: nn.Conv3d}


def problems(device: str, *, quick: bool) -> Iterator[Problem]:
    """Yield every size; in bfloat16, on a CPU in float32."""
    on_accelerator = device in accelerator.TYPES
    dtype = torch.bfloat16 if on_accelerator else torch.float32
    sizes = _ACCELERATOR if on_accelerator else _CPU
    for samples, channels, size, kernel, out in sizes[:2] if quick else sizes:
        x = made(samples, channels, *size, device=device, dtype=dtype)
        inner = channels * prod(kernel)
        weight = made(out, channels, *kernel, device=device, dtype=dtype) * inner**-0.5
        bias = made(out, device=device, dtype=dtype)
        module = _KINDS[len(kernel)](channels, out, kernel, stride=kernel, device="meta")
        rows = made(samples * prod(size) // prod(kernel), inner, device=device, dtype=dtype)
        eager = partial(_called, lambda x, convolution: convolution(x), module, x)
        yield Problem(
            op="patch_projection",
            shape=f"{samples} x {channels} x {' x '.join(map(str, size))}, patch {kernel[-1]}, to {out}",
            leaves=(weight, bias),
            sides={
                "eager": eager,
                "compile": torch.compile(eager, dynamic=False),
                "ours": partial(_called, disjoint_blocks, module, x),
            },
            limit="products",
            work={part: count * rows.shape[0] * inner * out for part, count in (("forward", 2), ("step", 4))},
            products=partial(
                _products, rows=rows, gradient=made(rows.shape[0], out, device=device, dtype=dtype)
            ),
            incoming={"backward": [torch.randn_like(eager(weight, bias))]},
        )


def _products(
    weight: torch.Tensor, bias: torch.Tensor, *, rows: torch.Tensor, gradient: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Return the two products of a step: the result, and the gradient of the weight."""
    return functional.linear(rows, weight.flatten(1), bias), gradient.t() @ rows


def _called(
    kernel: Callable[[torch.Tensor, Any], torch.Tensor],
    module: nn.Module,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
) -> torch.Tensor:
    # As plain tensors, so that what is computed has their gradients.
    module._parameters.update({"weight": weight, "bias": bias})  # type: ignore[dict-item]
    return kernel(x, module)
