"""The gated delta rule chunk by chunk with torch's products, for all samples of a batch at once.

Within a chunk the updates of the state are solved together (the UT transform: Gated DeltaNet, arXiv
2412.06464, section 3.3). The scan over chunks takes as many steps as the longest sample has chunks, and only
it depends on the order of chunks.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch

from veomni_hook.kernels.gated_delta_rule.chunks import LENGTH, Chunks, chunks_of

__all__ = ["normalised", "scalar_decay", "scan"]

_EPS = 1e-6


def scalar_decay(
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
    """Return the outputs and the final states; see `reference.scalar_decay`. Saved: what autograd saves."""
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
    groups = value.shape[2] // query.shape[2]
    q, k, v = (chunks.spread(each, dtype) for each in (query, key, value))
    decay, write = (chunks.spread(each, dtype) for each in (g, beta))
    if normalise:
        q, k = normalised(q), normalised(k)
    q = q * q.shape[-1] ** -0.5
    transposed = k.transpose(2, 3)
    scores, overlaps = (_by_head(each @ transposed, groups) for each in (q, k))
    q, k = _by_head(q, groups), _by_head(k, groups)

    total = decay.cumsum(2)
    later = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=q.device).triu(1)
    between = (total.unsqueeze(3) - total.unsqueeze(2)).masked_fill(later, float("-inf")).exp()
    grown, write = total.exp().unsqueeze(3), write.unsqueeze(3)
    # Row i: what the writes before i have changed of what i reads. The diagonal is not read.
    system = overlaps * between * write
    written = torch.cat((v * write, k * (write * grown)), dim=3)
    solved = torch.linalg.solve_triangular(system, written, upper=False, unitriangular=True)
    values, read = solved.split((v.shape[3], k.shape[3]), dim=3)

    kept = (total[:, :, -1:] - total).exp().unsqueeze(3)
    start = None if initial_state is None else initial_state.to(dtype)
    whole = total[:, :, -1, None, None].exp()
    parts = (values, read, (k * kept).transpose(2, 3), whole, q * grown, scores * between)
    output, final = scan(parts, start, chunks)
    return chunks.collect(output, query.dtype), final


def scan(
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
    sizes = [each * heads for each in chunks.active]
    # One split: its backward joins the parts' gradients once, where slices would add as many full tensors.
    by_step = zip(sizes, *(torch.split(each.flatten(0, 1), sizes) for each in parts), strict=True)
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


def normalised(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``x * rsqrt(sum(x * x) + 1e-6)`` over the last dimension."""
    return tensor * (tensor.square().sum(-1, keepdim=True) + _EPS).rsqrt()


def _by_head(tensor: torch.Tensor, groups: int) -> torch.Tensor:
    return tensor if groups == 1 else tensor.repeat_interleave(groups, dim=1)
