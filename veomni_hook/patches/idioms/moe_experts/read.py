"""Read the loop over experts: the routing, and what one expert computes for its rows.

Upstream writes this loop in many equivalent ways: for every chosen expert, take the rows of its tokens,
compute, multiply by the routing weights, add to the result. `Loop` checks that the form of a ``forward`` is
such a loop, and holds the computation in terms of the rows, their weights and one expert's share of the
stacked tensors.

The mask may have a row for the id after the last expert, and the loop may skip it. Neither is distinguished:
if one made a difference, upstream would raise.
"""

from __future__ import annotations

import re

from veomni_hook.patches.graph import (
    FLOAT32,
    Form,
    Node,
    branches,
    constant,
    has_source,
    is_constant,
    rebuild,
    renormalised,
    source,
    walk,
)
from veomni_hook.patches.site import Missed

__all__ = ["EXPERT", "ROUTING", "STATES", "Loop"]


def _argument(name: str) -> Node:
    return Node("argument", (), name)


#: The expert's number, the rows of its tokens [rows, hidden], their routing weights [rows, 1].
EXPERT, STATES, ROUTING = (_argument(f"the expert's {name}") for name in ("number", "rows", "weights"))
_TOKEN, _PLACE = (_argument(f"the expert's {name}") for name in ("tokens", "places"))
_NONE = constant(None)
_LAST_TWO = Node("tuple", (constant(-1), constant(-2)))
_REVERSED = Node("tuple", (constant(2), constant(1), constant(0)))
_NO_GRAD = Node("global", (), "torch.no_grad")
# An f-string of a word and the expert's number.
_NUMBERED = re.compile(
    r"JoinedStr\(values=\[Constant\(value='\w*'\), FormattedValue\(value=(Subscript\(value=)?Name\(id='\w+', "
    r"ctx=Load\(\)\)(, slice=Constant\(value=0\), ctx=Load\(\)\))?, conversion=-1\)\]\)"
)


class Loop:
    """A loop over experts.

    Args:
        form: that of a ``forward``.

    Attributes:
        hidden: the parameter of ``forward`` for the hidden states.
        index: the parameter for the chosen ids, or for the mask.
        weights: the parameter for the routing weights.
        dtype: the dtype of the accumulated result: that of ``hidden`` or ``weights``, or ``float32``.
        count: number of rows of the mask, including the sentinel's row if any; None if ``index`` is the mask.
        ways: what an expert computes: one formula, or two and the test on `EXPERT` that chooses.
        stacked: an argument of the formulas (one expert's share) to the node that holds all shares.

    Raises:
        Missed: it is not a loop over experts.
    """

    def __init__(self, form: Form) -> None:
        self.hidden = self.index = self.weights = self._mask = _NONE
        self.count: Node | None = None
        self.stacked: dict[str, Node] = {}
        result, empty = form.result, None
        if result.op == "branch" and _counted_for_none(result.args[0]) is not None:
            _, empty, result = result.args
        cast = result.args[1] if result.op == "cast" else None
        loop = result.args[0] if cast is not None else result
        if loop.op != "loop" or len(loop.args) != 3:
            raise Missed("no loop over experts")
        iterated, start, step = loop.args
        self._hits(self._routing(iterated))
        self.dtype = self._start(start)
        if (cast is None and self.dtype != "hidden") or cast not in (None, Node("dtype", (self.hidden,))):
            raise Missed("the result has another dtype")
        if empty not in (None, start):
            raise Missed("it returns something else if no expert is chosen")
        added = self._added(self._rows(self._routing(step)))
        # Every call in the loop is part of what is added, or only queries a size.
        known = {node.key for node in (EXPERT, _TOKEN, *walk(added))}
        for effect in (self._rows(self._routing(effect)) for effect in form.effects):
            asks = _calls_numel(effect) or (effect.op == "call" and effect.args[0].op == "opaque")
            if effect.key not in known and not asks:
                raise Missed(f"it also calls something (line {effect.lineno})")
        self.ways = branches(added)

    def counts(self) -> list[str]:
        """What may be the number of experts, as source text: rows of the mask, or without the sentinel's."""
        rows = [self.count] if self.count is not None else []
        if self.count is not None and self.count.op == "add" and constant(1) in self.count.args:
            rows += [number for number in self.count.args if number != constant(1)]
        return [source(number) for number in rows if has_source(number)]

    def _routing(self, node: Node) -> Node:
        """The graph with `EXPERT` for the expert's number, without ``no_grad`` around the routing."""

        def replace(inner: Node) -> Node | None:
            if _is_number(inner):
                return EXPERT
            if inner.op == "within" and inner.args[1].args == (_NO_GRAD,) and _is_whole(inner.args[0]):
                return self._routing(inner.args[0])
            return None

        return rebuild(node, replace, renormalised)

    def _hits(self, hits: Node) -> None:
        """Check that the loop iterates over the experts with tokens."""
        if hits.op == "squeeze" and hits.args[1:] == (constant(-1),):
            hits = hits.args[0]
        self._mask = next((node for node in walk(hits) if node.op == "permute"), _NONE)
        tokens = Node("sum", (self._mask, _LAST_TWO, constant(False), _NONE))
        expected = Node("nonzero", (Node("lt", (constant(0), tokens)), constant(False)))
        if hits != expected or self._mask.args[1:] != (_REVERSED,):
            raise Missed(f"it does not iterate over the experts with tokens (line {hits.lineno})")
        self.index = self._mask.args[0]
        if self.index.op == "one_hot":
            self.index, self.count = self.index.args
        if self.index.op != "argument":
            raise Missed(f"the ids are not a parameter (line {self._mask.lineno})")

    def _start(self, start: Node) -> str:
        """The dtype of the accumulated result."""
        if start.op != "zeros_like" or start.args[0].op != "argument":
            raise Missed(f"the result does not start as zeros like a parameter (line {start.lineno})")
        self.hidden, dtype, layout, device, *_ = start.args
        if layout != _NONE or device not in (_NONE, Node("device", (self.hidden,))):
            raise Missed(f"the result is on another device (line {start.lineno})")
        if dtype in (_NONE, Node("dtype", (self.hidden,))):
            return "hidden"
        if dtype == FLOAT32:
            return "float32"
        if dtype.op != "dtype" or dtype.args[0].op != "argument":
            raise Missed(f"the result has another dtype (line {start.lineno})")
        self.weights = dtype.args[0]
        return "weights"

    def _rows(self, node: Node) -> Node:
        """The graph in terms of the rows, their weights and one expert's share of the stacked tensors."""
        row = Node("index", (self._mask, EXPERT))
        nonzeros = [
            Node("nonzero", (candidate, constant(True)))
            for candidate in (row, Node("squeeze", (row, constant(0))))
        ]
        places = {
            Node("item", (nonzero, constant(n))).key: (_PLACE, _TOKEN)[n]
            for nonzero in nonzeros
            for n in (0, 1)
        }
        node = rebuild(node, lambda inner: places.get(inner.key), renormalised)
        return rebuild(node, self._row, renormalised)

    def _row(self, node: Node) -> Node | None:
        if node.op == "dtype" and node.args[0] == self.hidden:
            return Node("dtype", (STATES,))
        if node.op == "reshape" and node.args[0] == Node("index", (self.hidden, _NONE, _TOKEN)):
            width = Node("size", (self.hidden, constant(-1)))
            return STATES if node.args[1:] == (Node("tuple", (constant(-1), width)),) else None
        if node == Node("index", (self.hidden, _TOKEN)):
            return STATES
        base, *place = node.args if node.op == "index" else (_NONE,)
        # A parameter of the method, not an argument that this reader introduced.
        known = base.op == "argument" and str(base.value).isidentifier()
        if known and place == [_TOKEN, _PLACE, _NONE] and self.weights in (_NONE, base):
            self.weights = base
            return ROUTING
        if base.op in ("attribute", "self") and len(place) == 1 and _is_share(place[0], base):
            name = f"the expert's {base.value or 'module'}"
            self.stacked[name] = base
            return _argument(name).at(node.origin)
        return None

    def _added(self, step: Node) -> Node:
        """What an expert adds to the result, without the cast to the result's dtype."""
        while step.op == "branch" and step.args[1].op == "carried" and self._skips_nobody(step.args[0]):
            step = step.args[2]
        if step.op != "index_add" or step.args[0].op != "carried" or step.args[1:3] != (constant(0), _TOKEN):
            raise Missed(f"it does not add every expert's rows to the result (line {step.lineno})")
        added, alpha = step.args[3:]
        if not is_constant(alpha, 1):
            raise Missed(f"it adds a multiple (line {step.lineno})")
        casts = {"float32": FLOAT32, "hidden": Node("dtype", (STATES,))}
        kept = (Node("dtype", (step.args[0],)), casts.get(self.dtype, _NONE))
        return added.args[0] if added.op == "cast" and added.args[1] in kept else added

    def _skips_nobody(self, test: Node) -> bool:
        """Whether a test skips only the sentinel's row, or an expert without tokens."""
        if _counted_for_none(test) == _TOKEN:
            return True
        # Id E has no row in a mask with E rows, and the last row in a mask with E + 1 rows.
        last = [number for number in test.args if number != EXPERT]
        known = test.op == "eq" and len(last) == 1 and has_source(last[0])
        return known and source(last[0]) in self.counts()


def _is_number(node: Node) -> bool:
    """Whether a node is the number of the current expert."""
    match node:
        case Node(op="each"):
            return True
        case Node(op="item", args=(number, place, *_)):
            return place == constant(0) and _is_number(number)
        case (
            Node(op="int", args=(number, *_))
            | Node(op="call", args=(Node(op="getattr", value="item", args=(number, *_)),))
            | Node(op="call", args=(Node(op="global", value="builtins.int"), number))
        ):
            return _is_number(number)
    return False


def _counted_for_none(test: Node) -> Node | None:
    """The ``x`` of a test ``x.numel() == 0``; None for any other test."""
    sides = test.args if test.op == "eq" and constant(0) in test.args else ()
    return next((side.args[0].args[0] for side in sides if _calls_numel(side)), None)


def _calls_numel(node: Node) -> bool:
    called = node.args[0] if node.op == "call" and len(node.args) == 1 else _NONE
    return (called.op, called.value) == ("getattr", "numel")


def _is_share(place: Node, base: Node) -> bool:
    """Whether an index is the expert's number, or for ``self`` a name that contains the number."""
    if base.op == "attribute":
        return place == EXPERT
    named = place.op == "call" and place.args[0].op == "opaque" and place.args[1:] == (EXPERT,)
    return named and _NUMBERED.fullmatch(str(place.args[0].value)) is not None


def _is_whole(node: Node) -> bool:
    """Whether a node holds integers, which have no gradient."""
    while node.op in ("squeeze", "permute", "item", "index", "sum", "within"):
        node = node.args[0]
    return node.op in ("one_hot", "nonzero", "lt")
