"""Find definitions that a module itself replaces later: methods set on classes, names bound again.

The code of such a definition may not be the code that runs. If the text does not show what is replaced, for
example because a name is computed, everything that it may refer to counts as replaced.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Sequence

from veomni_hook.patches.code.template import Template
from veomni_hook.patches.code.tree import (
    DEFINITIONS,
    FUNCTIONS,
    blocks,
    child_nodes,
    decorator_name,
    last_name,
    module_statements,
    walk_ast,
)

__all__ = ["Redefinitions"]

#: Decorators of classes that change neither helpers nor what ``forward`` computes.
_HARMLESS = frozenset(
    "auto_docstring dataclass requires use_experts_implementation use_kernel_forward_from_hub "
    "use_kernelized_func".split()
)
_METACLASSES = ("ABCMeta",)
_CODE = ("__code__", "__defaults__", "__kwdefaults__")
_NAMESPACES = ("globals", "locals", "vars")
#: The module itself.
_MODULES = [Template(f"{one}(__name__)") for one in ("import_module", "__import__")]
_MODULES.append(Template("sys.modules[__name__]"))
_SETTERS = ("setattr", "delattr", "__setattr__", "__delattr__")
#: Text of code in a function that may change definitions; function bodies are searched only if it occurs.
_WORDS = ("globals(", "exec(", "sys.modules")
_GIVEN = re.compile(r"(?:set|del)attr(?:__)?\(\s*(\w+)")
_GLOBAL = re.compile(r"^[ \t]+global[ \t]", re.MULTILINE)
_MADE = re.compile(r"type\([^,()\n]+,\s*\(")
_ALL = "*"
#: Instead of a method's name: a decorator or metaclass, which does not affect code inside the class.
_AROUND = "@"


class Redefinitions:
    """The definitions that a module itself replaces, with the lines that do so.

    Args:
        tree: the module.
        source: its text; without it, the whole tree is searched.
    """

    def __init__(self, tree: ast.Module, source: str | None = None) -> None:
        self._tree = tree
        self._lines: dict[str, int] = {}
        statements = list(module_statements(tree))
        definitions = [node for node in statements if isinstance(node, DEFINITIONS)]
        self._classes = {node.name: node for node in definitions if isinstance(node, ast.ClassDef)}
        self._functions = {node.name for node in definitions if isinstance(node, FUNCTIONS)}
        self._imported = set[str]()
        for statement in statements:
            nodes = [] if isinstance(statement, DEFINITIONS) else list(_header(statement))
            self._bind(statement, nodes)
            self._read(nodes, top=True)
        for owner in self._classes.values():
            self._read_class(owner)
        if source is None or self._may_hide(source):
            for definition in definitions:
                self._read(walk_ast(definition), top=False)

    def __bool__(self) -> bool:
        return bool(self._lines)

    def line(self, name: str, *, target: bool = False) -> int:
        """The line that may replace ``Class``, ``Class.method`` or ``function``; 0 if there is none.

        Args:
            target: ignore decorators of the class; they do not affect a guard inside the definition.
        """
        owner, _, member = name.rpartition(".")
        asked = [name, _ALL]
        if owner:
            asked += [owner, f"{_ALL}.{member}", f"{owner}.{_ALL}"]
            asked += [] if target else [f"{owner}.{_AROUND}"]
        return next((self._lines[each] for each in asked if each in self._lines), 0)

    def _note(self, name: str, node: ast.AST) -> None:
        self._lines[name] = getattr(node, "lineno", 0)

    def _may_hide(self, source: str) -> bool:
        """Whether a function may change a definition, judged by the text because walking a tree is slow."""
        names = self._functions | self._classes.keys()
        return (
            any(word in source for word in _WORDS)
            or ("global " in source and _GLOBAL.search(source) is not None)
            or ("type(" in source and _MADE.search(source) is not None)
            or ("attr" in source and any(found[1] in names for found in _GIVEN.finditer(source)))
            or any(
                f"del {name}" in source or re.search(rf"{name}\.[^=(\n]*=(?!=)", source)
                for name in names
                if f"{name}." in source or f"del {name}" in source
            )
        )

    def _bind(self, statement: ast.stmt, nodes: Sequence[ast.AST]) -> None:
        """Record names of definitions that a module-level statement binds again."""
        defined = self._functions | self._classes.keys()
        if isinstance(statement, ast.Import | ast.ImportFrom):
            names = {alias.asname or alias.name.partition(".")[0] for alias in statement.names}
            self._imported |= names - defined
            above = (node for node in self._tree.body if node.lineno < statement.lineno)
            if _ALL in names:
                names = {node.name for node in above if isinstance(node, DEFINITIONS)}
        else:
            names = _stored(nodes) | _caught(statement)
        for name in names & defined:
            self._note(name, statement)

    def _read_class(self, owner: ast.ClassDef) -> None:
        """Record methods that the class's own body binds again, or a decorator or metaclass may replace."""
        methods = {node.name: node for node in owner.body if isinstance(node, FUNCTIONS)}
        # All blocks, because a conditional definition is not certain to be the class's method.
        for block in blocks(owner):
            for statement in block:
                bound = _stored(_header(statement)) if not isinstance(statement, DEFINITIONS) else set()
                for name in bound or {getattr(statement, "name", "")}:
                    if name in methods and statement.lineno > methods[name].lineno:
                        self._note(f"{owner.name}.{name}", statement)
        for node in (*owner.decorator_list, *(keyword.value for keyword in owner.keywords)):
            named = decorator_name(node)
            harmless = named in (*_HARMLESS, *_METACLASSES) or isinstance(node, ast.Constant)  # total=False
            if named in self._functions or not harmless:
                self._note(f"{owner.name}.{_AROUND}", node)

    def _read(self, nodes: Iterable[ast.AST], *, top: bool) -> None:
        """Record changes of attributes and namespaces in module-level code, or in functions."""
        for node in nodes:
            if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
                self._set(node, node.value, node.attr, top=top)
            elif isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
                if _is_namespace(node.value):
                    self._note(_literal(node.slice) or _ALL, node)
            elif isinstance(node, ast.Global):
                for name in {*node.names} & (self._functions | self._classes.keys()):
                    self._note(name, node)
            elif isinstance(node, ast.Call):
                self._call(node, top=top)

    def _set(self, node: ast.AST, owner: ast.expr, name: str | None, *, top: bool) -> None:
        """Record that an attribute is set on ``owner``; ``name`` is None if it is computed."""
        path = ast.unparse(owner)
        root, _, rest = path.partition(".")
        if root in self._classes:
            # An attribute of a method (`Class.method.__code__`) changes the method.
            member = rest.partition(".")[0] if rest else name
            dunder = member is not None and member in ("__bases__", "__class__")
            self._note(f"{root}.{_ALL if member is None or dunder else member}", node)
        elif root in self._functions:
            if name is None or name in _CODE:
                self._note(root, node)
        elif _is_module(owner):
            self._note(name or _ALL, node)
        elif top and root not in self._imported:
            # ``owner`` may be another name for any of the classes.
            self._note(f"{_ALL}.{name}" if name is not None else _ALL, node)

    def _call(self, call: ast.Call, *, top: bool) -> None:
        function, args = call.func, call.args
        name = last_name(function)
        if name in _SETTERS and len(args) > 1:
            self._set(call, args[0], _literal(args[1]), top=top)
        elif isinstance(function, ast.Attribute) and _is_namespace(function.value):
            if name in ("update", "pop", "setdefault", "clear", "__setitem__", "__delitem__", "popitem"):
                keys = [_literal(args[0])] if args and name != "update" else [_ALL] if args else []
                for key in (*keys, *(keyword.arg for keyword in call.keywords)):
                    self._note(key or _ALL, call)
        elif name == "exec" and isinstance(function, ast.Name):
            self._note(_ALL, call)
        elif name == "type" and len(args) == 3:
            self._hand_over(call, walk_ast(args[1]))
        elif top and name in self._functions:
            self._hand_over(call, (*args, *(keyword.value for keyword in call.keywords)))

    def _hand_over(self, call: ast.Call, given: Iterable[ast.AST]) -> None:
        """Record classes that are passed to code which may change them or override their attributes."""
        for each in given:
            if isinstance(each, ast.Name) and each.id in self._classes:
                self._note(f"{each.id}.{_ALL}", call)


def _header(statement: ast.stmt) -> Iterator[ast.AST]:
    """The nodes of a statement, without those of nested statements."""
    pending: list[ast.AST] = [statement]
    while pending:
        for child in child_nodes(pending.pop()):
            if isinstance(child, ast.expr):
                yield from walk_ast(child)
            elif isinstance(child, ast.withitem | ast.match_case | ast.ExceptHandler):
                pending.append(child)


def _stored(nodes: Iterable[ast.AST]) -> set[str]:
    return {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}


def _caught(statement: ast.stmt) -> set[str]:
    """Names that `except ... as` and patterns of `match` bind."""
    handlers: Sequence[ast.ExceptHandler] = getattr(statement, "handlers", ())
    names = {handler.name for handler in handlers if handler.name}
    for case in getattr(statement, "cases", ()):
        names |= {getattr(node, "name", None) or "" for node in walk_ast(case.pattern)}
    return names


def _is_namespace(node: ast.expr) -> bool:
    """``globals()``, ``vars()``, ``sys.modules[__name__].__dict__`` and the like."""
    if isinstance(node, ast.Attribute):
        return node.attr == "__dict__" and _is_module(node.value)
    if not isinstance(node, ast.Call) or getattr(node.func, "id", "") not in _NAMESPACES:
        return False
    return not node.args or _is_module(node.args[0])


def _is_module(node: ast.expr) -> bool:
    return any(form.match(node) for form in _MODULES)


def _literal(node: ast.expr) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None
