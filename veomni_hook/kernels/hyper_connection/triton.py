"""The weights of hyper-connections and the weighted sum of streams in Triton; `device` has the formulas.

Forward reads the streams twice, and backward three times: nothing of their size is written but their
gradient. Eager code writes them in float32 several times in each direction.

Shapes: hidden_streams [B, S, N, D], fn [M, N * D], base [M], scale [3] (or [1]), each in float32, bfloat16
or float16; N is 2, 4 or 8. Saved: the operands, the projection [B * S, M] and the norm's scale [B * S], both
in float32; Sinkhorn's iterations are computed again. Mutates: nothing. Deterministic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import torch

from veomni_hook.kernels.hyper_connection import device as kernels
from veomni_hook.kernels.hyper_connection import reference
from veomni_hook.kernels.hyper_connection.rules import unsupported
from veomni_hook.kernels.rms_norm import reference as norms
from veomni_hook.kernels.shared.autograd import differentiable
from veomni_hook.kernels.shared.launch import LAUNCHES, Launch, cdiv, power
from veomni_hook.kernels.shared.operators import operator

__all__ = ["collapse", "refuses", "sinkhorn"]

Tensor = torch.Tensor
_Kind = tuple[torch.dtype, ...]
# Tokens per program where they are rows of a product, and where each is a small matrix.
_ROWS, _TOKENS = 32, 32
# Columns per program: of a product, of its gradients, and of the sums over streams.
_PART, _GRADIENT, _COLUMNS = 64, 64, 1024


class _Sizes:
    """The sizes of a call, and its launches; one for each kind of call.

    Args:
        device: where they launch.
        kind: the dtypes of streams, projection, base and scale.
        n: the number of streams.
        columns: of a stream.
        comb: whether there are weights of the output and of the mixture.
    """

    def __init__(self, device: torch.device, kind: _Kind, n: int, columns: int, comb: bool) -> None:
        k, m = n * columns, n + comb * (n + n * n)
        padded = max(16, power(m))
        block = min(power(columns), _COLUMNS)
        self.m, self.n = m, n
        self.parts = cdiv(columns, block)
        self.gradient_parts = n * cdiv(columns, _GRADIENT), cdiv(k, _GRADIENT)
        dots: dict[str, Any] = {"num_warps": 4, "num_stages": 3}
        self.project = Launch(kernels.project, 4, k, m, padded, _ROWS, _PART, **dots)
        self.weights = Launch(kernels.weights, 5, n, m, _TOKENS, num_warps=1)
        self.collapse = Launch(kernels.collapse, 5, columns, n, m, block, num_warps=4)
        self.products = Launch(kernels.products, 3, columns, n, block, num_warps=4)
        self.weights_backward = Launch(kernels.weights_backward, 10, k, n, m, comb, _TOKENS, num_warps=1)
        self.streams = Launch(kernels.streams_gradient, 9, columns, n, m, padded, _ROWS, _GRADIENT, **dots)
        self.fn = Launch(kernels.fn_gradient, 3, k, m, padded, _ROWS, _GRADIENT, **dots)


_sizes = lru_cache(maxsize=LAUNCHES)(_Sizes)


@operator(lambda x, fn, *others: _results(x, fn.shape[0], others[-1]))
def _hyper_connection(
    x: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    numbers: list[float],
    iterations: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    x, fn, base, scale = (tensor.contiguous() for tensor in (x, fn, base, scale))
    tokens, kind = x.shape[0] * x.shape[1], (x.dtype, fn.dtype, base.dtype, scale.dtype)
    sizes = _sizes(x.device, kind, x.shape[2], x.shape[3], iterations > 0)
    norm_eps, eps = numbers
    post, comb, y, m, r = _results(x, sizes.m, iterations)
    sizes.project((cdiv(tokens, _ROWS), 1, 1), x, fn, m, r, tokens, norm_eps)
    if iterations:
        sizes.weights((cdiv(tokens, _TOKENS), 1, 1), m, base, scale, post, comb, tokens, iterations, eps)
    sizes.collapse((tokens, sizes.parts, 1), x, m, base, scale, y, eps)
    return post, comb, y, m, r


def _results(x: Tensor, m: int, iterations: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Both weights, the sum, the projection and the norm's scale, without values."""
    batch, length, n, columns = x.shape
    small = [(batch, length, n), (batch, length, n, n)] if iterations else [(0,), (0,)]
    shapes = [*small, (batch * length, m), (batch * length,)]
    post, comb, product, r = (x.new_empty(shape, dtype=torch.float32) for shape in shapes)
    return post, comb, x.new_empty((batch, length, columns)), product, r


@operator(lambda dy, dpost, dcomb, saved, *others: tuple(x.new_empty(x.shape) for x in saved[:4]))
def _hyper_connection_backward(
    dy: Tensor,
    dpost: Tensor,
    dcomb: Tensor,
    saved: list[Tensor],
    numbers: list[float],
    iterations: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, fn, base, scale, m, r = (tensor.contiguous() for tensor in saved)
    dy, dpost, dcomb = dy.contiguous(), dpost.contiguous(), dcomb.contiguous()
    tokens, kind = m.shape[0], (x.dtype, fn.dtype, base.dtype, scale.dtype)
    sizes = _sizes(x.device, kind, x.shape[2], x.shape[3], iterations > 0)
    eps = numbers[1]
    dpre = m.new_empty((tokens, sizes.n))
    sizes.products((tokens, 1, 1), x, dy, dpre)
    dz, ds, c = torch.empty_like(m), torch.empty_like(m), torch.empty_like(r)
    grid = cdiv(tokens, _TOKENS), 1, 1
    sizes.weights_backward(
        grid, m, r, base, scale, dpre, dpost, dcomb, dz, ds, c, tokens, iterations, eps
    )  # fmt: skip
    dx, dfn = torch.empty_like(x), torch.empty_like(fn)
    streams, parts = sizes.gradient_parts
    grid = cdiv(tokens, _ROWS), streams, 1
    sizes.streams(grid, x, fn, m, base, scale, ds, c, dy, dx, tokens, eps)
    sizes.fn((parts, 1, 1), x, ds, dfn, tokens)
    n = sizes.n
    by_weight = (dz * m).sum(0)
    parts_of = torch.split(by_weight, [n, n, n * n] if iterations else [n])
    return dx, dfn, dz.sum(0).to(base.dtype), torch.stack([part.sum() for part in parts_of]).to(scale.dtype)


def _definition(
    x: Tensor, fn: Tensor, base: Tensor, scale: Tensor, numbers: Sequence[float], iterations: int
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """Return both weights and the sum of the streams by definition; without iterations, the sum alone."""
    norm_eps, eps = numbers
    norm = partial(norms.unweighted, eps=norm_eps)
    if iterations:
        return reference.sinkhorn(x, norm, None, fn, base, scale, x.shape[2], iterations, eps)
    return None, None, reference.collapse(x, norm, None, fn, base, scale, eps)  # type: ignore[arg-type]


#: Takes streams, fn, base and scale; both eps, and the number of iterations.
_apply: Callable[..., tuple[Tensor, Tensor, Tensor]] = differentiable(
    _hyper_connection,
    lambda saved, rest, wanted, dpost, dcomb, dy: _hyper_connection_backward(dy, dpost, dcomb, saved, *rest),
    _definition,
    tensors=4,
    results=3,
)


def sinkhorn(
    hidden_streams: Tensor,
    norm: Any,
    norm_class: object,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    streams: int,
    iterations: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `reference.sinkhorn` says."""
    return _apply(hidden_streams, fn, base, scale, [norm.eps, eps], iterations)


def collapse(
    hidden_streams: Tensor,
    norm: Any,
    norm_class: object,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    eps: float,
) -> Tensor:
    """Return what `reference.collapse` says."""
    return _apply(hidden_streams, fn, base, scale, [norm.eps, eps], 0)[2]


def refuses(owner: object, x: Tensor, norm: object, norm_class: object, *operands: Any) -> str | None:
    """Return what the kernels refuse, beside `rules`, or None."""
    return unsupported(x, *operands[:3])
