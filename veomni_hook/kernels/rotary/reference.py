"""Rotary embedding by definition, one function a variant: what recognisers look for, and what kernels equal.

Queries and keys are ``[batch, heads, length, head_dim]`` or ``[batch, length, heads, head_dim]``; `cos` and
`sin` have one dimension less, and `unsqueeze_dim` says which. A rotation turns two numbers that belong
together: ``y1 = x1*cos - x2*sin, y2 = x2*cos + x1*sin``. Variants differ in where the two stand ("halves":
``x1`` is the first half of head_dim; "pairs": neighbours), in the width of `cos`, in what is left as it is,
and in casts. Functions in between are parts of several formulas; ``variant__words`` is `variant` in other
words.
"""

from __future__ import annotations

import torch

Tensor = torch.Tensor
Tensors = tuple[torch.Tensor, torch.Tensor]


def quarter_turn_of_pairs(x: Tensor) -> Tensor:
    """``(x1, x2) -> (-x2, x1)`` for neighbours in the last dimension."""
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


def turned_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the halves of the last dimension."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin


def turned_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate neighbours in the last dimension."""
    return x * cos + quarter_turn_of_pairs(x) * sin


def turned_couples(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`turned_pairs` by way of a dimension of pairs."""
    first, second = x.view(*x.shape[:-1], -1, 2).unbind(dim=-1)
    return x * cos + torch.stack((-second, first), dim=-1).flatten(-2) * sin


def turned_pairs_fp32(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate neighbours in float32; the turned numbers are cast on their own."""
    return x.float() * cos + quarter_turn_of_pairs(x).float() * sin


def turned_leading_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate as many leading numbers as `cos` is wide, as halves; the rest stays."""
    width = cos.shape[-1]
    return torch.cat((turned_halves(x[..., :width], cos, sin), x[..., width:]), dim=-1)


def turned_leading_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate as many leading numbers as `cos` is wide, as pairs; the rest stays."""
    width = cos.shape[-1]
    return torch.cat((turned_pairs(x[..., :width], cos, sin), x[..., width:]), dim=-1)


def pairs_turned_into_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate neighbours and put all first numbers in front of all second ones; `cos` has half the width."""
    first, second = x[..., ::2], x[..., 1::2]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def first_half_for_pairs(table: Tensor) -> Tensor:
    """Each number of the first half twice: a table for halves as one for pairs."""
    return table[..., : table.shape[-1] // 2].repeat_interleave(2, dim=-1)


def half_split(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Tensors:
    """Halves over the full head_dim, in the dtype that the operands promote to."""
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return turned_halves(q, cos, sin), turned_halves(k, cos, sin)


def half_split_cast_out(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Tensors:
    """As `half_split`; results are cast back to the dtypes of `q` and `k`."""
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return turned_halves(q, cos, sin).to(q.dtype), turned_halves(k, cos, sin).to(k.dtype)


def half_split_fp32(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Tensors:
    """As `half_split` with all operands in float32; results are cast back."""
    cos, sin = cos.unsqueeze(unsqueeze_dim).float(), sin.unsqueeze(unsqueeze_dim).float()
    return turned_halves(q.float(), cos, sin).to(q.dtype), turned_halves(k.float(), cos, sin).to(k.dtype)


def half_split_fp32_as_query(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> Tensors:
    """As `half_split` with `q` and `k` in float32; both results get the dtype of `q`."""
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return turned_halves(q.float(), cos, sin).to(q.dtype), turned_halves(k.float(), cos, sin).to(q.dtype)


def half_split_reversed(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Tensors:
    """Halves turned the other way: ``y1 = x1*cos + x2*sin, y2 = x2*cos - x1*sin``."""
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return turned_back(q, cos, sin), turned_back(k, cos, sin)


def turned_back(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate halves the other way."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat((x[..., half:], -x[..., :half]), dim=-1) * sin


def half_split_partial(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Tensors:
    """Halves over as many leading numbers of head_dim as `cos` is wide; the rest stays."""
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return turned_leading_halves(q, cos, sin), turned_leading_halves(k, cos, sin)


def half_split_partial_optional_key(
    q: Tensor, cos: Tensor, sin: Tensor, k: Tensor | None = None, unsqueeze_dim: int = 1
) -> Tensor | Tensors:
    """As `half_split_partial`; only the query, and no tuple, where there is no key."""
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    turned = turned_leading_halves(q, cos, sin)
    if k is not None:
        return turned, turned_leading_halves(k, cos, sin)
    return turned


def half_split_after_prefix(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Tensors:
    """Halves over the last positions, as many as `cos` has; positions in front of them stay."""
    return turned_after_prefix(q, cos, sin, q.shape[-2]), turned_after_prefix(k, cos, sin, q.shape[-2])


def turned_after_prefix(x: Tensor, cos: Tensor, sin: Tensor, length: int) -> Tensor:
    """Rotate the halves of all but the first ``length - sin.shape[-2]`` positions."""
    prefix, rest = torch.split(x, [length - sin.shape[-2], sin.shape[-2]], dim=-2)
    return torch.cat((prefix, turned_halves(rest, cos, sin)), dim=-2)


def half_split_gathered(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor, unsqueeze_dim: int = 1
) -> Tensors:
    """As `half_split`; `cos` and `sin` are tables ``[positions, head_dim]`` that `position_ids` indexes."""
    cos, sin = cos[position_ids].unsqueeze(unsqueeze_dim), sin[position_ids].unsqueeze(unsqueeze_dim)
    return turned_halves(q, cos, sin), turned_halves(k, cos, sin)


def half_split_gathered_with_value(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """As `half_split_gathered`, of the value, too."""
    cos, sin = cos[position_ids].unsqueeze(unsqueeze_dim), sin[position_ids].unsqueeze(unsqueeze_dim)
    return turned_halves(q, cos, sin), turned_halves(k, cos, sin), turned_halves(v, cos, sin)


def half_split_sections(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, mrope_section: list[int], unsqueeze_dim: int = 1
) -> Tensors:
    """As `half_split`; `cos` and `sin` are ``[3, batch, length, head_dim]``, taken by turns in sections."""
    mrope_section = mrope_section * 2
    # mypy: torch has no types for the method, and the function would be another opaque text.
    cos = torch.cat([m[i % 3] for i, m in enumerate(cos.split(mrope_section, dim=-1))], dim=-1)  # type: ignore[no-untyped-call]
    sin = torch.cat([m[i % 3] for i, m in enumerate(sin.split(mrope_section, dim=-1))], dim=-1)  # type: ignore[no-untyped-call]
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return turned_halves(q, cos, sin), turned_halves(k, cos, sin)


def half_width_halves(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Tensors:
    """Halves over the full head_dim; `cos` and `sin` have half its width."""
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return half_width_halves_single(q, cos, sin), half_width_halves_single(k, cos, sin)


def half_width_halves_single(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As `half_width_halves` for one tensor; `cos` and `sin` broadcast."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def half_width_pairs(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Tensors:
    """Pairs over the full head_dim; `cos` and `sin` have half its width."""
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return half_width_pairs_single(q, cos, sin), half_width_pairs_single(k, cos, sin)


def half_width_pairs_single(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As `half_width_pairs` for one tensor; `cos` and `sin` broadcast."""
    first, second = x[..., ::2], x[..., 1::2]
    return torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2)


def pairs(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Tensors:
    """Pairs over the full head_dim, in the dtype that the operands promote to."""
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return turned_pairs(q, cos, sin), turned_pairs(k, cos, sin)


def pairs_fp32(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Tensors:
    """As `pairs` with all operands in float32; results are cast back."""
    cos, sin = cos.unsqueeze(unsqueeze_dim).float(), sin.unsqueeze(unsqueeze_dim).float()
    return turned_couples(q.float(), cos, sin).to(q.dtype), turned_couples(k.float(), cos, sin).to(k.dtype)


def pairs_fp32_as_query(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Tensors:
    """As `pairs` with `q` and `k` in float32; both results get the dtype of `q`."""
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return turned_pairs(q.float(), cos, sin).to(q.dtype), turned_pairs(k.float(), cos, sin).to(q.dtype)


def pairs_fp32_as_query__cast_after_turn(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> Tensors:
    """`pairs_fp32_as_query` in other words: the turned numbers are cast on their own."""
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return turned_pairs_fp32(q, cos, sin).to(q.dtype), turned_pairs_fp32(k, cos, sin).to(q.dtype)


def pairs_fp32_broadcast(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Tensors:
    """As `pairs` with `q` and `k` in float32 and results cast back; `cos` and `sin` broadcast."""
    return turned_couples(q.float(), cos, sin).to(q.dtype), turned_couples(k.float(), cos, sin).to(k.dtype)


def pairs_partial(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Tensors:
    """Pairs over as many leading numbers of head_dim as `cos` is wide; the rest stays."""
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return turned_leading_pairs(q, cos, sin), turned_leading_pairs(k, cos, sin)


def pairs_repeated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Tensors:
    """Pairs over the full head_dim; of `cos` and `sin` the first half counts, each number for a pair."""
    cos = first_half_for_pairs(cos.unsqueeze(unsqueeze_dim))
    sin = first_half_for_pairs(sin.unsqueeze(unsqueeze_dim))
    return turned_pairs(q, cos, sin), turned_pairs(k, cos, sin)


def pairs_repeated_fp32(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Tensors:
    """As `pairs_repeated` with `q` and `k` in float32; both results get the dtype of `q`."""
    cos = first_half_for_pairs(cos.unsqueeze(unsqueeze_dim))
    sin = first_half_for_pairs(sin.unsqueeze(unsqueeze_dim))
    return turned_pairs_fp32(q, cos, sin).to(q.dtype), turned_pairs_fp32(k, cos, sin).to(q.dtype)


def pairs_partial_repeated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Tensors:
    """As `pairs_repeated` over as many leading numbers of head_dim as `cos` is wide; the rest stays."""
    cos = first_half_for_pairs(cos.unsqueeze(unsqueeze_dim))
    sin = first_half_for_pairs(sin.unsqueeze(unsqueeze_dim))
    return turned_leading_pairs(q, cos, sin), turned_leading_pairs(k, cos, sin)


def pairs_to_halves(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Tensors:
    """Pairs in, halves out, over the full head_dim; of `cos` and `sin` the first half counts."""
    cos = cos[..., : cos.shape[-1] // 2].unsqueeze(unsqueeze_dim)
    sin = sin[..., : sin.shape[-1] // 2].unsqueeze(unsqueeze_dim)
    return pairs_turned_into_halves(q, cos, sin), pairs_turned_into_halves(k, cos, sin)


def pairs_to_halves_optional_key(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor | None]:
    """As `pairs_to_halves`; no key gives none."""
    cos = cos[..., : cos.shape[-1] // 2].unsqueeze(unsqueeze_dim)
    sin = sin[..., : sin.shape[-1] // 2].unsqueeze(unsqueeze_dim)
    turned = pairs_turned_into_halves(k, cos, sin) if k is not None else None
    return pairs_turned_into_halves(q, cos, sin), turned


def pairs_to_halves_full_width(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> Tensors:
    """Pairs are sorted into halves, which turn by the full width of `cos` and `sin`."""
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return turned_halves(sorted_pairs(q), cos, sin), turned_halves(sorted_pairs(k), cos, sin)


def sorted_pairs(x: Tensor) -> Tensor:
    """All first numbers of pairs, then all second ones; ``[batch, heads, length, head_dim]``."""
    batch, heads, length, width = x.shape
    split = x.view(batch, heads, length, width // 2, 2)
    return split.transpose(4, 3).reshape(batch, heads, length, width)


def pairs_matrix(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Tensors:
    """Each pair times the matrix ``[[cos, -sin], [sin, cos]]``; of `cos` and `sin` the first half counts."""
    rotation = rotation_matrices(cos, sin).unsqueeze(unsqueeze_dim)
    return times_matrices(q, rotation), times_matrices(k, rotation)


def rotation_matrices(cos: Tensor, sin: Tensor) -> Tensor:
    """``[..., width / 2, 2, 2]`` of the first half of tables ``[..., width]``."""
    width = cos.shape[-1]
    cos, sin = cos.narrow(-1, 0, width // 2), sin.narrow(-1, 0, width // 2)
    return torch.stack((cos, -sin, sin, cos), dim=-1).view(*cos.shape, 2, 2)


def times_matrices(x: Tensor, rotation: Tensor) -> Tensor:
    """Pairs of ``[batch, heads, length, head_dim]`` as rows times matrices."""
    return (x.reshape(*x.shape[:-1], -1, 1, 2) * rotation).sum(5).flatten(3)


def complex_pairs(q: Tensor, k: Tensor, freqs: Tensor, unsqueeze_dim: int = 2) -> Tensors:
    """Pairs in float32 as complex numbers times `freqs` ``[batch, length, head_dim / 2]``; cast back."""
    freqs = freqs.unsqueeze(unsqueeze_dim)
    return times_complex(q, freqs), times_complex(k, freqs)


def complex_pairs_moved(q: Tensor, k: Tensor, freqs: Tensor, unsqueeze_dim: int = 1) -> Tensors:
    """As `complex_pairs`; `freqs` is brought to the device of `q`."""
    freqs = freqs.unsqueeze(unsqueeze_dim).to(as_complex(q).device)
    return times_complex(q, freqs), times_complex(k, freqs)


def as_complex(x: Tensor) -> Tensor:
    """Neighbours in the last dimension as float32 complex numbers."""
    return torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))


def times_complex(x: Tensor, freqs: Tensor) -> Tensor:
    """Pairs as complex numbers times `freqs`, in the dtype of `x`."""
    return torch.view_as_real(as_complex(x) * freqs).flatten(3).type_as(x)


def half_split_single(x: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Tensor:
    """`half_split` of one tensor."""
    return turned_halves(x, cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim))


def half_split_first_positions_single(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Halves of one tensor ``[batch, heads, length, head_dim]``; of broadcasting tables as many positions."""
    cos, sin = cos[:, :, : x.shape[-2], :], sin[:, :, : x.shape[-2], :]
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def half_split_of_angles_fp32_single(x: Tensor, angles: Tensor) -> Tensor:
    """Halves of one ``[1, length, heads, head_dim]`` by angles ``[length, head_dim / 2]``, in float32."""
    cos = angles.cos().unsqueeze(1).repeat(1, 1, 2).unsqueeze(0).float()
    sin = angles.sin().unsqueeze(1).repeat(1, 1, 2).unsqueeze(0).float()
    return turned_halves(x.float(), cos, sin).to(x.dtype)


def pairs_doubled_single(x: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 2) -> Tensor:
    """Pairs of one ``[batch, length, heads, head_dim]``; tables of half the width, a number a pair."""
    cos = cos.unsqueeze(unsqueeze_dim).repeat_interleave(2, 3)
    sin = sin.unsqueeze(unsqueeze_dim).repeat_interleave(2, 3)
    turned = torch.stack((-x[:, :, :, 1::2], x[:, :, :, ::2]), dim=-1).flatten(-2)
    return x * cos + turned * sin


def pairs_trailing_fp32_single(x: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Tensor:
    """Pairs over the trailing numbers of one tensor, in float32; tables of half the rotated width."""
    cos = cos.repeat_interleave(2, dim=-1).unsqueeze(unsqueeze_dim)
    sin = sin.repeat_interleave(2, dim=-1).unsqueeze(unsqueeze_dim)
    kept, rest = x[..., : -cos.shape[-1]], x[..., -cos.shape[-1] :]
    return torch.cat((kept, turned_pairs_fp32(rest, cos, sin).to(x.dtype)), dim=-1)


def pairs_partial_fp64_single(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Pairs over the leading numbers of one tensor, in float64; `cos` and `sin` broadcast."""
    wide = x.to(torch.float64)
    cos, sin = cos.to(wide), sin.to(wide)
    width = cos.shape[-1]
    return torch.cat((turned_couples(wide[..., :width], cos, sin), wide[..., width:]), dim=-1).to(x.dtype)


def half_split_packed_heads(x: Tensor, tables: Tensor, num_heads: int, head_size: int) -> Tensor:
    """Halves of every head of ``[batch, length, num_heads * head_size]``.

    `tables` holds cos and sin, ``[2, length or more, 1, 1, head_size]``.
    """
    batch, length = x.shape[0], x.shape[1]
    x = x.view(batch, length, num_heads, head_size).transpose(0, 1)
    cos, sin = tables[0, :length, ...], tables[1, :length, ...]
    first, second = x[..., : head_size // 2], x[..., head_size // 2 :]
    turned = x * cos + torch.cat((-second, first), dim=first.ndim - 1) * sin
    return turned.transpose(0, 1).view(batch, length, num_heads * head_size)


def sections(freqs: Tensor, mrope_section: list[int]) -> Tensor:
    """One table of three, ``[3, ...]``: sections of the last dimension come from them by turns."""
    chunks = freqs.split(mrope_section, dim=-1)  # type: ignore[no-untyped-call]
    return torch.cat([chunk[i % 3] for i, chunk in enumerate(chunks)], dim=-1)
