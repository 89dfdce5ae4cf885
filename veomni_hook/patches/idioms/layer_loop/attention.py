"""What mixes positions in layers, and may: it gets all of them, or those of whole segments.

Attention of the user's implementation, and the rules and convolutions of linear attention that their own
idioms route, see all positions (`veomni_hook.parallel`). In a tower, attention stays within segments.
Everything else of such layers must work on each position by itself. The cache is empty: nothing with keys or
states enters layers that are split.

Some attention has the queries of this process alone, and the keys of all positions: an indexer chooses from
all keys, and a compressor pools windows of them. Both ask the cache for what is in front of a position. So
the cache that such attention gets answers with all positions (`veomni_hook.parallel.whole_keys`); then
everything else must work on each query by itself.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product

from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.code.scope import loaded, own_names, parameter_names
from veomni_hook.patches.code.template import Found
from veomni_hook.patches.code.tree import calls_in, chain, last_name, own_attribute
from veomni_hook.patches.idioms.layer_loop.values import (
    END,
    KEYS,
    NOTHING,
    PLAIN,
    Arguments,
    Items,
    Many,
    Plain,
    Tensor,
    Unknown,
    Value,
    Whole,
    bare,
    holds_tensor,
    is_shaped,
    shaped,
)
from veomni_hook.patches.interpreter.domain import Frame
from veomni_hook.patches.routes.cache_parameter import cache_parameters
from veomni_hook.patches.routes.view import ModuleView
from veomni_hook.patches.site import Code, Missed
from veomni_hook.patches.upstream_names import KEPT, names

__all__ = [
    "ATTRIBUTES",
    "INTERFACE",
    "STATE",
    "Queries",
    "asks_interface",
    "attended",
    "by_segment",
    "convolved",
    "of_cache",
    "of_keys",
    "queries_of",
    "ruled",
]

#: The state of a rule, which is that of a share of the heads.
STATE = Unknown("the state of a rule, which is that of a share of the heads")
INTERFACE = "ALL_ATTENTION_FUNCTIONS"
#: Arguments of attention that hold no positions, or all of them: the interface's implementations know them.
_ARGUMENTS = frozenset(
    """
    attention_mask cache_position cu_seq_lens_k cu_seq_lens_q deterministic dropout enable_gqa is_causal
    is_training layer_idx max_length_k max_length_q output_attentions position_ids s_aux scaling
    sliding_window softcap training use_cache use_top_left_mask
    """.split()
)
_BOUNDARIES = ("cu_seqlens", "cu_seq_lens_q", "seq_idx")
_HEADS = ("B . S .", "1 . S .")
#: The parameters in their order, and the shapes of those that are parts of the positions.
_ATTENTION = {"module": (), "query": _HEADS, "key": _HEADS, "value": _HEADS, "attention_mask": ()}
#: The same with keys that are those of all positions: the mask is that of this process's queries.
_QUERIES = {
    **dict.fromkeys(_ATTENTION, ()),
    "query": _HEADS,
    [*_ATTENTION][-1]: ("B . S .",),
    **dict.fromkeys((*names("positions"), *names("token ids")), ("B S",)),
    "indices": ("B S .",),
    "block_indices": _HEADS,
}
_CONVOLUTION = {"hidden_states": ("B . S",), "weight": (), "bias": (), "activation": ()}
_RULE = {
    **dict.fromkeys(("query", "key", "value"), ("B S . .",)),
    "g": ("B S .", "B S . ."),  # a decay is one number a head, or one a channel of it
    "beta": ("B S .",),
}
_OF_CACHE = {
    "get_conv_state": NOTHING,
    "get_recurrent_state": NOTHING,
    "has_previous_state": Plain(False),
    "update_recurrent_state": PLAIN,
}
#: The arguments of fused attention that hold boundaries of segments.
_ENDS = ("cu_seq_lens_q", "cu_seq_lens_k")

#: A mask of queries and keys, or of padding: its shape in one process is that of all positions.
_MASKS = ("B . S .", "B S")
_POSITIONS = "B S"
_RESULTS: dict[str, Value] = {
    "update": Items((PLAIN, PLAIN)),
    "store_compression_weights": Items((PLAIN, PLAIN, PLAIN)),
    "update_overlap_state": Items((NOTHING, NOTHING)),
    "get_seq_length": END,
}
#: Methods that get nothing of this process's positions.
_OF_ALL = ("update_compressor_states", "update_overlap_state", "get_seq_length")
#: Attributes of the cache, or of what it holds of one layer.
ATTRIBUTES: dict[str, Value] = {"layers": Many(KEYS), **dict.fromkeys(("keys", "values"), PLAIN)}


def attended(arguments: Arguments) -> Value:
    """Attention of the user's implementation: what it gets must be what the all-to-all expects.

    With keys that are the same in every process, nothing is exchanged.
    """
    passed, known = _passed(arguments, _ATTENTION), _ATTENTION
    if all(isinstance(passed.get(name), Plain) for name in ("key", "value")):
        passed, known = {name: bare(value) for name, value in passed.items()}, _QUERIES
    for name in passed.keys() - known - _ARGUMENTS:
        raise Missed(f"its attention takes {name}, which may hold positions", code=Code.MIXES_POSITIONS)
    optional = {name for name in known.keys() - _ATTENTION if not holds_tensor(passed.get(name, NOTHING))}
    shapes = {name: shape for name, shape in known.items() if name not in optional}
    _check(passed, shapes, "attention", "[batch, heads, positions, width]")
    return Items((shaped("B S . ."), Unknown("attention weights, which hold a part of the positions")))


def convolved(arguments: Arguments, function: FunctionNode | None) -> Value:
    """A convolution whose rank gets the last positions of the rank before it."""
    named = {**arguments.named}
    first = (named.pop("x"),) if "x" in named else ()  # what a package calls it
    arguments = replace(arguments, given=(*first, *arguments.given), named=named)
    passed = _passed(arguments, _CONVOLUTION, function)
    _check(passed, _CONVOLUTION, "convolution", "[batch, channels, positions]")
    return passed["hidden_states"]


def ruled(arguments: Arguments, function: FunctionNode | None) -> Value:
    """A rule that gets all positions of a share of the heads."""
    _check(_passed(arguments, _RULE, function), _RULE, "rule", "[batch, positions, heads, ...]")
    return Items((shaped("B S . ."), STATE))


def _passed(
    arguments: Arguments, names: Iterable[str], function: FunctionNode | None = None
) -> dict[str, Value]:
    """The arguments by name, without those of ``**`` that the function does not read, nor its kernels."""
    read = {*parameter_names(function), *_BOUNDARIES} if function is not None else {*arguments.named}
    unread = {name for name, _ in (arguments.bag.held if arguments.bag else ())} - read
    named = {name: value for name, value in arguments.named.items() if name not in unread}
    return {**dict(zip(names, arguments.given, strict=False)), **named}


def _check(
    passed: Mapping[str, Value], shapes: Mapping[str, tuple[str, ...]], what: str, layout: str
) -> None:
    """Raise Missed unless a call gets tensors of these shapes, and no other part of the positions."""
    for name, expected in shapes.items():
        if expected and not is_shaped(passed.get(name), *expected):
            raise Missed(f"the {name} of its {what} is not {layout}")
    for name, value in passed.items():
        if not shapes.get(name) and holds_tensor(value):
            raise Missed(f"its {what} takes a part of the positions as {name}", code=Code.MIXES_POSITIONS)


def of_cache(name: str, arguments: Arguments) -> Value | None:
    """What a method of an empty cache returns; None for another method."""
    stored = arguments.given[:2]
    tensors = [isinstance(value, Tensor) for value in stored]
    if name == "update" and tensors == [True, True]:
        return Items(stored)  # what it is given
    if name == "update_conv_state" and (tensors[:1] == [True] or stored[:1] == (STATE,)):
        return stored[0]  # zeros in front of it, which the convolution leaves out
    return _OF_CACHE.get(name)


def by_segment(match: Found, fused: list[ast.stmt], frame: Frame[Value]) -> set[str]:
    """Attention within segments, by one fused call or by segment: their boundaries."""
    at = match.first
    if match.index:
        raise Missed("attention by segment begins with other statements", at, Code.NO_BOUNDARIES)
    tensors = [match[hole] for hole in ("QUERY", "KEY", "VALUE")]
    for name in tensors:
        if not is_shaped(frame.values.get(name), ". . S ."):
            raise Missed(f"the {name} of its attention is not [1, heads, rows, width]", at)
    boundaries = frame.values.get(match["CU_SEQLENS"])
    if not isinstance(boundaries, Whole) or not boundaries.rows:
        raise Missed("the boundaries of its attention are not those of the tower", at, Code.NO_BOUNDARIES)
    _check_fused(match, fused, tensors)
    for name in own_names([*match.block[match.index :], *fused]):
        frame.values[name] = Unknown(f"{name}, which attention computes")
    frame.values[match["OUTPUT"]] = shaped("1 S . .")
    return {*boundaries.rows}


def _check_fused(match: Found, fused: list[ast.stmt], tensors: list[str]) -> None:
    """Raise unless the other branch is one call of attention with the same tensors and boundaries."""
    at = match.first
    calls = [
        call
        for statement in fused
        for call in calls_in(statement)
        if {*_ENDS} & {k.arg for k in call.keywords}
    ]
    results = [
        statement for statement in fused if isinstance(statement, ast.Assign) and statement.value in calls
    ]
    if len(calls) != 1 or len(results) != 1:
        raise Missed("the other way to its attention has no boundaries", at, Code.NO_BOUNDARIES)
    (call,), target = calls, results[0].targets[0]
    first = target.elts[0] if isinstance(target, ast.Tuple) else target
    named = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    others = [statement for statement in fused if statement is not results[0]]
    if (
        [named.get(name) for name in _ENDS] != [match["CU_SEQLENS"]] * 2
        or [*map(ast.unparse, call.args[1:])] != tensors
        or last_name(first) != match["OUTPUT"]
        or any(own_attribute(inner.func) for other in others for inner in calls_in(other))
    ):
        raise Missed("the other way to its attention has other operands", at, Code.NO_BOUNDARIES)


@dataclass(frozen=True)
class Queries:
    """What a method of attention gets in place of its own arguments, by the names of its parameters.

    Attributes:
        cache: the cache.
        mask: the mask.
        positions: the positions, or the keyword arguments that hold them; empty if it gets none.
    """

    cache: str
    mask: str
    positions: str = ""


def asks_interface(function: FunctionNode) -> bool:
    """Whether a method asks for the user's implementation of attention."""
    return any(chain(call.func) == f"{INTERFACE}.get_interface" for call in calls_in(function))


def queries_of(
    view: ModuleView, function: FunctionNode, values: dict[str, Value]
) -> Iterator[tuple[Queries, dict[str, Value]]]:
    """What attention may get so that its queries are a part of the positions: all that is to be tried.

    Nothing, unless it hands its cache on to a module of its own, which chooses or makes keys.
    """
    own = parameter_names(function)
    masks, positions = own.intersection(names("mask")), sorted(own.intersection(names("positions")))
    bag = function.args.kwarg.arg if function.args.kwarg is not None else ""
    calls = [call for call in calls_in(function) if own_attribute(call.func)]
    handed_on = {*loaded([part for call in calls for part in (*call.args, *call.keywords)])}
    caches = [name for name in cache_parameters(view, function) if name in handed_on]
    for cache, mask, form in product(caches, sorted(masks), _MASKS):
        if isinstance(bare(values.get(mask, PLAIN)), Tensor):
            continue
        changed: dict[str, Value] = {cache: KEYS, mask: shaped(form)}
        if positions:
            changed[positions[0]] = shaped(_POSITIONS)
        elif isinstance(held := values.get(bag), Whole):
            parts = tuple((name, shaped(_POSITIONS)) for name in names("positions"))
            changed[bag] = Whole(held.name, (*held.held, *parts))
        yield Queries(cache, mask, positions[0] if positions else bag), {**values, **changed}


def of_keys(name: str, arguments: Arguments) -> Value:
    """What a method of the cache returns that answers with all positions: nothing of it is a part of them.

    Raises:
        Missed: it is another method, or another tensor.
    """
    passed = (*arguments.given, *arguments.named.values())
    rows = sum(is_shaped(value, "B S .", "B . S .") for value in arguments.given)
    parts = sum(isinstance(value, Tensor) for value in passed)
    if parts != rows or rows != KEPT.get(name, 0) or name not in (*KEPT, *_OF_ALL):
        raise Missed(f"it asks the cache for {name}", code=Code.MIXES_POSITIONS)
    return _RESULTS.get(name, PLAIN)
