"""What the gated delta rule computes, position by position."""

from __future__ import annotations

from itertools import pairwise

import torch

__all__ = ["channel_decay", "scalar_decay"]

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
    """Return the outputs and the final states of the gated delta rule (Gated DeltaNet, arXiv 2412.06464).

    For each sample and each head of the values, from the state ``S_0`` of ``[key_dim, value_dim]``:

        q_t = key_dim ** -0.5 * query_t,  k_t = key_t
        S'_t = exp(g_t) * S_(t-1)
        S_t = S'_t + k_t (beta_t * (v_t - S'_t^T k_t))^T
        o_t = S_t^T q_t

    With l2 normalisation, ``x * rsqrt(sum(x * x) + 1e-6)`` of query and key comes first.

    Args:
        query: ``[rows, positions, key heads, key_dim]``; a head serves consecutive heads of the values.
        key: the same shape.
        value: ``[rows, positions, heads, value_dim]``.
        g: ``[rows, positions, heads]``, the logarithm of the decay: not above 0.
        beta: ``[rows, positions, heads]``, how much of the difference is written.
        initial_state: ``[samples, heads, key_dim, value_dim]``; None: zeros.
        output_final_state: whether to return the final states.
        use_qk_l2norm_in_kernel: whether to normalise query and key.
        cu_seqlens: ``[samples + 1]``, integers: 0, then the end of each sample, counted through all rows; the
            last is ``rows * positions``. A sample may be empty. None: each row is a sample.

    Returns:
        ``[rows, positions, heads, value_dim]`` in the dtype of ``query``, and the final states in float32, of
        the shape of ``initial_state``, or None. Computed in float32; in float64 if ``query`` is that.
    """
    options = (initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens)
    return _recurrence(query, key, value, g.unsqueeze(3), beta, *options)


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
    """Return the outputs and the final states of Kimi Delta Attention (arXiv 2510.26692).

    As `scalar_decay`, but each channel of the keys has a decay of its own: ``S'_t = Diag(exp(g_t)) S_(t-1)``.

    Args:
        query: ``[rows, positions, heads, key_dim]``.
        key: the same shape.
        value: ``[rows, positions, heads, value_dim]``.
        g: ``[rows, positions, heads, key_dim]``, the logarithms of the decays: not above 0.
        beta: as for `scalar_decay`, and so are all others.

    Returns:
        as `scalar_decay`.
    """
    options = (initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens)
    return _recurrence(query, key, value, g, beta, *options)


def _recurrence(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None,
    output_final_state: bool,
    use_qk_l2norm_in_kernel: bool,
    cu_seqlens: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The recurrence for ``g`` of ``[rows, positions, heads, key_dim or 1]``."""
    rows, positions = query.shape[:2]
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    groups = value.shape[2] // query.shape[2]
    q, k, v, decay, write = (tensor.flatten(0, 1).to(dtype) for tensor in (query, key, value, g, beta))
    if use_qk_l2norm_in_kernel:
        q, k = (tensor * (tensor.square().sum(-1, keepdim=True) + _EPS).rsqrt() for tensor in (q, k))
    q, k = (tensor.repeat_interleave(groups, dim=1) for tensor in (q * q.shape[-1] ** -0.5, k))
    of_rows = [row * positions for row in range(rows + 1)]
    ends = of_rows if cu_seqlens is None else cu_seqlens.tolist()
    outputs, states = [], []
    for sample, (start, end) in enumerate(pairwise(ends)):
        if initial_state is None:
            state = v.new_zeros(v.shape[1], q.shape[-1], v.shape[-1])
        else:
            state = initial_state[sample].to(dtype)
        for t in range(start, end):
            state = state * decay[t].exp()[:, :, None]
            known = torch.einsum("hkv,hk->hv", state, k[t])
            delta = write[t][:, None] * (v[t] - known)
            state = state + torch.einsum("hk,hv->hkv", k[t], delta)
            outputs.append(torch.einsum("hkv,hk->hv", state, q[t]))
        states.append(state)
    output = torch.stack(outputs) if outputs else v[:0]
    return output.to(query.dtype).view_as(value), torch.stack(states) if output_final_state else None
