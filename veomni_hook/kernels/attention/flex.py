"""Attention by torch's ``flex_attention``: no score is stored, and blocks that the mask hides are skipped.

Scores, softmax and sinks are in float32. With sinks, the output without them is multiplied by
``sigmoid(logsumexp(scores) - sink)``. Everything is one compiled graph, or part of the one that dynamo is
tracing. Code is compiled once for lengths that stay the same, and once more for varying ones. (Uncompiled,
flex_attention stores the scores; and in torch 2.13 its gradients are wrong where a checkpoint recomputes it.)
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from itertools import count
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from torch._dynamo import config, eval_frame, exc
from torch.compiler import is_dynamo_compiling
from torch.nn.attention import flex_attention as torch_flex

from veomni_hook.kernels.attention import reference
from veomni_hook.kernels.attention.calls import refuses_call
from veomni_hook.kernels.attention.causal_blocks import causal_blocks
from veomni_hook.kernels.attention.masks import Blocks, known
from veomni_hook.kernels.attention.rescaled import rescaled
from veomni_hook.kernels.attention.traced_masks import keys_seen
from veomni_hook.kernels.shared.autograd import with_formula
from veomni_hook.kernels.shared.operand_checks import dtype_of
from veomni_hook.kernels.shared.traced_frame import answered_while_tracing, number

__all__ = ["loses", "refuses", "with_sinks", "with_softcap"]

#: Shorter calls stay with upstream's code: nothing was measured there, and each first call compiles.
SHORTEST = 512
#: In compiled models, lengths are multiples of this. For others, Inductor may pad what stands beside
#: flex_attention in a graph, and in torch 2.11 it then read sums at strides that they did not have. The graph
#: of `_attention` has nothing else in it.
MULTIPLE_COMPILED = 128
_WIDTHS = (16, 32, 64, 128, 256)
_WIDTHS_NAMED = str(_WIDTHS)
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
#: Positions in the mask are 32-bit numbers in compiled code.
_MOST_POSITIONS = 2**31
_RETURN_LSE: dict[str, Any] = (
    {"return_aux": torch_flex.AuxRequest(lse=True)}
    if hasattr(torch_flex, "AuxRequest")
    else {"return_lse": True}
)

_BACKEND = "inductor"
_Attention = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]
#: By kind of call: dtype, sinks or not, softcap, scale, mask or not, with gradients or not.
_COMPILED: dict[tuple[Any, ...], _Attention] = {}

_NUMBERS = count()
# Its name until torch 2.6 is the second.
_LIMIT_HIT: Any = getattr(exc, "FailOnRecompileLimitHit", None) or vars(exc)["FailOnCacheLimitHit"]

logger = logging.getLogger("veomni_hook.kernels")

Result = tuple[torch.Tensor, None]


def with_sinks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    module: Any,
    scaling: float,
    dropout: float = 0.0,
) -> Result:
    """Return attention with the sinks ``module.sinks [heads]``; see `reference` for the operands."""
    blocks = _blocks(attention_mask, query, uniform=False)
    run = partial(_attend, blocks, None, scaling)
    formula = partial(_defined, reference.sinks_float32_softmax, (scaling,), dtype_of(query))
    return with_formula(run, formula, (query, key, value, module.sinks), attention_mask), None


def with_softcap(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    module: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
) -> Result:
    """Return attention with the scores ``softcap * tanh(scores / softcap)``; see `reference`.

    A query that sees no key (left padding) gets the mean of the values, as upstream's softmax over equal
    scores does; unlike there, no gradient reaches these scores.
    """
    blocks = _blocks(attention_mask, query, uniform=True)
    scale = module.head_dim**-0.5 if scaling is None else scaling
    run = partial(_attend, blocks, softcap, scale)
    formula = partial(_defined, reference.softcap, (scale, 0.0, softcap), dtype_of(query))
    return with_formula(run, formula, (query, key, value), attention_mask), None


def _defined(
    formula: Callable[..., Any], numbers: tuple[float | None, ...], dtype: torch.dtype, *operands: Any
) -> torch.Tensor:
    """Return attention by a formula of `reference`, of query, key, value, any sinks, and the mask."""
    query, key, value, *sinks, mask = operands
    query, key, value = (tensor.to(dtype) for tensor in (query, key, value))
    groups = query.shape[1] // key.shape[1]
    owner = SimpleNamespace(sinks=sinks[0] if sinks else None, num_key_value_groups=groups, training=False)
    output: torch.Tensor = formula(query, key, value, mask, owner, *numbers)[0]
    return output


def refuses(
    owner: object,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    module: object,
    scaling: object,
    dropout: object,
    *others: object,
) -> str | None:
    """Return why this call must run the upstream code, or None."""
    if (reason := refuses_call(owner, query, key, value, dropout, _DTYPES) or _uncompilable()) is not None:
        return reason
    width = query.shape[-1]
    if width not in _WIDTHS or key.shape[-1] != width or value.shape[-1] != width:
        return f"head sizes are {width}, {key.shape[-1]} and {value.shape[-1]}, not one of {_WIDTHS_NAMED}"
    if is_dynamo_compiling() and query.shape[2] % MULTIPLE_COMPILED:
        return f"in compiled code, the number of queries must be a multiple of {MULTIPLE_COMPILED}"
    if attention_mask is None:
        return None
    if is_dynamo_compiling():
        return _refuses_traced_mask(query, key, attention_mask)
    return _refuses_mask(query, key, attention_mask)


def loses(owner: object, query: torch.Tensor, *others: object) -> str | None:
    """Return why ``auto`` leaves this call to the upstream code, or None."""
    if query.shape[2] < SHORTEST:
        return f"fewer than {SHORTEST} queries: not measured to be faster"
    if dtype_of(query) is torch.float32:
        return "the attention is in float32: not measured to be faster"
    return None


def _refuses_mask(query: torch.Tensor, key: torch.Tensor, mask: object) -> str | None:
    if not isinstance(mask, torch.Tensor):
        return f"the attention mask is a {type(mask).__name__}"
    known_mask = known(mask)
    if known_mask is None or not known_mask.is_unchanged():
        return "the attention mask is not as transformers made it for eager attention"
    expected = (query.shape[0], 1, query.shape[2], key.shape[2])
    if mask.shape != expected or mask.device != query.device:
        return f"the attention mask is {tuple(mask.shape)} on {mask.device}, not {expected} on {query.device}"
    if mask.numel() >= _MOST_POSITIONS:
        return f"the attention mask has {mask.numel()} positions, more than a kernel can count"
    return None


def _refuses_traced_mask(query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor) -> str | None:
    if keys_seen(mask, query) is None or not mask.dtype.is_floating_point:
        return "the attention mask is not known, while tracing, to be causal or a causal window alone"
    if key.shape[2] != query.shape[2]:
        return "the numbers of queries and keys differ: there is a cache"
    return None


@answered_while_tracing
def _uncompilable() -> str | None:
    """Return why torch.compile would run `_attention` uncompiled, or None."""
    # getattr: these are private.
    stance = getattr(getattr(eval_frame, "_stance", None), "stance", "")
    if getattr(config, "disable", False) or stance == "force_eager":
        return "torch.compile is disabled, and flex_attention needs it"
    return None


def _blocks(mask: torch.Tensor | None, query: torch.Tensor, *, uniform: bool) -> Blocks | None:
    if is_dynamo_compiling():
        keys = None if mask is None else keys_seen(mask, query)
        return None if keys is None else Blocks(causal_blocks(query.shape[2], keys, query.device), None)
    known_mask = None if mask is None else known(mask)
    return None if known_mask is None else known_mask.blocks(uniform=uniform)


def _attend(
    blocks: Blocks | None,
    softcap: float | None,
    scale: float,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    if is_dynamo_compiling():
        softcap, scale = _fixed()
    dtype = dtype_of(query)
    query, key, value = (each.to(dtype) for each in (query, key, value))
    groups = query.shape[1] // key.shape[1]
    if groups & (groups - 1):
        # Not a power of two: flex_attention's kernels for groups need one.
        key, value = (tensor.repeat_interleave(groups, 1) for tensor in (key, value))
    mask, sees = (None, None) if blocks is None else blocks
    change = None if sinks is not None else _change(softcap, sees)
    operands = (query, key, value, mask, change, scale, sinks is not None)
    kind = (dtype, sinks is None, softcap, scale, blocks is None, torch.is_grad_enabled())
    with torch.autocast(query.device.type, enabled=False):
        output, lse = _run(kind, operands)
        if sinks is None:
            return output.transpose(1, 2).contiguous()
        assert lse is not None  # noqa: S101
        return rescaled(output, lse, sinks)


@answered_while_tracing
def _fixed() -> tuple[float | None, float]:
    """Return softcap and scale: flex_attention takes no symbols for them."""
    return number("softcap"), number("scale")


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Any,
    change: Callable[..., Any] | None,
    scale: float,
    with_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the output, and the logsumexp of each query's scores in float32 if it is wanted."""
    enable_gqa = query.shape[1] != key.shape[1]
    output: Any
    if not with_lse:
        output = torch_flex.flex_attention(query, key, value, change, mask, scale, enable_gqa)
        return output, None
    output, extra = torch_flex.flex_attention(
        query, key, value, change, mask, scale, enable_gqa, **_RETURN_LSE
    )
    return output, extra if isinstance(extra, torch.Tensor) else extra.lse


def _change(softcap: float | None, sees: torch.Tensor | None) -> Callable[..., Any] | None:
    """Return the change of scores, or None: the softcap, and 0 for queries without a key to see.

    ``cap * tanh(score / cap)`` is computed by way of the sigmoid: on an H200 (2 x 4,096 tokens, 16 heads of
    256), forward takes 1.3 ms, not 2.2, and backward 6.7, not 7.9.
    """
    cap: Any = softcap
    visible: Any = sees

    def capped(score: object, batch: object, head: object, query: object, key: object) -> Any:
        return 2 * cap * torch.sigmoid(score * (2 / cap)) - cap

    def seen(score: object, batch: object, head: object, query: object, key: object) -> Any:
        return score * visible[batch, query]

    def capped_and_seen(score: object, batch: object, head: object, query: object, key: object) -> Any:
        return (2 * cap * torch.sigmoid(score * (2 / cap)) - cap) * visible[batch, query]

    if sees is None:
        return None if softcap is None else capped
    return seen if softcap is None else capped_and_seen


def _run(kind: tuple[object, ...], operands: tuple[Any, ...]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run the compiled code; where torch would compile no further variant, begin anew.

    Traced code has the same operations in its own graph.

    Without ``fullgraph``, torch would then silently run flex_attention uncompiled, which stores all scores.
    """
    if is_dynamo_compiling():
        return _attention(*operands)
    run = _COMPILED.get(kind)
    if run is None:
        run = _COMPILED[kind] = _compiled()
    try:
        return run(*operands)
    except _LIMIT_HIT:
        logger.warning("attention: torch's limit of compiled variants is reached; compiling anew: %s", kind)
        run = _COMPILED[kind] = _compiled()
        return run(*operands)


def _compiled() -> _Attention:
    """Return `_attention`, compiled.

    torch counts variants by code object, and stops at eight. By the code's name it remembers which numbers
    vary, and compiles no graph for a softcap that does. So every kind of call has code and a name of its own.
    """
    name = f"attention_{next(_NUMBERS)}"
    own: Any = FunctionType(_attention.__code__.replace(co_name=name), globals(), name)
    compiled: _Attention = torch.compile(own, fullgraph=True, backend=_BACKEND)
    return compiled
