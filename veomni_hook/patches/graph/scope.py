"""The meaning of the module-level names of one file, from its own imports and definitions.

`Redefinitions` are those that the module replaces later: methods set on classes, names bound again. The
code of such a definition may not be the code that runs. If the text does not show what is replaced, because a
name is computed, everything that it may refer to counts as replaced.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterable, Iterator

from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.code.scope import bound_by
from veomni_hook.patches.code.tree import (
    DEFINITIONS,
    FUNCTIONS,
    blocks,
    decorator_name,
    header,
    last_name,
    methods_of,
    module_statements,
    walk_ast,
)
from veomni_hook.patches.graph.nodes import Form
from veomni_hook.patches.reasons import Reason

__all__ = ["Scope"]

_BUILTINS = frozenset(dir(builtins))
_ROOTS = ("torch.nn.Module", "builtins.object")
# Methods by which a class may change its own attributes, or those of its subclasses.
_DYNAMIC = {"__getattribute__", "__init_subclass__"}


class Scope:
    """The global names of one module.

    The meaning of a name is unknown if the module binds it in several ways (in ``try`` and ``except``, by
    ``global`` in a function). The same holds for a method that the module may replace.

    Args:
        tree: the module.

    Attributes:
        functions: the module's top-level functions that are bound once, by name.
        classes: the top-level classes that are bound once, by name.
        cache: forms that `canonical` has made, by function and class.
        replaced: the definitions that the module itself replaces.
        refused: the class's name to the reason why a method is unknown.
    """

    def __init__(self, tree: ast.Module) -> None:
        self.functions: dict[str, FunctionNode] = {}
        self.classes: dict[str, ast.ClassDef] = {}
        self.cache: dict[tuple[int, int], Form | Reason] = {}
        self.replaced = Redefinitions(tree)
        self.refused: dict[str, str] = {}
        self._meanings: dict[str, str | None] = {}
        self._assignments: dict[ast.ClassDef, dict[str, int]] = {}
        self._star = False
        self._class_definitions: list[ast.ClassDef] = []
        for statement in module_statements(tree):
            if isinstance(statement, ast.ClassDef):
                self._class_definitions.append(statement)
            for name, meaning in self._bindings(statement):
                known = self._meanings.get(name, meaning)
                self._meanings[name] = meaning if known == meaning else None
        self._meanings |= dict.fromkeys(self.replaced.declared_global)
        for statement in tree.body:
            name = getattr(statement, "name", "")
            if self._meanings.get(name) != f":{statement.lineno}" or self.replaced.line(name):
                continue
            if isinstance(statement, FUNCTIONS):
                self.functions[name] = statement
            elif isinstance(statement, ast.ClassDef):
                self.classes[name] = statement

    def resolve(self, name: str) -> str:
        """The full name of a global: ``torch.nn.functional``, ``builtins.int``.

        A name that the module defines itself, or whose meaning is unknown, gets a colon (``:rotate_half``).
        """
        if name in self._meanings:
            meaning = self._meanings[name]
            return f":{name}" if meaning is None or meaning.startswith(":") else meaning
        if name in _BUILTINS and not self._star:
            return f"builtins.{name}"
        return f":{name}"

    def method(
        self, owner: ast.ClassDef, name: str, *, above: bool = False
    ) -> tuple[FunctionNode, ast.ClassDef] | None:
        """The method ``self.name`` of an instance of ``owner``, and the class that defines it.

        Args:
            above: start after ``owner`` itself, as ``super()`` does.

        None if it is unknown: a class of another file is in between, a subclass of ``owner`` in this file
        overrides the method, or the module may replace it.
        """
        chain: list[ast.ClassDef] = []
        for base in self.lineage(owner):
            if base is None:
                return None
            chain.append(base)
            if name in methods_of(base) and (len(chain) > 1 or not above):
                reason = self._why_unknown(owner, name, chain[1:] if above else chain, above=above)
                if reason:
                    self.refused[owner.name] = reason
                return None if reason else (methods_of(base)[name], base)
        return None

    def why_refused(self, name: str) -> str:
        """Why a method of a class is unknown, as the end of a sentence; empty if none is."""
        return f"; {self.refused[name]}" if name in self.refused else ""

    def lineage(self, owner: ast.ClassDef) -> Iterator[ast.ClassDef | None]:
        """``owner`` and its base classes of this file, in order; None for one that is defined elsewhere.

        The lineage ends at ``object`` and ``nn.Module``. It ends with None at a class with several bases.
        """
        seen: set[str] = set()
        current: ast.ClassDef | None = owner
        while current is not None and current.name not in seen:
            seen.add(current.name)
            yield current
            bases = [self.dotted(base) for base in current.bases]
            bases = [base for base in bases if base not in _ROOTS]
            if not bases:
                return
            own = [base[1:] for base in bases if base.startswith(":")]
            current = self.classes.get(own[0]) if len(bases) == 1 and own else None
        yield None

    def dotted(self, node: ast.expr) -> str:
        """The full name of an expression of names and dots; empty for any other expression."""
        if isinstance(node, ast.Name):
            return self.resolve(node.id)
        if isinstance(node, ast.Attribute):
            base = self.dotted(node.value)
            return f"{base}.{node.attr}" if base else ""
        return ""

    def _why_unknown(self, owner: ast.ClassDef, name: str, chain: list[ast.ClassDef], *, above: bool) -> str:
        """Why an instance of ``owner`` may have another method of this name; empty if it may not.

        Args:
            chain: the classes in which it is looked up, up to the one that defines it.
        """
        subclasses = self._subclasses(owner)
        for holder in chain if above else (*subclasses, *chain):
            if number := self.replaced.line(f"{holder.name}.{name}"):
                return f"{holder.name}.{name} may be replaced at line {number}"
            if not above and (number := self._assignment_line(holder, name)):
                return f"{holder.name} assigns self.{name} at line {number}"
            if special := methods_of(holder).keys() & _DYNAMIC:
                return f"{holder.name} defines {', '.join(sorted(special))} (line {holder.lineno})"
        own = {id(base) for base in self.lineage(owner) if base is not None}
        for subclass in subclasses:
            for base in self.ancestors(subclass):
                if base is None:
                    return f"{subclass.name} may inherit another {name} (line {subclass.lineno})"
                if id(base) in own or (above and base in subclasses):
                    continue
                if (method := methods_of(base).get(name)) is not None:
                    return f"{subclass.name} has {base.name}.{name} (line {method.lineno})"
        return ""

    def ancestors(self, owner: ast.ClassDef) -> Iterator[ast.ClassDef | None]:
        """A class and its base classes; None for a base of another file that precedes one of this file."""
        pending, seen = [owner], set[int]()
        for current in pending:
            if id(current) in seen:
                continue
            seen.add(id(current))
            yield current
            names = [self.dotted(base) for base in current.bases]
            own = [number for number, name in enumerate(names) if name.startswith(":")]
            for number, name in enumerate(names):
                bases = [known for known in self._class_definitions if name == f":{known.name}"]
                pending += bases
                if not bases and name not in _ROOTS and own and number < own[-1]:
                    yield None

    def _assignment_line(self, owner: ast.ClassDef, name: str) -> int:
        """The line where a method of a class assigns ``self.<name>``, or 0."""
        lines = self._assignments.get(owner)
        if lines is None:
            lines = self._assignments[owner] = {
                node.attr: node.lineno
                for method in owner.body
                if isinstance(method, FUNCTIONS)
                for node in walk_ast(method)
                if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load)
                if getattr(node.value, "id", "") == "self"
            }
        return lines.get(name, 0)

    def _subclasses(self, owner: ast.ClassDef) -> list[ast.ClassDef]:
        classes = [owner]
        for base in classes:
            for candidate in self._class_definitions:
                if candidate not in classes and any(
                    self.dotted(expression) == f":{base.name}" for expression in candidate.bases
                ):
                    classes.append(candidate)
        return classes[1:]

    def _bindings(self, statement: ast.stmt) -> Iterator[tuple[str, str]]:
        if isinstance(statement, ast.Import):
            for alias in statement.names:
                top = alias.name.partition(".")[0]
                yield (alias.asname, alias.name) if alias.asname else (top, top)
        elif isinstance(statement, ast.ImportFrom):
            module = "." * statement.level + (statement.module or "")
            separator = "" if module.endswith(".") else "."
            for alias in statement.names:
                self._star |= alias.name == "*"
                yield alias.asname or alias.name, f"{module}{separator}{alias.name}"
        else:
            for name in bound_by(statement):
                # With the line: two definitions of one name are two meanings.
                yield name, f":{statement.lineno}"


#: Decorators of classes that change neither helpers nor what ``forward`` computes.
_HARMLESS = frozenset(
    "auto_docstring dataclass requires use_experts_implementation use_kernel_forward_from_hub "
    "use_kernelized_func".split()
)
_METACLASSES = ("ABCMeta",)
_CODE = ("__code__", "__defaults__", "__kwdefaults__")
_NAMESPACES = ("globals", "locals", "vars")
#: The module itself.
_MODULES = ("import_module(__name__)", "__import__(__name__)", "sys.modules[__name__]")
_SETTERS = ("setattr", "delattr", "__setattr__", "__delattr__")
_ALL = "*"
#: Instead of a method's name: a decorator or metaclass, which does not affect code inside the class.
_AROUND = "@"


class Redefinitions:
    """The definitions that a module itself replaces, with the lines that do so.

    Args:
        tree: the module.

    Attributes:
        declared_global: the names that functions declare ``global``.
    """

    def __init__(self, tree: ast.Module) -> None:
        self._tree = tree
        self._lines: dict[str, int] = {}
        statements = list(module_statements(tree))
        definitions = [node for node in statements if isinstance(node, DEFINITIONS)]
        self._classes = {node.name: node for node in definitions if isinstance(node, ast.ClassDef)}
        self._functions = {node.name for node in definitions if isinstance(node, FUNCTIONS)}
        self._imported = set[str]()
        self.declared_global = set[str]()
        for statement in statements:
            self._bind(statement)
            self._read([] if isinstance(statement, DEFINITIONS) else header(statement), top=True)
        for owner in self._classes.values():
            self._read_class(owner)
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
        return next((self._lines[key] for key in asked if key in self._lines), 0)

    def _note(self, name: str, node: ast.AST) -> None:
        self._lines[name] = getattr(node, "lineno", 0)

    def _bind(self, statement: ast.stmt) -> None:
        """Record names of definitions that a module-level statement binds again."""
        defined = self._functions | self._classes.keys()
        names = bound_by(statement) if not isinstance(statement, DEFINITIONS) else set()
        if isinstance(statement, ast.Import | ast.ImportFrom):
            self._imported |= names - defined
            above = (node for node in self._tree.body if node.lineno < statement.lineno)
            if _ALL in names:
                names = {node.name for node in above if isinstance(node, DEFINITIONS)}
        for name in names & defined:
            self._note(name, statement)

    def _read_class(self, owner: ast.ClassDef) -> None:
        """Record methods that the class's own body binds again, or a decorator or metaclass may replace."""
        methods = methods_of(owner)
        # All blocks, because a conditional definition is not certain to be the class's method.
        for block in blocks(owner):
            for statement in block:
                for name in bound_by(statement):
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
                self.declared_global.update(node.names)
                for name in {*node.names} & (self._functions | self._classes.keys()):
                    self._note(name, node)
            elif isinstance(node, ast.Call):
                self._call(node, top=top)

    def _set(self, node: ast.AST, owner: ast.expr, name: str | None, *, top: bool) -> None:
        """Record that an attribute is set on ``owner``; ``name`` is None if it is computed."""
        path = owner.id if isinstance(owner, ast.Name) else ast.unparse(owner)  # which takes long
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

    def _hand_over(self, call: ast.Call, arguments: Iterable[ast.AST]) -> None:
        """Record classes that are passed to code which may change them or override their attributes."""
        for argument in arguments:
            if isinstance(argument, ast.Name) and argument.id in self._classes:
                self._note(f"{argument.id}.{_ALL}", call)


def _is_namespace(node: ast.expr) -> bool:
    """``globals()``, ``vars()``, ``sys.modules[__name__].__dict__`` and the like."""
    if isinstance(node, ast.Attribute):
        return node.attr == "__dict__" and _is_module(node.value)
    if not isinstance(node, ast.Call) or getattr(node.func, "id", "") not in _NAMESPACES:
        return False
    return not node.args or _is_module(node.args[0])


def _is_module(node: ast.expr) -> bool:
    return not isinstance(node, ast.Name) and ast.unparse(node) in _MODULES


def _literal(node: ast.expr) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None
