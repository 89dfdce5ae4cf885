"""What one evaluation notes besides values: calls of unknown code, and how many loops it has entered."""

from __future__ import annotations

import ast
from collections import Counter

from veomni_hook.patches.graph.nodes import Node
from veomni_hook.patches.graph.scope import Scope

__all__ = ["Trace"]


class Trace:
    """What all frames of one evaluation share.

    Attributes:
        scope: the module's names.
        calls: the opaque calls, in the order of evaluation.
        loops: the number of loops that have been entered.
    """

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.calls: list[Node] = []
        self.loops = 0
        self._serials: Counter[bytes] = Counter()

    def opaque(self, args: tuple[Node, ...], keywords: tuple[str, ...], origin: ast.expr) -> Node:
        """A call of unknown code: two identical calls have different results.

        Args:
            args: the callee, the positional arguments, the values of ``keywords``.
            keywords: their names.
            origin: the upstream expression.
        """
        key = Node("call", args, keywords).key
        serial = self._serials[key]
        self._serials[key] += 1
        call = Node("call", args, (len(args) - 1 - len(keywords), keywords, serial), origin)
        self.calls.append(call)
        return call
