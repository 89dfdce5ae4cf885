"""A double of torch_npu's operators on a CPU: their true schemas, what their documentation says, and its limits.

`install` defines ``torch.ops.npu`` from `schemas.json`. Every operator is computed in float32 and rounded once, since
the documentation names no other rounding; what it does not allow is a `LimitError`. What it leaves open is made to
hurt: memory of groups without rows is NaN. No operator has a gradient: some have none on a device either.

The documentation is that of torch_npu 2.13 (``torch_npu/_op_plugin_docs.py``); shapes of results are those of its
meta functions (`test_double`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tests.ascend.extract import DOUBLED, OPERATORS, schema_of

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_DOUBLES: dict[str, Callable[..., Any]] = {}


class LimitError(RuntimeError):
    """A call that the schema allows and the documentation does not."""


def limit(kept: object, said: str) -> None:
    if not kept:
        raise LimitError(said)


def double(function: Callable[..., Any]) -> Callable[..., Any]:
    _DOUBLES[function.__name__] = function
    return function


@cache
def install() -> None:
    """Define the operators in this process, once."""
    library: Any = torch.library.Library("npu", "DEF")
    for name in OPERATORS:
        schema = schema_of(name)
        assert schema is not None, f"torch_npu {DOUBLED} has no {name}"
        library.define(schema)
        # Autograd would look into it, and find gradients that no operator has.
        library.impl(name, torch.no_grad()(_DOUBLES[name]), "CPU")
    install.library = library  # type: ignore[attr-defined] - operators go with it


def floats(name: str, *tensors: Tensor, alike: bool = True) -> None:
    for tensor in tensors:
        limit(tensor.dtype in FLOATS, f"{name}: an operand is {tensor.dtype}")
        limit(not alike or tensor.dtype is tensors[0].dtype, f"{name}: operands of different dtypes")
        limit(tensor.numel(), f"{name}: an operand is empty")


def norm_operands(name: str, x: Tensor, gamma: Tensor) -> tuple[int, ...]:
    floats(name, x, gamma)
    limit(2 <= x.ndim <= 8, f"{name}: self has {x.ndim} dimensions")
    limit(
        0 < gamma.ndim < x.ndim and gamma.shape == x.shape[-gamma.ndim :], f"{name}: gamma does not fit self"
    )
    return tuple(range(-gamma.ndim, 0))


@double
def npu_rms_norm(self: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    axes = norm_operands("npu_rms_norm", self, gamma)
    rstd = torch.rsqrt(self.float().square().mean(axes, keepdim=True) + epsilon)
    return (self.float() * rstd * gamma.float()).to(self.dtype), rstd


@double
def npu_rms_norm_backward(dy: Tensor, self: Tensor, gamma: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    axes = norm_operands("npu_rms_norm_backward", self, gamma)
    limit(dy.dtype is self.dtype and dy.shape == self.shape, "npu_rms_norm_backward: dy is not like self")
    limit(
        rstd.dtype is torch.float32 and rstd.ndim == self.ndim,
        "npu_rms_norm_backward: no rstd of the forward",
    )
    normed, g = self.float() * rstd, dy.float() * gamma.float()
    dx = rstd * (g - normed * (g * normed).mean(axes, keepdim=True))
    return dx.to(self.dtype), (dy.float() * normed).flatten(0, -1 - gamma.ndim).sum(0)


@double
def npu_add_rms_norm(
    x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor]:
    floats("npu_add_rms_norm", x1, x2, gamma)
    limit(x1.shape == x2.shape, "npu_add_rms_norm: x1 and x2 have different shapes")
    total = x1 + x2
    y, rstd = npu_rms_norm(total, gamma, epsilon)
    return y, rstd, total


#: Which dimensions of x are batch, heads and positions in each layout, and where its tables may be 1.
LAYOUTS = {"BNSD": (0, 1, 2), "BSND": (0, 2, 1), "SBND": (1, 2, 0)}


def rotary_layout(x: Tensor, table: Tensor, mode: str) -> bool:
    """Whether some layout of x admits the table."""
    for batch, heads, _ in LAYOUTS.values():
        alone = {at for at in range(3) if table.shape[at] == 1 and x.shape[at] != 1}
        fits = all(table.shape[at] == x.shape[at] for at in range(4) if at not in alone)
        if not fits or not alone <= {batch, heads}:
            continue
        if mode == "half" and (not alone or heads in alone or x.shape[heads] == 1):
            if x.shape[batch] < 1000 and x.shape[heads] < 1000:
                return True
        elif {each for each in (batch, heads) if x.shape[each] > 1} <= alone:
            if x.shape[batch] * x.shape[heads] < 1000:
                return True
    return False


@double
def npu_rotary_mul(
    self: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half", rotate: Tensor | None = None
) -> Tensor:
    floats("npu_rotary_mul", self, r1, r2)
    limit(rotary_mode in ("half", "interleave"), f"npu_rotary_mul: mode {rotary_mode!r}")
    limit(rotate is None, "npu_rotary_mul: a rotate matrix has no double")
    limit(self.ndim == r1.ndim == r2.ndim == 4, "npu_rotary_mul: operands have 4 dimensions")
    limit(r1.shape == r2.shape, "npu_rotary_mul: r1 and r2 have different shapes")
    columns = self.shape[-1]
    limit(columns < 896 and columns % 2 == 0, f"npu_rotary_mul: D is {columns}")
    limit(
        rotary_layout(self, r1, rotary_mode),
        f"npu_rotary_mul: {[*r1.shape]} for {[*self.shape]}, {rotary_mode}",
    )
    limit(max(r1.abs().max(), r2.abs().max()) <= 1, "npu_rotary_mul: r1 and r2 are from -1 to 1")
    x = self.float()
    if rotary_mode == "half":
        first, second = x.chunk(2, -1)
        turned = torch.cat((-second, first), -1)
    else:
        turned = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    return (x * r1.float() + turned * r2.float()).to(self.dtype)


def swiglu_operand(name: str, x: Tensor, dim: int) -> None:
    floats(name, x)
    limit(1 <= x.ndim <= 8 and x.shape[dim] % 2 == 0, f"{name}: {[*x.shape]} along {dim}")


@double
def npu_swiglu(self: Tensor, dim: int = -1) -> Tensor:
    swiglu_operand("npu_swiglu", self, dim)
    gate, up = self.float().chunk(2, dim)
    return (functional.silu(gate) * up).to(self.dtype)


@double
def npu_swiglu_backward(grad_output: Tensor, self: Tensor, dim: int = -1) -> Tensor:
    swiglu_operand("npu_swiglu_backward", self, dim)
    floats("npu_swiglu_backward", self, grad_output)
    (gate, up), g = self.float().chunk(2, dim), grad_output.float()
    limit(g.shape == gate.shape, "npu_swiglu_backward: grad_output is not like the product")
    dgate = torch.ops.aten.silu_backward(g * up, gate)
    return torch.cat((dgate, g * functional.silu(gate)), dim).to(self.dtype)


@double
def npu_moe_token_permute(
    tokens: Tensor, indices: Tensor, num_out_tokens: int | None = None, padded_mode: bool = False
) -> tuple[Tensor, Tensor]:
    limit(tokens.dtype in FLOATS and tokens.ndim == 2, "npu_moe_token_permute: tokens are 2-D, 16 or 32 bits")
    limit(indices.dtype in (torch.int32, torch.int64), f"npu_moe_token_permute: indices are {indices.dtype}")
    limit(indices.ndim in (1, 2), "npu_moe_token_permute: indices have one or two dimensions")
    limit(
        not padded_mode and not num_out_tokens,
        "npu_moe_token_permute: padded or dropped tokens have no double",
    )
    limit(indices.numel() < 16777215, "npu_moe_token_permute: fewer than 16777215 indices")
    top_k = indices.shape[1] if indices.ndim == 2 else 1
    limit(top_k <= 512, f"npu_moe_token_permute: topK is {top_k}")
    limit(
        not indices.numel() or (indices.min() >= 0 and indices.max() < 16777215),
        "npu_moe_token_permute: range",
    )
    order = indices.reshape(-1).argsort(stable=True)
    places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
    return tokens.index_select(0, order // top_k), places.int()


@double
def npu_moe_token_unpermute(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    probs: Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: list[int] | None = None,
) -> Tensor:
    name = "npu_moe_token_unpermute"
    floats(name, permuted_tokens)
    limit(permuted_tokens.ndim == 2 and sorted_indices.ndim == 1, f"{name}: 2-D tokens, 1-D indices")
    limit(sorted_indices.dtype is torch.int32, f"{name}: sorted_indices are {sorted_indices.dtype}")
    limit(not padded_mode and restore_shape is None, f"{name}: padded_mode is not supported")
    limit(len(sorted_indices) == len(permuted_tokens), f"{name}: an index for each row")
    limit(len(sorted_indices.unique()) == len(sorted_indices), f"{name}: indices repeat")
    limit(
        sorted_indices.min() >= 0 and sorted_indices.max() < len(sorted_indices),
        f"{name}: indices out of range",
    )
    top_k = 1
    if probs is not None:
        floats(name, probs)
        limit(probs.ndim == 2, f"{name}: probs are 2-D")
        top_k = probs.shape[1]
        limit(top_k <= 512 and probs.numel() == len(sorted_indices), f"{name}: probs {[*probs.shape]}")
    rows = (
        permuted_tokens.float()
        .index_select(0, sorted_indices.long())
        .view(-1, top_k, permuted_tokens.shape[1])
    )
    return (rows if probs is None else rows * probs.float()[..., None]).sum(1).to(permuted_tokens.dtype)


def groups_of(
    name: str, group_list: Tensor | None, kind: int | None, count: int | None, total: int
) -> list[int]:
    """The size of each group; reads what a device would not have to."""
    limit(group_list is not None, f"{name}: group_list must be given")
    assert group_list is not None
    limit(group_list.dtype is torch.int64 and group_list.ndim == 1, f"{name}: group_list is 1-D int64")
    limit(len(group_list) <= 1024, f"{name}: {len(group_list)} groups")
    limit(count is None or len(group_list) == count, f"{name}: {len(group_list)} groups, {count} matrices")
    limit(kind in (0, 1), f"{name}: group_list_type {kind}")
    if kind == 1:
        limit(len(group_list) != 1, f"{name}: one count alone")
        sizes = group_list.tolist()
    else:
        sizes = group_list.diff(prepend=group_list.new_zeros(1)).tolist()
    limit(all(size >= 0 for size in sizes), f"{name}: groups {sizes}")
    limit(sum(sizes) == total, f"{name}: groups hold {sum(sizes)} of {total}")
    return sizes


@double
def npu_grouped_matmul(
    x: list[Tensor],
    weight: list[Tensor],
    *,
    group_list: Tensor | None = None,
    split_item: int | None = 0,
    group_type: int | None = None,
    group_list_type: int | None = 0,
    act_type: int | None = 0,
    **others: Any,
) -> list[Tensor]:
    name = "npu_grouped_matmul"
    given = [key for key, value in others.items() if value is not None]
    limit(not given, f"{name}: {given} have no double")
    limit(act_type == 0, f"{name}: only quantised products have an activation")
    limit(group_type in (0, 2), f"{name}: group_type {group_type} has no double, or is not supported")
    limit(split_item in (2, 3), f"{name}: group_type {group_type} has split_item 2 or 3, not {split_item}")
    limit(len(x) == len(weight) == 1, f"{name}: one x and one weight")
    (left,), (right,) = x, weight
    floats(name, left, right)
    limit(left.ndim == 2, f"{name}: x is 2-D")
    if group_type == 0:
        limit(right.ndim == 3 and left.shape[1] == right.shape[1], f"{name}: weight is [g, k, n]")
        limit(left.is_contiguous(), f"{name}: x is not transposed, and contiguous")
        turned = right.transpose(1, 2).is_contiguous()
        limit(turned or right.is_contiguous(), f"{name}: weight is contiguous, or transposed")
        last = right.shape[1] if turned else right.shape[2]
        limit(max(left.shape[1], last) < 65536, f"{name}: inner axes are below 65536")
        sizes = groups_of(name, group_list, group_list_type, right.shape[0], left.shape[0])
        parts = left.float().split(sizes)
        made = [part @ matrix for part, matrix in zip(parts, right.float(), strict=True)]
        return [torch.cat(made).to(left.dtype)]
    limit(right.ndim == 2 and left.shape[1] == right.shape[0], f"{name}: x [m, k] and weight [k, n]")
    limit(left.t().is_contiguous(), f"{name}: with group_type 2 x is transposed")
    limit(right.is_contiguous(), f"{name}: with group_type 2 weight is not transposed")
    limit(max(left.shape[0], right.shape[1]) < 65536, f"{name}: inner axes are below 65536")
    sizes = groups_of(name, group_list, group_list_type, None, right.shape[0])
    pairs = zip(left.float().split(sizes, 1), right.float().split(sizes), strict=True)
    return [torch.stack([a @ b if len(b) else (a @ b).fill_(torch.nan) for a, b in pairs]).to(left.dtype)]


def entropy_operands(name: str, logits: Tensor, target: Tensor, reduction: str) -> None:
    floats(name, logits)
    limit(logits.ndim == 2 and 0 < logits.shape[0] <= 200_000, f"{name}: logits {[*logits.shape]}")
    limit(target.dtype is torch.int64 and target.shape == logits.shape[:1], f"{name}: target is int64 [N]")
    limit(target.min() >= 0 and target.max() < logits.shape[1], f"{name}: a target is no class")
    limit(reduction in ("mean", "sum", "none"), f"{name}: reduction {reduction!r}")


@double
def npu_cross_entropy_loss(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    lse_square_scale_for_zloss: float = 0.0,
    return_zloss: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    name = "npu_cross_entropy_loss"
    entropy_operands(name, input, target, reduction)
    limit(weight is None and ignore_index < 0 and not label_smoothing, f"{name}: what has no double")
    limit(not lse_square_scale_for_zloss and not return_zloss, f"{name}: z-loss is not supported yet")
    log_prob = functional.log_softmax(input.float(), -1)
    loss = -log_prob.gather(1, target[:, None])[:, 0]
    if reduction != "none":
        loss = (loss.mean() if reduction == "mean" else loss.sum()).reshape(1)
    loss = loss.to(input.dtype)
    return loss, log_prob.to(input.dtype), torch.empty_like(loss), input.new_empty(len(input))


@double
def npu_cross_entropy_loss_backward(
    grad_loss: Tensor,
    log_prob: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    grad_zloss: Tensor | None = None,
    lse_for_zloss: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    lse_square_scale_for_zloss: float = 0.0,
) -> Tensor:
    name = "npu_cross_entropy_loss_backward"
    entropy_operands(name, log_prob, target, reduction)
    limit(weight is grad_zloss is lse_for_zloss is None, f"{name}: what has no double")
    limit(grad_loss.dtype is log_prob.dtype, f"{name}: grad_loss is {grad_loss.dtype}")
    limit(grad_loss.shape == (log_prob.shape[:1] if reduction == "none" else (1,)), f"{name}: grad_loss")
    found = log_prob.float().exp()
    found.scatter_add_(1, target[:, None], -torch.ones_like(target, dtype=torch.float32)[:, None])
    found *= grad_loss.float()[:, None] if reduction == "none" else grad_loss.float()
    return (found / len(found) if reduction == "mean" else found).to(log_prob.dtype)


def fused_operands(
    name: str, q: Tensor, k: Tensor, v: Tensor, heads: int, layout: str, ends: list[int] | None, same: object
) -> None:
    floats(name, q, k, v)
    limit(layout == "TND" and ends is not None and ends == same, f"{name}: what has no double")
    limit(heads == q.shape[1] <= 256 and not q.shape[1] % k.shape[1], f"{name}: {heads} heads")
    limit(q.ndim == 3 and k.shape == v.shape and q.shape[::2] == k.shape[::2], f"{name}: shapes")
    limit(0 < q.shape[2] <= 768 and q.shape[0] <= 1 << 20, f"{name}: sizes")
    limit(ends and len(ends) <= 1024 and ends[-1] == len(q), f"{name}: {len(ends or ())} ends")
    limit(ends == sorted(ends or ()), f"{name}: ends that are no sums")


def segments(ends: list[int]) -> list[slice]:
    return [slice(first, end) for first, end in zip([0, *ends], ends, strict=False)]


@double
def npu_fusion_attention(
    query: Tensor, key: Tensor, value: Tensor, head_num: int, input_layout: str, pse: Tensor | None = None,
    padding_mask: Tensor | None = None, atten_mask: Tensor | None = None, scale: float = 1.0,
    keep_prob: float = 1.0, pre_tockens: int = 0, next_tockens: int = 0, inner_precise: int = 0,
    prefix: list[int] | None = None, actual_seq_qlen: list[int] | None = None,
    actual_seq_kvlen: list[int] | None = None, *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int, int]:  # fmt: skip
    name = "npu_fusion_attention"
    ends = actual_seq_qlen or []
    fused_operands(name, query, key, value, head_num, input_layout, actual_seq_qlen, actual_seq_kvlen)
    plain = pse is padding_mask is atten_mask is prefix is None and keep_prob == 1 and not inner_precise
    limit(plain and not rest, f"{name}: what has no double")
    largest, total = (query.new_full((*query.shape[:2], 8), torch.nan, dtype=torch.float32) for _ in range(2))
    y = torch.full_like(query, torch.nan)
    groups = query.shape[1] // key.shape[1]
    for part in segments(ends):
        q, k, v = (each[part].float() for each in (query, key, value))
        scores = torch.einsum("qhd,khd->qhk", q, k.repeat_interleave(groups, 1)) * scale
        largest[part] = scores.amax(-1, keepdim=True)
        total[part] = (scores - scores.amax(-1, keepdim=True)).exp().sum(-1, keepdim=True)
        y[part] = torch.einsum("qhk,khd->qhd", scores.softmax(-1), v.repeat_interleave(groups, 1)).to(y.dtype)
    return y, largest, total, query.new_empty(0), 0, 0, 0


@double
def npu_fusion_attention_grad(
    query: Tensor, key: Tensor, value: Tensor, dy: Tensor, head_num: int, input_layout: str, *,
    softmax_max: Tensor | None = None, softmax_sum: Tensor | None = None, attention_in: Tensor | None = None,
    scale_value: float = 1.0, actual_seq_qlen: list[int] | None = None,
    actual_seq_kvlen: list[int] | None = None, **rest: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    name = "npu_fusion_attention_grad"
    ends = actual_seq_qlen or []
    fused_operands(name, query, key, value, head_num, input_layout, actual_seq_qlen, actual_seq_kvlen)
    limit(not rest, f"{name}: what has no double")
    limit(dy.shape == query.shape and dy.dtype is query.dtype and dy.is_contiguous(), f"{name}: dy")
    limit(None not in (softmax_max, softmax_sum, attention_in), f"{name}: what the forward has saved")
    assert softmax_max is not None and softmax_sum is not None and attention_in is not None
    groups = query.shape[1] // key.shape[1]
    dq, dk, dv = (torch.full_like(each, torch.nan) for each in (query, key, value))
    for part in segments(ends):
        q, k, v, g, y = (each[part].float() for each in (query, key, value, dy, attention_in))
        k, v = (each.repeat_interleave(groups, 1) for each in (k, v))
        scores = torch.einsum("qhd,khd->qhk", q, k) * scale_value
        p = (scores - softmax_max[part][..., :1]).exp() / softmax_sum[part][..., :1]
        dp = torch.einsum("qhd,khd->qhk", g, v)
        ds = p * (dp - (g * y).sum(-1, keepdim=True)) * scale_value
        dq[part] = torch.einsum("qhk,khd->qhd", ds, k).to(dq.dtype)
        of_keys = torch.einsum("qhk,qhd->khd", ds, q), torch.einsum("qhk,qhd->khd", p, g)
        for into, found in zip((dk, dv), of_keys, strict=True):
            into[part] = found.unflatten(1, (-1, groups)).sum(2).to(into.dtype)
    return dq, dk, dv, query.new_empty(0), query.new_empty(0)


@double
def npu_moe_gating_top_k_softmax(
    x: Tensor, finished: Tensor | None = None, k: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    name = "npu_moe_gating_top_k_softmax"
    floats(name, x)
    limit(x.ndim in (2, 3) and finished is None, f"{name}: x {[*x.shape]}, or finished, which has no double")
    limit(0 < k <= min(1024, x.shape[-1]), f"{name}: k is {k}")
    largest, indices = functional.softmax(x.float(), -1).topk(k, -1)
    rows = torch.arange(indices.numel(), dtype=torch.int32).view(k, -1).t().reshape(indices.shape)
    return largest.to(x.dtype), indices.int(), rows
