"""Routing in Triton: one pass forward, one pass backward.

`veomni_hook.kernels.moe_router.device` has the formulas. (In the softmax of the chosen, the gradient of a
logit that was not chosen is 0; upstream's rounding leaves about 1e-9: it divides by the sum of all, then by
that of the chosen.) The choice has no gradient, so the bias has none. Casts are those of the reference.

Experts are chosen one by one, by integer keys that preserve the order and, on ties, prefer the lowest index.
NaN ranks above all numbers, as in `torch.topk`; in a softmax or sum it makes every weight of its token NaN.
Experts are returned from best to worst whatever ``sorted_`` is: without it, upstream's order is unspecified.
A softmax keeps the order of logits, so the logits decide; upstream's float32 probabilities may be equal where
logits differ.

With ``indices`` (``[tokens, top_k]``, int64) the experts are given: the indices that a call returned give its
weights again, by the same code. A row must not name an expert twice, or one that does not exist.

Saved: indices, and the chosen logits (all logits for a softmax of all). Mutates: nothing. Deterministic and
batch-invariant; no synchronisation.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from veomni_hook.kernels.moe_router import device as kernels
from veomni_hook.kernels.moe_router import given, operand_checks, reference
from veomni_hook.kernels.moe_router.operand_checks import SIGMOID, SOFTMAX, is_count, score_of
from veomni_hook.kernels.moe_router.variants import LAYOUTS
from veomni_hook.kernels.shared.autograd import gradients, is_recorded
from veomni_hook.kernels.shared.launch import TL, Launch, power
from veomni_hook.kernels.shared.operand_checks import not_plain, untraceable
from veomni_hook.kernels.shared.operators import operator
from veomni_hook.kernels.shared.rows import readable

__all__ = ["kernel", "refuses", "refuses_in_autocast", "softmax_topk", "topk_softmax"]

Routing = tuple[torch.Tensor, torch.Tensor]
#: A program holds whole rows.
MOST_EXPERTS, MOST_TOP_K = 512, 32
# Also for groups whose size is not a power of 2.
_MOST_PLACES = 1024
# Logits per program. One warp reduces rows among its own threads, without synchronising in every round.
_FORWARD_TILE, _BACKWARD_TILE, _BACKWARD_WARPS = 512, 2048, 4
_LAUNCHES = 256
#: The least number of operands after ``top_k`` with groups; no variant without them has as many.
_OF_GROUPS = 6
#: From this number of rows on, row numbers need 64 bits and a separate compilation.
_LARGE = 1 << 31


class _Form(NamedTuple):
    """What to compute, apart from the operands: the ``kind`` of score, and how many of the ``experts``.

    ``groups``: the numbers of groups and of selected groups. ``given``: experts are given, not chosen.
    """

    kind: int
    experts: int
    top_k: int
    normalise: bool
    groups: tuple[int, int] = (1, 1)
    given: bool = False


# Launchers, cached by all Triton specialisations; `where`: the row stride, and whether rows need 64 bits.
@lru_cache(maxsize=_LAUNCHES)
def _forward_launch(
    device: torch.device, dtypes: tuple[torch.dtype, ...], where: tuple[int, bool], form: _Form
) -> tuple[Launch, int]:
    """Return the forward's launcher, and the rows per program."""
    kind, experts, top_k, normalise, (groups, best), given = form
    x, bias, _ = dtypes
    last = TL[torch.promote_types(x, bias)]
    if groups > 1:
        members = experts // groups
        blocks = power(groups), power(members)
        rows = max(1, _FORWARD_TILE // (blocks[0] * blocks[1]))
        tile = groups, blocks[0], members, blocks[1], best, top_k, power(top_k), rows, kind
        return Launch(kernels.forward_grouped, 6, *tile, normalise, last, given, num_warps=1), rows
    block = max(16, power(experts))
    rows = max(1, _FORWARD_TILE // block)
    # 16 bits and an index fit into a 32-bit integer.
    narrow = kind == SOFTMAX and x is not torch.float32
    constants = experts, block, top_k, power(top_k), rows, kind, normalise, narrow, last, given
    return Launch(kernels.forward, 6, *constants, num_warps=1), rows


@lru_cache(maxsize=_LAUNCHES)
def _backward_launch(
    device: torch.device, dtypes: tuple[torch.dtype, ...], where: tuple[int, bool], form: _Form
) -> tuple[Launch, int]:
    """Return the backward's launcher, and the rows per program."""
    kind, experts, top_k, normalise, _, given = form
    block = max(16, power(experts))
    rows = max(1, _BACKWARD_TILE // block)
    constants = experts, block, top_k, rows
    if _of_all(form):
        return Launch(kernels.backward_of_all, 4, *constants, num_warps=_BACKWARD_WARPS), rows
    return Launch(kernels.backward, 4, *constants, kind, normalise, given, num_warps=_BACKWARD_WARPS), rows


def _of_all(form: _Form) -> bool:
    return form.kind == SOFTMAX and not form.normalise


def _results(
    x: torch.Tensor, top_k: int, out: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    shape = (x.shape[0], top_k)
    weights = torch.empty(shape, dtype=out, device=x.device)
    indices = torch.empty(shape, dtype=torch.int64, device=x.device)
    return weights, indices, torch.empty(shape, dtype=x.dtype, device=x.device)


@operator(lambda x, bias, given, kind, top_k, *others: _results(x, top_k, others[-1]))
def _moe_router(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    given: torch.Tensor | None,
    kind: int,
    top_k: int,
    normalise: bool,
    groups: int,
    best: int,
    epsilon: float,
    fill: float,
    out: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x, x_rows = readable(x)
    results = _results(x, top_k, out)
    rows, experts = x.shape
    if not rows:
        return results
    form = _Form(kind, experts, top_k, normalise, (groups, best), given is not None)
    # Placeholders that the kernel does not access.
    bias = x if bias is None else bias
    given = results[1] if given is None else given.contiguous()
    dtypes = x.dtype, bias.dtype, out
    launch, tile = _forward_launch(x.device, dtypes, (x_rows.s0, rows >= _LARGE), form)
    numbers = (epsilon,) if groups == 1 else (epsilon, fill)
    launch((-(-rows // tile), 1, 1), x, bias, given, *results, rows, x_rows.s0, *numbers)
    return results


@operator(lambda logits, indices, dweights, experts, *others: logits.new_empty((logits.shape[0], experts)))
def _moe_router_backward(
    logits: torch.Tensor,
    indices: torch.Tensor,
    dweights: torch.Tensor,
    experts: int,
    kind: int,
    normalise: bool,
    given: bool,
    epsilon: float,
) -> torch.Tensor:
    rows, top_k = indices.shape
    dx = torch.empty((rows, experts), dtype=logits.dtype, device=logits.device)
    if not rows:
        return dx
    logits, logits_rows = readable(logits)
    form = _Form(kind, experts, top_k, normalise, given=given)
    dtypes = logits.dtype, dweights.dtype
    launch, tile = _backward_launch(logits.device, dtypes, (logits_rows.s0, rows >= _LARGE), form)
    number = logits_rows.s0 if _of_all(form) else epsilon
    launch((-(-rows // tile), 1, 1), logits, indices, dweights.contiguous(), dx, rows, number)
    return dx


class _Router(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, bias: torch.Tensor | None, given: torch.Tensor | None, form: _Form,
        numbers: tuple[float, float], out: torch.dtype,
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        kind, _, top_k, normalise, groups, _ = form
        weights, indices, chosen = _moe_router(x, bias, given, kind, top_k, normalise, *groups, *numbers, out)
        ctx.mark_non_differentiable(indices, *((chosen,) if _of_all(form) else ()))
        ctx.form, ctx.out = (form, numbers[0]), out
        ctx.set_materialize_grads(False)
        # The chosen logits are a result: a recorded backward finds in them how they depend on x.
        ctx.save_for_backward(x if _of_all(form) else chosen, indices)
        return weights, indices, chosen

    @staticmethod
    def backward(
        ctx: Any, dweights: torch.Tensor | None, _: object, dchosen: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        logits, indices = ctx.saved_tensors
        form, epsilon = ctx.form
        kind, experts, _, normalise, _, given = form
        # Only a recorded backward asks for a gradient of the chosen logits; a compiler's is zero.
        if not is_recorded() and (dchosen is None or torch.compiler.is_compiling()):
            dx = _moe_router_backward(logits, indices, dweights, experts, kind, normalise, given, epsilon)
            return dx, *[None] * 5
        formula = partial(_definition, form, epsilon, ctx.out, indices)
        (slope,) = gradients(formula, (logits,), (True,), (dweights,))
        if not _of_all(form):
            slopes = [dx for dx in (slope, dchosen) if dx is not None]
            slope = logits.new_zeros(len(indices), experts).scatter_add(-1, indices, sum(slopes))
        return slope, *[None] * 5


def _definition(
    form: _Form, epsilon: float, out: torch.dtype, indices: torch.Tensor, logits: torch.Tensor
) -> torch.Tensor:
    """Return the weights of the chosen experts, from all logits (`_of_all`) or from those chosen."""
    if form.kind == SOFTMAX:
        weights = torch.softmax(logits, dim=-1, dtype=torch.float32)
        return (weights if form.normalise else weights.gather(-1, indices)).to(out)
    scores = logits.sigmoid() if form.kind == SIGMOID else functional.softplus(logits).sqrt()
    if form.normalise:
        scores = scores / (scores.sum(dim=-1, keepdim=True) + epsilon)
    return scores.to(out)


def softmax_topk(
    router_logits: torch.Tensor,
    top_k: int,
    normalise: bool,
    indices: torch.Tensor | None = None,
) -> Routing:
    """Return the ``top_k`` largest probabilities in float32, divided by their sum if ``normalise``."""
    if not _fits(router_logits, top_k):
        return given.formula("softmax_topk", indices, router_logits, top_k, normalise)
    form = _Form(SOFTMAX, router_logits.shape[1], top_k, bool(normalise), given=indices is not None)
    return _route(router_logits, None, indices, form, (0.0, 0.0), torch.float32)


def topk_softmax(router_logits: torch.Tensor, top_k: int, indices: torch.Tensor | None = None) -> Routing:
    """Return the softmax over the ``top_k`` largest logits, in their dtype."""
    if not _fits(router_logits, top_k):
        return given.formula("topk_softmax", indices, router_logits, top_k)
    form = _Form(SOFTMAX, router_logits.shape[1], top_k, True, given=indices is not None)
    return _route(router_logits, None, indices, form, (0.0, 0.0), router_logits.dtype)


def kernel(variant: str) -> Callable[..., Routing]:
    """Return the kernel of a variant that chooses by scores and a bias."""
    return partial(_scored, variant)


def _scored(variant: str, *operands: Any, indices: torch.Tensor | None = None) -> Routing:
    call, layout = reference.read(variant, operands), LAYOUTS[variant]
    x, bias, top_k = call[:3]
    kind, groups = score_of(call.score), (1, 1)
    fits = kind is not None and _fits(x, top_k, bias)
    if layout.grouped:
        known = _groups(call.num_experts, call.num_group, call.topk_group)
        fits = fits and known is not None and call.num_experts == x.shape[1]
        # If all groups are selected, grouping has no effect.
        groups = known if known is not None and call.num_group != call.topk_group else groups
    if not fits or kind is None:
        return given.formula(variant, indices, *operands)
    form = _Form(kind, x.shape[1], top_k, bool(call.normalise), groups, indices is not None)
    numbers = float(call.epsilon), float(call.fill)
    return _route(x, bias.detach(), indices, form, numbers, x.dtype)


def _groups(num_experts: int, num_group: int, topk_group: int) -> tuple[int, int] | None:
    """The numbers of groups and of selected groups, or None if a program cannot handle them."""
    if not is_count(num_experts, MOST_EXPERTS) or not is_count(num_group, num_experts // 2):
        return None  # upstream's code takes two experts of each group
    members = num_experts // num_group
    if members * num_group != num_experts or power(members) * power(num_group) > _MOST_PLACES:
        return None
    return (num_group, topk_group) if is_count(topk_group, num_group) else None


def _route(*call: Any) -> Routing:
    return _Router.apply(*call)[:2]  # type: ignore[no-any-return, no-untyped-call]


def _fits(router_logits: torch.Tensor, top_k: int, bias: torch.Tensor | None = None) -> bool:
    """Whether a kernel supports operands that the guard did not pass to `refuses`."""
    if not is_count(top_k, min(MOST_TOP_K, router_logits.shape[1])):
        return False
    return bias is None or (
        not_plain(bias) is None
        and bias.dtype in TL
        and bias.device == router_logits.device
        and bias.shape == router_logits.shape[1:]
        and bias.is_contiguous()
    )


def _refused(
    rule: Callable[..., str | None], owner: object, router_logits: torch.Tensor, *others: Any
) -> str | None:
    """Return why this call must run the upstream code, or None; ``rule``: of every kernel."""
    return rule(owner, router_logits, *others) or untraceable() or _beyond(router_logits, others)


refuses = partial(_refused, operand_checks.refuses)
refuses_in_autocast = partial(_refused, operand_checks.refuses_in_autocast)


def _beyond(router_logits: torch.Tensor, others: tuple[Any, ...]) -> str | None:
    experts = router_logits.shape[1]
    if router_logits.dtype not in TL:
        return f"the logits have dtype {router_logits.dtype}"
    if not 0 < experts <= MOST_EXPERTS:
        return f"the kernel supports at most {MOST_EXPERTS} experts"
    if not others:
        return None
    bias, (top_k, *rest) = None, others
    if isinstance(top_k, torch.Tensor):
        bias, (top_k, *rest) = top_k, rest
    if not _fits(router_logits, top_k, bias):
        return f"the kernel needs a plain bias and a top_k of 1 to {MOST_TOP_K}, not {top_k!r}"
    if len(rest) >= _OF_GROUPS and (rest[0] != experts or _groups(*rest[:3]) is None):
        return f"the kernel does not support {rest[2]!r} of {rest[1]!r} groups of {rest[0]!r} experts"
    return None
