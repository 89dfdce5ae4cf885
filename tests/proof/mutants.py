"""Random small changes of recognised bodies, of what they call, and of what their class is made of."""

from __future__ import annotations

import ast
import copy
import random
import textwrap
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import TypeAlias

from tests.proof.expression_changes import Change, Put, Surroundings, of_expression
from tests.proof.statement_changes import of_definition, of_statements

#: What was changed, and the whole changed source.
Mutant: TypeAlias = tuple[str, str]

_DEPTH = 3


def mutants(
    source: str, names: Sequence[str], count: int, seed: int | str, near: range | None = None
) -> Iterator[Mutant]:
    """Up to ``count`` different mutants with one change each in one of the definitions ``names``.

    Kinds of changes are drawn first, then one change of the kind, so that rare ones come up, too. Most
    are in the first definition; there, changes of the lines ``near`` come up more often.
    """
    draw = random.Random(seed)
    found = [node for name in names if (node := find(ast.parse(source), name)) is not None]
    classes = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}
    owner = classes.get(names[0].partition(".")[0])
    known = {ast.dump(ast.parse(source))}
    weights = [_weight(node, first=node is found[0], others=len(found) - 1) for node in found]
    for _ in range(4 * count + 40):
        if not found or count <= 0:
            return
        body = draw.choices(found, weights)[0]
        changed = copy.deepcopy(body)
        by_kind: dict[str, list[Change]] = {}
        for change in _changes(changed, owner, draw):
            by_kind.setdefault(change[0], []).append(change)
        options = by_kind[draw.choice(sorted(by_kind))]
        if near is not None and body is found[0] and draw.random() < 0.8:
            options = [change for change in options if change[2] in near] or options
        _, label, line, apply = draw.choice(options)
        apply()
        text = _with(source, body, changed)
        try:
            # Compiling finds more than parsing: keywords given twice, say.
            compile(ast.unparse(changed), "mutant", "exec", dont_inherit=True)
            dump = ast.dump(ast.parse(text))
        except SyntaxError:
            continue
        if dump in known:
            continue
        known.add(dump)
        count -= 1
        yield f"{body.name} line {line}: {label}", text


def _weight(node: ast.FunctionDef, *, first: bool, others: int) -> float:
    """How often a definition is changed: in two of three times the first, least what makes the class."""
    if first:
        return 2.0
    return (0.3 if node.name == "__init__" else 1.0) / others


def _with(source: str, old: ast.FunctionDef, new: ast.FunctionDef) -> str:
    """``source`` with a definition written anew."""
    lines = source.splitlines(keepends=True)
    first = min([old.lineno, *(decorator.lineno for decorator in old.decorator_list)]) - 1
    text = textwrap.indent(ast.unparse(ast.fix_missing_locations(new)), " " * old.col_offset)
    return "".join([*lines[:first], text, "\n", *lines[old.end_lineno :]])


def find(tree: ast.Module, name: str) -> ast.FunctionDef | None:
    """The definition ``f`` or ``Class.method``, the last one of the name."""
    body: list[ast.stmt] = tree.body
    found: ast.stmt | None = None
    for part in name.split("."):
        kinds = (ast.FunctionDef, ast.ClassDef)
        found = next((s for s in reversed(body) if isinstance(s, kinds) and s.name == part), None)
        if found is None:
            return None
        body = found.body
    return found if isinstance(found, ast.FunctionDef) else None


def bodies(source: str, target: str) -> list[str]:
    """The target, the functions and methods of the module that it uses, and what makes its class."""
    tree = ast.parse(source)
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    owner = target.rpartition(".")[0]
    found: list[str] = []
    todo = [(target, 0)]
    while todo:
        current, depth = todo.pop(0)
        node = find(tree, current)
        if node is None or current in found:
            continue
        found.append(current)
        for used in ast.walk(node) if depth < _DEPTH else ():
            if isinstance(used, ast.Name) and used.id in functions:
                todo.append((used.id, depth + 1))
            if isinstance(used, ast.Attribute) and used.attr not in ("forward", "__init__"):
                todo += [(f"{name}.{used.attr}", depth + 1) for name in _line(classes, owner)]
    return [*found, *(name for one in _line(classes, owner) if find(tree, name := f"{one}.__init__"))]


def _line(classes: dict[str, ast.ClassDef], name: str) -> list[str]:
    """A class and its bases in the module."""
    if name not in classes:
        return []
    bases = [base.id for base in classes[name].bases if isinstance(base, ast.Name)]
    return [name, *(each for base in bases for each in _line(classes, base))]


def _changes(function: ast.FunctionDef, owner: ast.ClassDef | None, draw: random.Random) -> Iterator[Change]:
    around = Surroundings(_exchangeable(function), _assigned(owner), draw)
    for node, put, is_callee in _places(function):
        yield from of_expression(node, put, around, is_callee=is_callee)
    yield from of_statements(function, around)
    yield from of_definition(function)


def _exchangeable(function: ast.FunctionDef) -> list[str]:
    """Locals that are read."""
    names = [node for node in ast.walk(function) if isinstance(node, ast.Name)]
    local = {argument.arg for argument in (*function.args.args, *function.args.kwonlyargs)}
    local |= {node.id for node in names if isinstance(node.ctx, ast.Store)}
    return sorted({node.id for node in names if isinstance(node.ctx, ast.Load)} & local - {"self", "config"})


def _assigned(owner: ast.ClassDef | None) -> list[str]:
    """The attributes that a class sets."""
    nodes = ast.walk(owner) if owner is not None else ()
    return sorted(
        {
            node.attr
            for node in nodes
            if isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and isinstance(node.value, ast.Name)
            and node.value.id == "self"
        }
    )


def _places(function: ast.FunctionDef) -> Iterator[tuple[ast.AST, Put, bool]]:
    """Every node of what runs, and how to put another into its place, and whether it is what is called.

    There are no texts and annotations among them.
    """
    todo: list[ast.AST] = [*function.body, function.args]
    while todo:
        parent = todo.pop(0)
        for field, value in ast.iter_fields(parent):
            items = value if isinstance(value, list) else [value]
            for index, item in enumerate(items):
                if not isinstance(item, ast.AST) or isinstance(item, ast.JoinedStr | ast.arg):
                    continue
                if field == "annotation":
                    continue
                todo.append(item)
                if isinstance(parent, ast.Expr) and isinstance(item, ast.Constant):
                    continue
                place = index if isinstance(value, list) else None

                def put(
                    new: ast.AST, parent: ast.AST = parent, field: str = field, place: int | None = place
                ) -> None:
                    if place is None:
                        setattr(parent, field, new)
                    else:
                        getattr(parent, field)[place] = new

                yield item, put, field == "func"


def inserted_in(tree: ast.Module, aliases: Sequence[str]) -> list[ast.Call]:
    """The calls of helpers of ours, which a text knows by these names."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [
        call
        for call in calls
        if isinstance(call.func, ast.Attribute)
        and isinstance(call.func.value, ast.Name)
        and call.func.value.id in aliases
    ]


def changed_arguments(
    tree: ast.Module, aliases: Sequence[str], calls: Collection[str]
) -> Iterator[tuple[str, ast.Module]]:
    """The text with one argument of one of the inserted ``calls`` (their dumps) as None, or as its neighbour.

    Elements of tuples are arguments, too. Constants are left alone, but for those of keywords and tuples.
    """
    known = {ast.dump(tree)}
    count = len(inserted_in(tree, aliases))
    for number in range(count):
        original = inserted_in(tree, aliases)[number]
        if ast.dump(original) not in calls:
            continue
        for place, (slot, _) in enumerate(_arguments(original)):
            for other in ("None", "its neighbour"):
                changed = copy.deepcopy(tree)
                arguments = list(_arguments(inserted_in(changed, aliases)[number]))
                _, put = arguments[place]
                if other == "None":
                    put(ast.Constant(None))
                elif (neighbour := _neighbour(arguments, place)) is not None:
                    put(copy.deepcopy(neighbour))
                ast.fix_missing_locations(changed)
                if (dump := ast.dump(changed)) not in known:
                    known.add(dump)
                    yield f"{ast.unparse(original.func)}: {ast.unparse(slot)[:60]} as {other}", changed


_Argument: TypeAlias = tuple[ast.expr, Callable[[ast.expr], None]]


def _arguments(call: ast.Call) -> Iterator[_Argument]:
    """The arguments of a call, and how to put another into the place of each."""
    for index, value in enumerate(call.args):
        yield value, partial(call.args.__setitem__, index)
        if isinstance(value, ast.Tuple):
            for at, element in enumerate(value.elts):
                yield element, partial(value.elts.__setitem__, at)
    for keyword in call.keywords:
        yield keyword.value, partial(setattr, keyword, "value")


def _neighbour(arguments: list[_Argument], place: int) -> ast.expr | None:
    """The argument after one, or else before it."""
    nodes = [node for node, _ in arguments]
    own = nodes[place]
    around = [*nodes[place + 1 : place + 2], *nodes[max(place - 1, 0) : place]]
    return next((node for node in around if ast.dump(node) != ast.dump(own)), None)
