"""Rewrites of calls: reordered parameters, keywords for positions and back, helpers in another module."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Callable, Iterator
from importlib.util import resolve_name

from tests.rehearsal.code import Rewrite, odd, reads, stores
from veomni_hook.patches.code.scope import parameter_names
from veomni_hook.patches.code.tree import last_name

#: Functions of torch and methods of tensors with parameters that have one name in all releases.
_TORCH = {
    "torch.matmul": ("input", "other"), "torch.cat": ("tensors", "dim"), "torch.rsqrt": ("input",),
    "torch.topk": ("input", "k", "dim"), "torch.sigmoid": ("input",), "F.linear": ("input", "weight", "bias"),
    "F.softmax": ("input", "dim"), "F.silu": ("input",), "nn.functional.softmax": ("input", "dim"),
    "nn.functional.linear": ("input", "weight", "bias"),
}  # fmt: skip
_METHODS = {"unsqueeze": ("dim",), "softmax": ("dim",), "chunk": ("chunks", "dim"), "topk": ("k", "dim")}


def _private(rewrite: Rewrite) -> Iterator[ast.FunctionDef]:
    """Functions at top level that are only called, and only in this module."""
    named = [node for node in ast.walk(rewrite.tree) if isinstance(node, ast.Name)]
    called = {id(node.func) for node in ast.walk(rewrite.tree) if isinstance(node, ast.Call)}
    held = {node.id for node in named if id(node) not in called}
    texts = {
        n.value for n in ast.walk(rewrite.tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)
    }
    held |= rewrite.facts.imported.get(rewrite.module, set()) | texts
    every = [function.name for _, function in rewrite.functions()]
    shadowed = {name for _, function in rewrite.functions() for name in stores(function)}
    for owner, function in rewrite.functions():
        if owner is None and function.name not in held | shadowed and every.count(function.name) == 1:
            yield function


def arguments_reordered(rewrite: Rewrite) -> None:
    """Parameters without defaults of private functions in another order, with the arguments of all calls."""
    for function in list(_private(rewrite)):
        given = function.args
        plain = len(given.args) - len(given.defaults)
        calls = [
            node for node in ast.walk(rewrite.tree)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == function.name
        ]  # fmt: skip
        fits = plain > 1 and not given.posonlyargs and not function.decorator_list
        # Each call gives all of them by position, or none.
        for call in calls:
            starred = any(isinstance(each, ast.Starred) for each in call.args)
            fits &= not starred and (len(call.args) >= plain or not call.args)
        if fits and rewrite.chance():
            order = list(range(plain))
            while order == sorted(order):
                rewrite.draw.shuffle(order)
            given.args[:plain] = [given.args[index] for index in order]
            for call in calls:
                if call.args:
                    call.args[:plain] = [call.args[index] for index in order]


def _signatures(rewrite: Rewrite) -> Callable[[ast.Call, str], tuple[str, ...]]:
    """Says which parameters a call's positions mean, if that is known."""
    known: dict[str, set[tuple[str, ...]]] = {}
    for owner, function in rewrite.functions():
        given = function.args
        names = tuple(each.arg for each in (*given.posonlyargs, *given.args))
        name = function.name if owner is None else f"self.{function.name}"
        if name == "self.__init__" and owner is not None:
            name = owner.name
        clear = not given.posonlyargs and given.vararg is None and not function.decorator_list
        known.setdefault(name, set()).add((names[1:] if owner is not None else names) if clear else ())

    def of(call: ast.Call, scope: str) -> tuple[str, ...]:
        text = ast.unparse(call.func)
        if text in _TORCH:
            return _TORCH[text]
        found = known.get(text, set())
        if len(found) == 1 and text not in scope.split() and text != "self.forward":
            return next(iter(found))
        return ()

    return of


def _calls(rewrite: Rewrite) -> Iterator[tuple[ast.Call, tuple[str, ...]]]:
    of = _signatures(rewrite)
    for _, function in rewrite.functions():
        scope = " ".join([*stores(function), *parameter_names(function)])
        for node in ast.walk(ast.Module(function.body, [])):
            if isinstance(node, ast.Call) and not any(isinstance(each, ast.Starred) for each in node.args):
                names = of(node, scope)
                if not names and isinstance(node.func, ast.Attribute) and _of_tensor(node):
                    names = _METHODS[node.func.attr]
                if names:
                    yield node, names


def _of_tensor(node: ast.Call) -> bool:
    assert isinstance(node.func, ast.Attribute)
    module = last_name(node.func.value) in ("torch", "functional", "F", "np", "numpy", "tf")
    return node.func.attr in _METHODS and not module


def keywords_for_positions(rewrite: Rewrite) -> None:
    """Arguments by keyword from some position on, where the callee is known."""
    for node, names in _calls(rewrite):
        taken = {each.arg for each in node.keywords}
        if node.args and len(node.args) <= len(names) and None not in taken and rewrite.chance():
            first = rewrite.draw.randrange(len(node.args))
            moved = [
                ast.keyword(name, each) for name, each in zip(names[first:], node.args[first:], strict=False)
            ]
            node.keywords = [*moved, *node.keywords]
            del node.args[first:]


def positions_for_keywords(rewrite: Rewrite) -> None:
    """The next arguments by position, where they are given by keyword."""
    for node, names in _calls(rewrite):
        if not rewrite.chance():
            continue
        while node.keywords and len(node.args) < len(names):
            match = [each for each in node.keywords if each.arg == names[len(node.args)]]
            if not match or any(each.arg is None for each in node.keywords):
                break
            node.keywords.remove(match[0])
            node.args.append(match[0].value)


def helpers_moved(rewrite: Rewrite) -> None:
    """Functions at top level in a module of their own, which the hook knows or does not; an import in their place."""
    imports = [each for each in rewrite.tree.body if isinstance(each, ast.Import | ast.ImportFrom)]
    there = {name for each in imports for name in stores(each)} | set(dir(builtins))
    candidates = {
        function.name: function
        for owner, function in rewrite.functions()
        if owner is None and not odd(function)
    }  # fmt: skip
    bound_twice = [name for each in rewrite.tree.body for name in _binds(each)]
    moved = {n: f for n, f in candidates.items() if bound_twice.count(n) == 1 and rewrite.chance()}
    while stay := [
        name for name, function in moved.items()
        if not set(reads(function)) - set(stores(function)) - parameter_names(function) <= there | moved.keys()
    ]:  # fmt: skip
        for name in stay:
            del moved[name]
    if not moved:
        return
    package, _, stem = rewrite.module.rpartition(".")
    name = rewrite.draw.choice((f"{package}.{stem}_parts", f"{package}.parts_of_{stem}"))
    future = [each for each in imports if isinstance(each, ast.ImportFrom) and each.module == "__future__"]
    head: list[ast.stmt] = [*future, *(_absolute(each, package) for each in imports if each not in future)]
    rewrite.more[name] = ast.Module([*head, *moved.values()], [])
    rewrite.tree.body = [each for each in rewrite.tree.body if each not in moved.values()]
    rewrite.insert(f"from {name} import {', '.join(moved)}")


def _binds(statement: ast.stmt) -> list[str]:
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return [statement.name]
    return stores(statement)


def _absolute(statement: ast.Import | ast.ImportFrom, package: str) -> ast.stmt:
    if isinstance(statement, ast.Import) or not statement.level:
        return statement
    home = resolve_name("." * statement.level + (statement.module or ""), package)
    return ast.ImportFrom(home, statement.names, 0)
