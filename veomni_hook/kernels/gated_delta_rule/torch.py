"""The gated delta rule chunk by chunk with torch's products, for all samples of a batch at once.

Within a chunk the updates of the state are solved together (the UT transform: Gated DeltaNet, arXiv
2412.06464, section 3.3). The scan over chunks takes as many steps as the longest sample has chunks, and only
it depends on the order of chunks.

With a decay for each channel, a product of two positions is no product of two matrices. With any position m
between them it is one: ``exp(g_m+1 + ... + g_i)`` belongs to the later position i, and ``exp(g_j+1 + ... +
g_m)`` to the earlier one j. A chunk is halved until halves are single positions, with the last position of
the first half as m. Both exponents are sums of decays, so neither grows above 1, and no sum is subtracted
from another.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import NamedTuple

import torch

from veomni_hook.kernels.gated_delta_rule.chunks import LENGTH, Chunks, chunks_of

__all__ = ["channel_decay", "scalar_decay"]

_EPS = 1e-6


class _Decayed(NamedTuple):
    """What positions of a chunk read of each other, ``[chunks, heads, LENGTH, ...]``.

    Attributes:
        q: the queries, of every head.
        k: the keys.
        scores: how much each position reads of what others write, decayed; 0 for later ones.
        overlaps: the same for keys.
        grown: the decay up to and with each position, of ``[key_dim or 1]``.
        kept: the decay behind it.
        whole: the decay of the whole chunk, ``[chunks, heads, key_dim or 1, 1]``.
    """

    q: torch.Tensor
    k: torch.Tensor
    scores: torch.Tensor
    overlaps: torch.Tensor
    grown: torch.Tensor
    kept: torch.Tensor
    whole: torch.Tensor


def _rule(
    decayed: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], _Decayed],
) -> Callable[..., tuple[torch.Tensor, torch.Tensor | None]]:
    """Return the rule; ``decayed`` takes queries, keys, logarithms of decays, and heads for each key head."""

    def computed(
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
        kind, chunks = query.device.type, chunks_of(query, cu_seqlens)
        dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
        # In half precision the state would lose what a long sample has added to it.
        with torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext():
            q, k, v, decay, write = (chunks.spread(tensor, dtype) for tensor in (query, key, value, g, beta))
            if use_qk_l2norm_in_kernel:
                q, k = _normalised(q), _normalised(k)
            q = q * q.shape[-1] ** -0.5
            q, k, scores, overlaps, grown, kept, whole = decayed(q, k, decay, v.shape[1] // q.shape[1])
            write = write.unsqueeze(3)
            # Row i: what the writes before i have changed of what i reads. The diagonal is not read.
            written = torch.cat((v * write, k * (write * grown)), dim=3)
            solved = torch.linalg.solve_triangular(overlaps * write, written, upper=False, unitriangular=True)
            values, read = solved.split((v.shape[3], k.shape[3]), dim=3)
            start = None if initial_state is None else initial_state.to(dtype)
            parts = (values, read, (k * kept).transpose(2, 3), whole, q * grown, scores)
            output, final = _scan(parts, start, chunks)
            return chunks.collect(output, query.dtype), final if output_final_state else None

    return computed


def _by_scalars(q: torch.Tensor, k: torch.Tensor, g: torch.Tensor, groups: int) -> _Decayed:
    transposed = k.transpose(2, 3)
    scores, overlaps = (_by_head(tensor @ transposed, groups) for tensor in (q, k))
    total = g.cumsum(2)
    later = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=q.device).triu(1)
    between = (total.unsqueeze(3) - total.unsqueeze(2)).masked_fill(later, float("-inf")).exp()
    grown, kept = total.exp().unsqueeze(3), (total[:, :, -1:] - total).exp().unsqueeze(3)
    whole = total[:, :, -1, None, None].exp()
    q, k = _by_head(q, groups), _by_head(k, groups)
    return _Decayed(q, k, scores * between, overlaps * between, grown, kept, whole)


def _by_channels(q: torch.Tensor, k: torch.Tensor, g: torch.Tensor, _groups: int) -> _Decayed:
    products, before, after = _products(torch.stack((q, k)), k, g)
    scores, overlaps = products.unbind(0)
    whole = before[:, :, -1].exp().unsqueeze(3)
    return _Decayed(q, k, scores, overlaps, before.exp(), after.exp(), whole)


#: Return what `reference` says of the variant of this name. Saved: what autograd saves.
scalar_decay, channel_decay = _rule(_by_scalars), _rule(_by_channels)


def _scan(
    parts: tuple[torch.Tensor, ...], start: torch.Tensor | None, chunks: Chunks
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output of each chunk, and the state after each sample.

    Args:
        parts: ``[chunks, heads, ...]``: of ``[LENGTH, value_dim]``, what a state of zeros would be given;
            of ``[LENGTH, key_dim]``, what is subtracted of it for each entry of the state; of ``[key_dim,
            LENGTH]``, the keys, decayed to the end of the chunk; of ``[key_dim or 1, 1]``, the decay of the
            whole chunk; of ``[LENGTH, key_dim]``, the queries, decayed from its start; of ``[LENGTH,
            LENGTH]``, how much each position reads of what others write.
        start: ``[samples, heads, key_dim, value_dim]``, or None for zeros.
        chunks: the order of chunks.

    Returns:
        ``[chunks, heads, LENGTH, value_dim]``, and the shape of ``start``.
    """
    values, read, *_ = parts
    heads = values.shape[1]
    if start is None:
        start = values.new_zeros(chunks.samples, heads, read.shape[3], values.shape[3])
    sizes = [count * heads for count in chunks.active]
    # One split: its backward joins the parts' gradients once, where slices would add as many full tensors.
    by_step = zip(sizes, *(torch.split(part.flatten(0, 1), sizes) for part in parts), strict=True)
    state, outputs, ended = chunks.in_order(start).flatten(0, 1), [], []
    for size, value, reading, writing, decay, query, weights in by_step:
        if size < state.shape[0]:
            state, done = torch.split(state, [size, state.shape[0] - size])
            ended.append(done)
        delta = torch.baddbmm(value, reading, state, alpha=-1)
        outputs.append(torch.baddbmm(query @ state, weights, delta))
        state = torch.baddbmm(state * decay, writing, delta)
    final = chunks.back_in_order(torch.cat([state, *reversed(ended)]).view(start.shape))
    output = torch.cat(outputs) if outputs else values
    return output.view(values.shape), final


def _normalised(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``x * rsqrt(sum(x * x) + 1e-6)`` over the last dimension."""
    return tensor * (tensor.square().sum(-1, keepdim=True) + _EPS).rsqrt()


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


def _by_head(tensor: torch.Tensor, groups: int) -> torch.Tensor:
    return tensor if groups == 1 else tensor.repeat_interleave(groups, dim=1)
