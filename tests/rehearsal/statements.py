"""Rewrites of statements: temporaries, walruses, split methods, inlined helpers, early returns, branches."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from functools import reduce

from tests.rehearsal.code import (
    Rewrite,
    as_read,
    blocks,
    evaluated,
    head,
    is_docstring,
    odd,
    put,
    reads,
    stores,
)  # fmt: skip
from veomni_hook.patches.code.scope import parameter_names
from veomni_hook.patches.code.tree import COMPREHENSIONS

#: How many runs of statements are tried in a function.
_TRIED = 8
_END = (ast.Return, ast.Raise, ast.Continue, ast.Break)


def _pairs(
    rewrite: Rewrite,
) -> Iterator[tuple[ast.FunctionDef, list[ast.stmt], ast.Assign, ast.stmt, ast.Name]]:
    """Each ``name = value`` whose name the next statement reads before it calls anything."""
    for _, function in rewrite.functions():
        if odd(function):
            continue
        for block in blocks(function):
            for statement in reversed(block[:-1]):
                after = block[block.index(statement) + 1]
                if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
                    name = statement.targets[0].id
                    order = evaluated(head(after))
                    stop = [isinstance(n, ast.Call) or getattr(n, "id", "") == name for n in order]
                    node = order[stop.index(True)] if any(stop) else None
                    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                        if len(statement.targets) == 1:
                            yield function, block, statement, after, node


def temporaries_inlined(rewrite: Rewrite) -> None:
    """A value in the place of its name, where the next statement alone reads it."""
    for function, block, statement, after, node in _pairs(rewrite):
        bound = stores(function).count(node.id) + (node.id in parameter_names(function))
        if (
            bound == reads(function).count(node.id) == 1
            and not isinstance(after, ast.For)
            and rewrite.chance()
        ):
            put(after, node, statement.value)
            block.remove(statement)


def walrus(rewrite: Rewrite) -> None:
    """``x = value`` inside of the next statement; f-strings as sums of texts."""
    for _, block, statement, after, node in _pairs(rewrite):
        # What a comprehension loops over may hold none.
        if rewrite.chance() and not any(isinstance(each, COMPREHENSIONS) for each in ast.walk(after)):
            put(after, node, ast.NamedExpr(statement.targets[0], statement.value))
            block.remove(statement)
    for _, function in rewrite.functions():
        inside = {id(each) for node in ast.walk(function) for each in _texts_to_keep(node)}
        for node in list(ast.walk(function)):
            if isinstance(node, ast.Call | ast.Subscript | ast.Compare):
                for each in ast.iter_child_nodes(node):
                    if isinstance(each, ast.JoinedStr) and len(each.values) > 1 and id(each) not in inside:
                        if rewrite.chance():
                            texts = [
                                v if isinstance(v, ast.Constant) else ast.JoinedStr([v]) for v in each.values
                            ]
                            put(
                                node, each, reduce(lambda one, other: ast.BinOp(one, ast.Add(), other), texts)
                            )


def _texts_to_keep(node: ast.AST) -> Iterator[ast.AST]:
    """What is below annotations, defaults, and the fields of f-strings."""
    roots: list[ast.AST | None] = []
    if isinstance(node, ast.FunctionDef):
        roots = [node.args, node.returns, *node.decorator_list]
    elif isinstance(node, ast.AnnAssign):
        roots = [node.annotation]
    elif isinstance(node, ast.JoinedStr):
        roots = [*node.values]
    for root in roots:
        if root is not None:
            yield from ast.walk(root)


def temporaries_introduced(rewrite: Rewrite) -> None:
    """The first call of a statement, or an operation before it, gets a name first."""
    for _, function in rewrite.functions():
        for block in blocks(function) if not odd(function) else ():
            for statement in list(block):
                if not isinstance(statement, ast.Assign | ast.Return | ast.Expr) or is_docstring(statement):
                    continue
                order = evaluated(statement.value)
                stop = next((i for i, each in enumerate(order) if isinstance(each, ast.Call)), len(order))
                options = [
                    n for n in order[: stop + 1] if isinstance(n, ast.Call | ast.BinOp | ast.Subscript)
                ]
                options = [node for node in options if ast.unparse(node) != "super()"]
                if options and rewrite.chance():
                    node, name = rewrite.draw.choice(options), rewrite.fresh("kept")
                    put(statement, node, as_read(name))
                    block.insert(block.index(statement), ast.Assign([ast.Name(name, ast.Store())], node))


def methods_split(rewrite: Rewrite) -> None:
    """A run of a function's statements as a method or function of its own."""
    for owner, function in rewrite.functions():
        first_of = bool(is_docstring(function.body[0]))
        if odd(function) or len(function.body) - first_of < 3 or not rewrite.chance():
            continue
        for _ in range(_TRIED):
            first = rewrite.draw.randrange(first_of, len(function.body) - 2)
            last = rewrite.draw.randrange(first + 2, min(len(function.body), first + 9))
            if (run := _run(function, first, last)) is not None:
                _split(rewrite, owner, function, function.body[first:last], *run)
                break


def _split(
    rewrite: Rewrite, owner: ast.ClassDef | None, function: ast.FunctionDef, body: list[ast.stmt],
    given: list[str], bound: list[str],
) -> None:  # fmt: skip
    name = rewrite.fresh(f"_part_of_{function.name.strip('_')}")
    itself = owner is not None and "self" in given
    others = [each for each in given if not itself or each != "self"]
    made = ast.parse(f"def {name}({', '.join(['self'] * itself + others)}): return {', '.join(bound)}").body[
        0
    ]
    assert isinstance(made, ast.FunctionDef)
    made.body[:0] = body
    index = function.body.index(body[0])
    call = f"{', '.join(bound)} = {'self.' * itself}{name}({', '.join(others)})"
    function.body[index : index + len(body)] = ast.parse(call).body
    if itself and owner is not None:
        owner.body.insert(owner.body.index(function), made)
    else:
        rewrite.tree.body.insert(rewrite.tree.body.index(owner or function), made)


def _run(function: ast.FunctionDef, first: int, last: int) -> tuple[list[str], list[str]] | None:
    """What a run of statements needs, and what is read of it later; None if it cannot be taken out."""
    body = function.body
    whole = ast.Module(body[first:last], [])
    kinds = (ast.Return, ast.Lambda, ast.FunctionDef, ast.ClassDef, ast.Delete, ast.Raise)
    names = {*reads(whole), *stores(whole)}
    if "super" in names or any(isinstance(node, kinds) for node in ast.walk(whole)):
        return None
    own = {*stores(function), *parameter_names(function)}
    before = parameter_names(function).union(*map(_surely, body[:first]))
    surely = set().union(*map(_surely, body[first:last]))
    rest = set(reads(ast.Module(body[last:], [])))
    bound = [each for each in dict.fromkeys(stores(whole)) if each in rest]
    needed = [each for each in dict.fromkeys(reads(whole)) if each in own]
    # What is bound in one branch alone must have been bound before.
    given = [each for each in needed if each in before]
    given += [each for each in bound if each not in surely and each not in given]
    clear = {*needed, *bound} <= before | surely and {*given} <= before
    return (given, bound) if bound and clear else None


def _surely(statement: ast.stmt) -> set[str]:
    """The names that a statement binds in any case."""
    if isinstance(statement, ast.Assign | ast.AugAssign | ast.AnnAssign):
        if isinstance(statement, ast.AnnAssign) and statement.value is None:
            return set()
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        return {n.id for each in targets for n in ast.walk(each) if _stored(n)}  # type: ignore[attr-defined]
    if isinstance(statement, ast.If) and statement.orelse:
        one, other = (set().union(*map(_surely, block)) for block in (statement.body, statement.orelse))
        return one & other
    return set()


def _stored(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)


def helpers_inlined(rewrite: Rewrite) -> None:
    """Calls of small functions of the module, as what these return; their temporaries go first."""
    bodies: dict[str, tuple[list[str], ast.expr]] = {}
    for owner, function in rewrite.functions():
        if owner is None and not function.decorator_list and not odd(function):
            made = copy.deepcopy(function)
            small = Rewrite(rewrite.module, ast.Module([made], []), rewrite.draw, share=1.0)
            temporaries_inlined(small)
            body = [each for each in made.body if not is_docstring(each)]
            names = [each.arg for each in made.args.args]
            plain = len(names) == len(parameter_names(made)) and not made.args.defaults
            if plain and len(body) == 1 and isinstance(body[0], ast.Return) and body[0].value is not None:
                if not stores(body[0]):
                    bodies[made.name] = names, body[0].value
    for _, function in rewrite.functions():
        local = {*stores(function), *parameter_names(function)}
        for call in [each for each in ast.walk(function) if isinstance(each, ast.Call)]:
            if not isinstance(call.func, ast.Name) or call.func.id not in bodies or call.func.id in local:
                continue
            names, value = bodies[call.func.id]
            if call.keywords or len(call.args) != len(names) or function.name == call.func.id:
                continue
            free = set(reads(value)) - set(names)
            if (
                all(isinstance(each, ast.Name) for each in call.args)
                and not free & local
                and rewrite.chance()
            ):
                filled = _Filled(dict(zip(names, call.args, strict=True))).visit(copy.deepcopy(value))
                put(function, call, filled)


class _Filled(ast.NodeTransformer):
    """Puts arguments into the places of parameters."""

    def __init__(self, values: dict[str, ast.expr]) -> None:
        self.values = values

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return copy.deepcopy(self.values.get(node.id, node))


def returns_early(rewrite: Rewrite) -> None:
    """What follows a branch that ends becomes its ``else``, or an ``else`` what follows; one return as two."""
    for _, function in rewrite.functions():
        for block in blocks(function):
            for statement in list(block):
                here = any(each is statement for each in block)
                if not here or not isinstance(statement, ast.If) or not rewrite.chance():
                    continue
                rest = block[block.index(statement) + 1 :]
                if isinstance(statement.body[-1], _END):
                    if statement.orelse:
                        block[block.index(statement) + 1 :] = [*statement.orelse, *rest]
                        statement.orelse = []
                    elif rest:
                        del block[block.index(statement) + 1 :]
                        statement.orelse = rest
                elif statement.orelse and len(rest) == 1 and isinstance(rest[0], ast.Return):
                    statement.body.append(rest[0])
                    block[block.index(statement) + 1 :] = [*statement.orelse, copy.deepcopy(rest[0])]
                    statement.orelse = []


def branches_turned(rewrite: Rewrite) -> None:
    """``a + b`` as ``b + a``, ``a * b`` as ``b * a``; ``x is None`` and ``x is not None`` the other way round."""
    for _, function in rewrite.functions():
        for node in list(ast.walk(function)):
            match node:
                case ast.BinOp(left=left, op=ast.Add() | ast.Mult(), right=right):
                    if _numbers(node) and rewrite.chance():
                        node.left, node.right = right, left
                case ast.If(
                    test=ast.Compare(ops=[ast.Is() | ast.IsNot()] as ops), body=[_, *_], orelse=[other, *_]
                ) if not isinstance(other, ast.If) and rewrite.chance():
                    ops[0] = ast.IsNot() if isinstance(ops[0], ast.Is) else ast.Is()
                    node.body, node.orelse = node.orelse, node.body
                case ast.Compare(
                    left=left, ops=[ast.Is() | ast.IsNot()], comparators=[ast.Constant(value=None)]
                ):
                    if rewrite.chance():
                        node.left, node.comparators = node.comparators[0], [left]


def _numbers(node: ast.BinOp) -> bool:
    """Whether the operands of a sum or product look like numbers or tensors, and draw nothing at random."""
    if isinstance(node.op, ast.Add) and not all(
        isinstance(each, ast.Name | ast.Attribute | ast.Call | ast.BinOp) for each in (node.left, node.right)
    ):
        return False
    kinds = (ast.Tuple, ast.List, ast.Dict, ast.Set, ast.JoinedStr, ast.ListComp, ast.Starred)
    for each in ast.walk(node):
        if isinstance(each, kinds) or (isinstance(each, ast.Constant) and isinstance(each.value, str)):
            return False
    text = ast.unparse(node)
    words = ("shape", "size", "list", "tuple", "str", "dropout", "rand", "all_", "states_", "path", "name")
    return not any(word in text for word in words)


def conditions_spelled_out(rewrite: Rewrite) -> None:
    """``y = a if c else b`` as an if statement."""
    for _, function in rewrite.functions():
        for block in blocks(function):
            for statement in list(block):
                match statement:
                    case ast.Assign(targets=[ast.Name()], value=ast.IfExp(test, body, orelse)):
                        made: list[ast.stmt] = [
                            ast.Assign(copy.deepcopy(statement.targets), each) for each in (body, orelse)
                        ]
                    case ast.Return(value=ast.IfExp(test, body, orelse)):
                        made = [ast.Return(body), ast.Return(orelse)]
                    case _:
                        continue
                if rewrite.chance():
                    block[block.index(statement)] = ast.If(test, made[:1], made[1:])
