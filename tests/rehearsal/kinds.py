"""The kinds of rewrites: each changes what a module's code looks like, and nothing of what it computes."""

from __future__ import annotations

import ast
import random
from collections.abc import Callable

from tests.rehearsal import calls, names, statements
from tests.rehearsal.code import Facts, Rewrite


def _nothing(rewrite: Rewrite) -> None:
    """Comments and formatting go; so they do with every other kind."""


def _turned(rewrite: Rewrite) -> None:
    statements.branches_turned(rewrite)
    statements.conditions_spelled_out(rewrite)


def _inlined(rewrite: Rewrite) -> None:
    statements.helpers_inlined(rewrite)
    statements.temporaries_inlined(rewrite)


KINDS: dict[str, Callable[[Rewrite], None]] = {
    "unparsed": _nothing,
    "parameters renamed": names.parameters_renamed,
    "locals renamed": names.locals_renamed,
    "attributes renamed": names.attributes_renamed,
    "annotations dropped": names.annotations_dropped,
    "decorators added": names.decorated,
    "arguments reordered": calls.arguments_reordered,
    "keyword for position": calls.keywords_for_positions,
    "position for keyword": calls.positions_for_keywords,
    "helpers moved": calls.helpers_moved,
    "methods split": statements.methods_split,
    "helpers inlined": _inlined,
    "temporaries introduced": statements.temporaries_introduced,
    "walrus and f-strings": statements.walrus,
    "early returns": statements.returns_early,
    "operands and branches turned": _turned,
}


def rewritten(kind: str, module: str, text: str, seed: object, facts: Facts | None = None) -> dict[str, str]:
    """The texts of a module after a kind of rewrite, and of the modules that it adds, by name."""
    draw = random.Random(f"{seed} {kind} {module}")
    rewrite = Rewrite(module, ast.parse(text), draw, facts or Facts())
    KINDS[kind](rewrite)
    trees = {module: rewrite.tree, **rewrite.more}
    return {name: ast.unparse(ast.fix_missing_locations(tree)) + "\n" for name, tree in trees.items()}
