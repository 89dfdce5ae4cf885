"""Device code of a hyper-connection's weights; `veomni_hook.kernels.hyper_connection.triton` launches it.

K = N * D values of a token, M weights: N of the sum, and with COMB N of the output and N * N of the mixture.
Everything is computed in float32; products are three of TF32, as precise as one of float32.

project:      r = (sum_k x^2 / K + eps)^-1/2;  m = r * (x . fn)
weights:      z = m * scale + base;  post = 2 sigmoid(z_post);  comb = sinkhorn(softmax(z_comb) + eps)
collapse:     y = sum_n pre_n x_n, with pre = sigmoid(z_pre) + eps
products:     dpre_n = sum_d dy x_n
weights_backward: dz, then ds = dz * scale * r and c = -(r^2 / K) sum_m dz * scale * m. A step of Sinkhorn's
    iterations is q = p / (sum p + eps), and back dp = (dq - sum dq q) / (sum p + eps); p is computed again.
streams_gradient: dx = ds . fn + c x + pre dy
fn_gradient:  dfn = ds^T . x
"""

import triton
import triton.language as tl

__all__ = [
    "collapse",
    "fn_gradient",
    "products",
    "project",
    "streams_gradient",
    "weights",
    "weights_backward",
]


@triton.jit
def _columns(token, exists, first, N: tl.constexpr, M: tl.constexpr):
    """The places of N weights of each token, [T, N]."""
    return token[:, None] * M + first + tl.arange(0, N)[None, :], exists[:, None]


@triton.jit
def _matrices(token, exists, M: tl.constexpr, N: tl.constexpr, FIRST: tl.constexpr):
    """The places of an N x N matrix of each token, [T, N, N]."""
    inner = tl.arange(0, N)[None, :, None] * N + tl.arange(0, N)[None, None, :]
    return token[:, None, None] * M + FIRST + inner, exists[:, None, None] & (inner >= 0)


@triton.jit
def _start(z, eps):
    """softmax(z) of rows, and the first matrix of the iterations."""
    e = tl.exp(z - tl.max(z, axis=2)[:, :, None])
    p = e / tl.sum(e, axis=2)[:, :, None]
    return p, p + eps


@triton.jit
def _divisor(c, step, eps):
    """What step number ``step`` divides by: columns' sums if it is even, else rows'."""
    columns = tl.sum(c, axis=1)[:, None, :] + eps
    rows = tl.sum(c, axis=2)[:, :, None] + eps
    return tl.where(step % 2 == 0, columns + tl.zeros_like(c), rows + tl.zeros_like(c))


@triton.jit(do_not_specialize=["tokens", "eps"])
def project(
    x,  # [tokens, K]
    fn,  # [M, K]
    m,  # [tokens, M], float32: a result
    r,  # [tokens], float32: a result
    tokens,
    eps,  # of the norm
    K: tl.constexpr,
    M: tl.constexpr,
    MP: tl.constexpr,  # a power of two, at least 16 and M
    T: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The normalised projection. Grid: cdiv(tokens, T)."""
    token = tl.program_id(0).to(tl.int64) * T + tl.arange(0, T)
    exists = token < tokens
    weight = tl.arange(0, MP)
    acc = tl.zeros((T, MP), tl.float32)
    squares = tl.zeros((T,), tl.float32)
    for start in range(0, K, BLOCK):
        k = start + tl.arange(0, BLOCK)
        at = exists[:, None] & (k < K)[None, :]
        a = tl.load(x + token[:, None] * K + k[None, :], mask=at, other=0.0).to(tl.float32)
        of = (weight < M)[None, :] & (k < K)[:, None]
        b = tl.load(fn + weight[None, :] * K + k[:, None], mask=of, other=0.0).to(tl.float32)
        acc = tl.dot(a, b, acc, input_precision="tf32x3")
        squares += tl.sum(a * a, axis=1)
    scale = tl.rsqrt(squares / K + eps)
    tl.store(r + token, scale, mask=exists)
    place = token[:, None] * M + weight[None, :]
    tl.store(m + place, acc * scale[:, None], mask=exists[:, None] & (weight < M)[None, :])


@triton.jit(do_not_specialize=["tokens", "iterations", "eps"])
def weights(
    m,  # [tokens, M], float32
    base,  # [M]
    scale,  # [3]
    post,  # [tokens, N], float32: a result
    comb,  # [tokens, N, N], float32: a result
    tokens,
    iterations,
    eps,
    N: tl.constexpr,  # a power of two
    M: tl.constexpr,
    T: tl.constexpr,
):
    """The weights of a block's output and of the mixture. Grid: cdiv(tokens, T)."""
    token = tl.program_id(0).to(tl.int64) * T + tl.arange(0, T)
    exists = token < tokens
    n = tl.arange(0, N)
    at, there = _columns(token, exists, N, N, M)
    z = tl.load(m + at, mask=there, other=0.0) * tl.load(scale + 1).to(tl.float32)
    z += tl.load(base + N + n).to(tl.float32)[None, :]
    tl.store(post + token[:, None] * N + n[None, :], 2 * tl.sigmoid(z), mask=there)
    at, there = _matrices(token, exists, M, N, 2 * N)
    z = tl.load(m + at, mask=there, other=0.0) * tl.load(scale + 2).to(tl.float32)
    inner = n[:, None] * N + n[None, :]
    z += tl.load(base + 2 * N + inner).to(tl.float32)[None, :, :]
    _, c = _start(z, eps)
    for step in range(2 * iterations - 1):
        c = c / _divisor(c, step, eps)
    at, there = _matrices(token, exists, N * N, N, 0)
    tl.store(comb + at, c, mask=there)


@triton.jit
def _pre(m, base, scale, token, exists, n, eps, M: tl.constexpr):
    """The weight of stream n of each token, [T]."""
    z = tl.load(m + token * M + n, mask=exists, other=0.0) * tl.load(scale).to(tl.float32)
    return tl.sigmoid(z + tl.load(base + n).to(tl.float32)) + eps


@triton.jit(do_not_specialize=["eps"])
def collapse(
    x,  # [tokens, N, D]
    m,  # [tokens, M], float32
    base,  # [M]
    scale,  # [3], or [1]
    y,  # [tokens, D], the dtype of x: a result
    eps,
    D: tl.constexpr,
    N: tl.constexpr,  # a power of two
    M: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The weighted sum of the streams. Grid: tokens, cdiv(D, BLOCK)."""
    token = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    n = tl.arange(0, N)
    pre = _pre(m, base, scale, token, n >= 0, n, eps, M)
    at = (token * N + n)[:, None] * D + d[None, :]
    streams = tl.load(x + at, mask=(d < D)[None, :], other=0.0).to(tl.float32)
    total = tl.sum(pre[:, None] * streams, axis=0)
    tl.store(y + token * D + d, total.to(y.dtype.element_ty), mask=d < D)


@triton.jit
def products(
    x,  # [tokens, N, D]
    dy,  # [tokens, D]
    dpre,  # [tokens, N], float32: a result
    D: tl.constexpr,
    N: tl.constexpr,  # a power of two
    BLOCK: tl.constexpr,
):
    """The gradients of the sum's weights. Grid: tokens."""
    token = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, N)
    acc = tl.zeros((N, BLOCK), tl.float32)
    for start in range(0, D, BLOCK):
        d = start + tl.arange(0, BLOCK)
        at = (token * N + n)[:, None] * D + d[None, :]
        streams = tl.load(x + at, mask=(d < D)[None, :], other=0.0).to(tl.float32)
        g = tl.load(dy + token * D + d, mask=d < D, other=0.0).to(tl.float32)
        acc += streams * g[None, :]
    tl.store(dpre + token * N + n, tl.sum(acc, axis=1))


@triton.jit
def _finished(dz, m, ds, at, there, dot, factor, r, z):
    """Store dz and ds of some weights, and add to the dot product of dm and m."""
    tl.store(dz + at, z, mask=there)
    tl.store(ds + at, z * factor * r, mask=there)
    return dot + z * factor * m


@triton.jit(do_not_specialize=["tokens", "iterations", "eps"])
def weights_backward(
    m,  # [tokens, M], float32
    r,  # [tokens], float32
    base,  # [M]
    scale,  # [3], or [1]
    dpre,  # [tokens, N], float32
    dpost,  # [tokens, N], float32; not read without COMB
    dcomb,  # [tokens, N, N], float32; not read without COMB
    dz,  # [tokens, M], float32: a result
    ds,  # [tokens, M], float32: a result
    c,  # [tokens], float32: a result
    tokens,
    iterations,
    eps,
    K: tl.constexpr,
    N: tl.constexpr,  # a power of two
    M: tl.constexpr,
    COMB: tl.constexpr,
    T: tl.constexpr,
):
    """The gradients of the scaled and of the unscaled projection. Grid: cdiv(tokens, T)."""
    token = tl.program_id(0).to(tl.int64) * T + tl.arange(0, T)
    exists = token < tokens
    n = tl.arange(0, N)
    inverse = tl.load(r + token, mask=exists, other=0.0)
    small = token[:, None] * N + n[None, :]
    at, there = _columns(token, exists, 0, N, M)
    m_pre = tl.load(m + at, mask=there, other=0.0)
    factor = tl.load(scale).to(tl.float32)
    s = tl.sigmoid(m_pre * factor + tl.load(base + n).to(tl.float32)[None, :])
    g = tl.load(dpre + small, mask=there, other=0.0) * s * (1 - s)
    none = tl.zeros_like(g)
    dot = tl.sum(_finished(dz, m_pre, ds, at, there, none, factor, inverse[:, None], g), axis=1)
    if COMB:
        at, there = _columns(token, exists, N, N, M)
        m_post = tl.load(m + at, mask=there, other=0.0)
        factor = tl.load(scale + 1).to(tl.float32)
        s = tl.sigmoid(m_post * factor + tl.load(base + N + n).to(tl.float32)[None, :])
        g = tl.load(dpost + small, mask=there, other=0.0) * 2 * s * (1 - s)
        dot += tl.sum(_finished(dz, m_post, ds, at, there, none, factor, inverse[:, None], g), axis=1)

        at, there = _matrices(token, exists, M, N, 2 * N)
        m_comb = tl.load(m + at, mask=there, other=0.0)
        factor = tl.load(scale + 2).to(tl.float32)
        inner = n[:, None] * N + n[None, :]
        z = m_comb * factor + tl.load(base + 2 * N + inner).to(tl.float32)[None, :, :]
        p, first = _start(z, eps)
        own, _ = _matrices(token, exists, N * N, N, 0)
        g = tl.load(dcomb + own, mask=there, other=0.0)
        last = 2 * iterations - 2
        for back in range(2 * iterations - 1):
            step = last - back
            before = first
            for earlier in range(step):
                before = before / _divisor(before, earlier, eps)
            divisor = _divisor(before, step, eps)
            # `_divisor` without eps sums in the same direction.
            g = (g - _divisor(g * before / divisor, step, 0.0)) / divisor
        g = p * (g - tl.sum(g * p, axis=2)[:, :, None])
        none = tl.zeros_like(g)
        squares = _finished(dz, m_comb, ds, at, there, none, factor, inverse[:, None, None], g)
        dot += tl.sum(tl.sum(squares, axis=2), axis=1)
    tl.store(c + token, -dot * inverse * inverse / K, mask=exists)


@triton.jit(do_not_specialize=["tokens", "eps"])
def streams_gradient(
    x,  # [tokens, N, D]
    fn,  # [M, N * D]
    m,  # [tokens, M], float32
    base,  # [M]
    scale,  # [3], or [1]
    ds,  # [tokens, M], float32
    c,  # [tokens], float32
    dy,  # [tokens, D]
    dx,  # [tokens, N, D], the dtype of x: a result
    tokens,
    eps,
    D: tl.constexpr,
    N: tl.constexpr,
    M: tl.constexpr,
    MP: tl.constexpr,  # a power of two, at least 16 and M
    T: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The gradient of the streams. Grid: cdiv(tokens, T), N * cdiv(D, BLOCK)."""
    token = tl.program_id(0).to(tl.int64) * T + tl.arange(0, T)
    exists = token < tokens
    n = tl.program_id(1) % N
    d = tl.program_id(1) // N * BLOCK + tl.arange(0, BLOCK)
    weight = tl.arange(0, MP)
    of = (weight < M)[None, :]
    a = tl.load(ds + token[:, None] * M + weight[None, :], mask=exists[:, None] & of, other=0.0)
    at_fn = weight.to(tl.int64)[:, None] * (N * D) + n * D + d[None, :]
    b = tl.load(fn + at_fn, mask=(weight < M)[:, None] & (d < D)[None, :], other=0.0).to(tl.float32)
    total = tl.dot(a, b, input_precision="tf32x3")
    inside = exists[:, None] & (d < D)[None, :]
    at = (token * N + n)[:, None] * D + d[None, :]
    total += tl.load(c + token, mask=exists, other=0.0)[:, None] * tl.load(x + at, mask=inside, other=0.0).to(
        tl.float32
    )
    pre = _pre(m, base, scale, token, exists, n, eps, M)
    g = tl.load(dy + token[:, None] * D + d[None, :], mask=inside, other=0.0).to(tl.float32)
    total += pre[:, None] * g
    tl.store(dx + at, total.to(dx.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def fn_gradient(
    x,  # [tokens, K]
    ds,  # [tokens, M], float32
    dfn,  # [M, K], the dtype of fn: a result
    tokens,
    K: tl.constexpr,
    M: tl.constexpr,
    MP: tl.constexpr,  # a power of two, at least 16 and M
    T: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The gradient of the projection. Grid: cdiv(K, BLOCK)."""
    k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    weight = tl.arange(0, MP)
    acc = tl.zeros((MP, BLOCK), tl.float32)
    for start in range(0, tokens, T):
        token = (start + tl.arange(0, T)).to(tl.int64)
        of = (weight < M)[:, None] & (token < tokens)[None, :]
        a = tl.load(ds + token[None, :] * M + weight[:, None], mask=of, other=0.0)
        at = (token < tokens)[:, None] & (k < K)[None, :]
        b = tl.load(x + token[:, None] * K + k[None, :], mask=at, other=0.0).to(tl.float32)
        acc = tl.dot(a, b, acc, input_precision="tf32x3")
    place = weight.to(tl.int64)[:, None] * K + k[None, :]
    tl.store(dfn + place, acc.to(dfn.dtype.element_ty), mask=(weight < M)[:, None] & (k < K)[None, :])
