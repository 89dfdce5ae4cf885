"""Calls of a class's own modules, of which ``__init__`` creates torch's: the slot takes over such a call.

h = self.norm(x)  ->  h = slot.call(self, self.norm, x)
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.code.edit import Edit
from veomni_hook.patches.code.tree import calls_in, in_text_order, last_name, own_attribute
from veomni_hook.patches.idioms.shared import check_self, gathered
from veomni_hook.patches.routes.view import ModuleView, initialised_by
from veomni_hook.patches.site import Code, Missed, Reason, Site, Status, slot_name

__all__ = ["Created", "created_by", "own_calls", "sites_of_calls"]

#: Attributes of a class, with the calls in ``__init__`` that create their modules.
Created = dict[str, list[ast.Call]]


# Between what is called and its arguments.
_OPENING = re.compile(r"\s*\(")


def created_by(view: ModuleView, owner: ast.ClassDef, wanted: Callable[[ast.Call], bool]) -> Created:
    """The attributes to which ``__init__`` assigns a call that is ``wanted``.

    An inherited ``__init__`` counts. In a conditional expression, one branch suffices.
    """
    created: Created = {}
    for attribute, value in initialised_by(view, owner):
        branches = [value]
        for branch in branches:  # the list grows during the loop
            if isinstance(branch, ast.IfExp):
                branches += [branch.body, branch.orelse]
            elif isinstance(branch, ast.Call) and wanted(branch):
                created.setdefault(attribute, []).append(branch)
    return created


def own_calls(method: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    """The calls of attributes of ``self`` in a method, with the attribute."""
    for call in calls_in(method):
        if attribute := own_attribute(call.func):
            yield attribute, call


def sites_of_calls(
    view: ModuleView,
    formula: tuple[str, str],
    noun: str,
    created: Mapping[str, Created],
    uses: Callable[[ast.ClassDef, FunctionNode], Iterator[tuple[ast.expr, str]]],
    difference: Callable[[ast.Call], str] = lambda _: "",
) -> Iterator[Site]:
    """A site for each method that calls modules of its class, and one for each ``__init__`` with other uses.

    Args:
        view: the module.
        formula: op and variant.
        noun: what is called, for reasons and captures.
        created: by class, the attributes with what creates their modules.
        uses: the classes of such modules in a class's ``__init__``, in text order; each with why no call of
            its module is seen, unless ``created`` has it.
        difference: why a module that a call creates is not the op's; empty if it is.
    """
    called: dict[str, set[str]] = {name: set() for name in created}
    for owner in view.classes.values():
        own = created[owner.name]
        known = {name: [difference(call) for call in calls] for name, calls in own.items()}
        differences = {name: reasons[0] for name, reasons in known.items() if all(reasons)}
        for name, method in view.methods(owner).items() if own else ():
            calls = in_text_order(call for attribute, call in own_calls(method) if attribute in own)
            if name != "__init__" and calls:
                called[owner.name].update(last_name(call.func) for call in calls)
                yield _site(view, f"{owner.name}.{name}", method, calls, formula, noun, differences)
    for owner in view.classes.values():
        init = view.methods(owner).get("__init__")
        used = [*uses(owner, init)] if init is not None else []
        if used and (reasons := [*_unseen(view, owner, created[owner.name], called, used)]):
            reason = Reason.joined(dict.fromkeys(reasons))
            target, lineno = f"{owner.name}.__init__", reasons[0].line
            yield Site(formula[0], target, Status.MISSED, reason=reason, lineno=lineno)


def _unseen(
    view: ModuleView,
    owner: ast.ClassDef,
    created: Created,
    called: Mapping[str, set[str]],
    used: Iterable[tuple[ast.expr, str]],
) -> Iterator[Reason]:
    """Why no calls are seen of modules whose classes ``__init__`` uses.

    Calls by methods of the class, of its bases and of classes that inherit from it are seen.
    """
    attributes = {id(call.func): name for name, calls in created.items() for call in calls}
    above = list(view.scope.ancestors(owner))
    seen: set[str] = set()
    for name, class_ in view.classes.items():
        if class_ in above or owner in view.scope.ancestors(class_):
            seen |= called[name]
    for node, why in used:
        attribute = attributes.get(id(node), "")
        if attribute not in seen:
            own = f"{owner.name} does not call self.{attribute} itself"
            yield Reason(own if attribute else why, Code.UNKNOWN_MODULE, node.lineno)


def _site(
    view: ModuleView,
    target: str,
    method: FunctionNode,
    calls: list[ast.Call],
    formula: tuple[str, str],
    noun: str,
    differences: Mapping[str, str],
) -> Site:
    """The site of a method: routed if an edit asks the slot at one of its calls."""

    def edit(call: ast.Call) -> Edit:
        if why := differences.get(last_name(call.func)):
            raise Missed(why, call, Code.OTHER_SETTING)
        check_self(method, call)
        if call.keywords or len(call.args) != 1 or isinstance(call.args[0], (ast.Starred, ast.GeneratorExp)):
            said = f"the {noun} is called with more than one operand"
            raise Missed(said, call, Code.OTHER_ARGUMENTS)
        document = view.document
        opening = _OPENING.match(document.source, document.end(call.func))
        if opening is None:
            raise Missed(f"the {noun} is in brackets", call, Code.NO_ROOM)
        text = f"{slot_name(*formula)}.call(self, {ast.unparse(call.func)}, "
        return Edit(document.start(call.func), opening.end(), text)

    edits, reasons = gathered(calls, edit)
    captures = {noun: ", ".join(dict.fromkeys(ast.unparse(call.func) for call in calls))}
    reason = Reason.joined(reasons)
    site = Site.asking(formula[0], target, formula[1], calls[0], edits, reason=reason, captures=captures)
    return site if edits else replace(site, status=Status.MISSED, variant="", captures={}, slots=())
