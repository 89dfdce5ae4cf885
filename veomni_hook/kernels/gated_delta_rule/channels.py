"""The gated delta rule with a decay for each channel, chunk by chunk with torch's products.

A product of two positions has a decay of its own for each channel, so it is no product of two matrices. With
any position m between them it is one: ``exp(g_m+1 + ... + g_i)`` belongs to the later position i, and
``exp(g_j+1 + ... + g_m)`` to the earlier one j. A chunk is halved until halves are single positions, with the
last position of the first half as m. Both exponents are sums of decays, so neither grows above 1, and no sum
is subtracted from another.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch

from veomni_hook.kernels.gated_delta_rule.chunks import Chunks, chunks_of
from veomni_hook.kernels.gated_delta_rule.torch import normalised, scan

__all__ = ["channel_decay"]


def channel_decay(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the outputs and the final states; see `reference.channel_decay`. Saved: what autograd saves."""
    operands = (query, key, value, g, beta, initial_state)
    kind = query.device.type
    # In half precision the state would lose what a long sample has added to it.
    with torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext():
        output, final = _computed(*operands, use_qk_l2norm_in_kernel, chunks_of(query, cu_seqlens))
    return output, final if output_final_state else None


def _computed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None,
    normalise: bool,
    chunks: Chunks,
) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    q, k, v, decay = (chunks.spread(each, dtype) for each in (query, key, value, g))
    write = chunks.spread(beta, dtype).unsqueeze(3)
    if normalise:
        q, k = normalised(q), normalised(k)
    q = q * q.shape[-1] ** -0.5

    products, before, after = _products(torch.stack((q, k)), k, decay)
    scores, overlaps = products.unbind(0)
    grown = before.exp()
    # Row i: what the writes before i have changed of what i reads. The diagonal is not read.
    written = torch.cat((v * write, k * (write * grown)), dim=3)
    solved = torch.linalg.solve_triangular(overlaps * write, written, upper=False, unitriangular=True)
    values, read = solved.split((v.shape[3], k.shape[3]), dim=3)

    start = None if initial_state is None else initial_state.to(dtype)
    whole = before[:, :, -1].exp().unsqueeze(3)
    parts = (values, read, (k * after.exp()).transpose(2, 3), whole, q * grown, scores)
    output, final = scan(parts, start, chunks)
    return chunks.collect(output, query.dtype), final


def _products(
    later: torch.Tensor, earlier: torch.Tensor, g: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the decayed products of positions with those not behind them, and the sums of decays.

    Args:
        later: ``[..., chunks, heads, length, channels]``; the length is a power of 2.
        earlier: ``[chunks, heads, length, channels]``.
        g: the same shape, logarithms of decays.

    Returns:
        ``[..., chunks, heads, length, length]``: ``sum_c later[i, c] * earlier[j, c] * exp(g[j+1, c] + ... +
        g[i, c])`` for ``j <= i``, else 0. Then, of the shape of ``g``, the sums of ``g`` up to and with each
        position, and behind it.
    """
    positions, channels = g.shape[2:]
    products = (later * earlier).sum(-1)[..., None, None]  # [..., blocks, 1, 1]
    before = g.unsqueeze(3)  # [chunks, heads, blocks, 1, channels]
    after = torch.zeros_like(before)
    size = 1
    while size < positions:
        first, second = before[..., ::2, :, :], before[..., 1::2, :, :]
        first_after, second_after = after[..., ::2, :, :], after[..., 1::2, :, :]
        x = (
            later.reshape(*later.shape[:-2], positions // size, size, channels)[..., 1::2, :, :]
            * second.exp()
        )
        y = (
            earlier.reshape(*earlier.shape[:-2], positions // size, size, channels)[..., ::2, :, :]
            * first_after.exp()
        )
        upper, lower = products[..., ::2, :, :], products[..., 1::2, :, :]
        upper = torch.cat((upper, torch.zeros_like(upper)), dim=-1)
        lower = torch.cat((x @ y.transpose(-1, -2), lower), dim=-1)
        products = torch.cat((upper, lower), dim=-2)
        before = torch.cat((first, first[..., -1:, :] + second), dim=-2)
        after = torch.cat((first_after + second[..., -1:, :], second_after), dim=-2)
        size *= 2
    return products.squeeze(-3), before.squeeze(2), after.squeeze(2)
