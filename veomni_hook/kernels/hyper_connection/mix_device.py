"""Device code of mixed streams; `veomni_hook.kernels.hyper_connection.mix` launches it.

Weights are cast to the streams' dtype; products, their sums over streams, and the result are rounded to it.

Forward:  y_k = post_k o + sum_j comb_jk x_j
Backward: do = sum_k post_k dy_k;  dx_j = sum_k comb_jk dy_k;  dpost_k = sum_d dy_k o;
    dcomb_jk = sum_d x_j dy_k
"""

import triton
import triton.language as tl

__all__ = ["backward", "forward"]


@triton.jit
def _weights(post, comb, token, N: tl.constexpr, dtype: tl.constexpr):
    """The weights of a token, [N] and [N, N], rounded to the streams' dtype."""
    n = tl.arange(0, N)
    own = tl.load(post + token * N + n).to(dtype).to(tl.float32)
    inner = n[:, None] * N + n[None, :]
    return own, tl.load(comb + token * N * N + inner).to(dtype).to(tl.float32)


@triton.jit
def forward(
    post,  # [tokens, N]
    comb,  # [tokens, N, N]
    o,  # [tokens, D]
    x,  # [tokens, N, D], the dtype of o
    y,  # [tokens, N, D], the dtype of x: a result
    D: tl.constexpr,
    N: tl.constexpr,  # a power of two
    BLOCK: tl.constexpr,
):
    """The mixed streams plus the weighted output. Grid: tokens, cdiv(D, BLOCK)."""
    token = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    dtype: tl.constexpr = x.dtype.element_ty
    own, mixture = _weights(post, comb, token, N, dtype)
    at = (token * N + tl.arange(0, N))[:, None] * D + d[None, :]
    inside = (d < D)[None, :]
    streams = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    output = tl.load(o + token * D + d, mask=d < D, other=0.0).to(tl.float32)
    mixed = tl.sum(mixture[:, :, None] * streams[:, None, :], axis=0).to(dtype).to(tl.float32)
    added = (own[:, None] * output[None, :]).to(dtype).to(tl.float32)
    tl.store(y + at, (added + mixed).to(dtype), mask=inside)


@triton.jit
def backward(
    dy,  # [tokens, N, D]
    post,  # [tokens, N]
    comb,  # [tokens, N, N]
    o,  # [tokens, D]
    x,  # [tokens, N, D]
    dpost,  # [tokens, N], the dtype of post: a result
    dcomb,  # [tokens, N, N], the dtype of comb: a result
    do,  # [tokens, D], the dtype of o: a result
    dx,  # [tokens, N, D], the dtype of x: a result
    D: tl.constexpr,
    N: tl.constexpr,  # a power of two
    BLOCK: tl.constexpr,
):
    """All gradients of a token. Grid: tokens."""
    token = tl.program_id(0).to(tl.int64)
    dtype: tl.constexpr = x.dtype.element_ty
    n = tl.arange(0, N)
    own, mixture = _weights(post, comb, token, N, dtype)
    of_post = tl.zeros((N,), tl.float32)
    of_comb = tl.zeros((N, N), tl.float32)
    for start in range(0, D, BLOCK):
        d = start + tl.arange(0, BLOCK)
        at = (token * N + n)[:, None] * D + d[None, :]
        inside = (d < D)[None, :]
        g = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
        streams = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        output = tl.load(o + token * D + d, mask=d < D, other=0.0).to(tl.float32)
        tl.store(do + token * D + d, tl.sum(own[:, None] * g, axis=0).to(dtype), mask=d < D)
        back = tl.sum(mixture[:, :, None] * g[None, :, :], axis=1)
        tl.store(dx + at, back.to(dtype), mask=inside)
        of_post += tl.sum(g * output[None, :], axis=1)
        of_comb += tl.sum(streams[:, None, :] * g[None, :, :], axis=2)
    tl.store(dpost + token * N + n, of_post.to(dpost.dtype.element_ty))
    inner = n[:, None] * N + n[None, :]
    tl.store(dcomb + token * N * N + inner, of_comb.to(dcomb.dtype.element_ty))
