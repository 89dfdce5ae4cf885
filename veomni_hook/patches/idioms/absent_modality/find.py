"""Forwards that call the tower of images, videos or sounds only for batches that have some.

    if pixel_values is not None:
        image_embeds = self.get_image_features(pixel_values, image_grid_thw, return_dict=True).pooler_output

Where processes share the tower's parameters, all must call it equally often; DistributedDataParallel needs
one call of it. So code in front of the condition calls `veomni_hook.multimodal.absent` where the data is
absent; it decides while the model runs whether to call the tower. The idiom asks for no kernel.

A second call of a tower in a forward may be an error. So of the places that find no data the last one calls
the tower, and none does where another place has data:

    image site:  elsewhere=(pixel_values_videos is not None or given.get('video') is None,)
    video site:  elsewhere=(pixel_values is not None,)
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from textwrap import indent

from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.code.scope import bound_names, parameter_names, read_names
from veomni_hook.patches.code.template import Template
from veomni_hook.patches.code.tree import (
    blocks,
    calls_in,
    compared_with_none,
    contains,
    in_text_order,
    own_attribute,
    walk_ast,
)
from veomni_hook.patches.idioms.absent_modality.arguments import (
    DATA,
    Arguments,
    attributes_read,
    read_arguments,
)
from veomni_hook.patches.routes.guards import before_statement, tuple_of
from veomni_hook.patches.routes.view import ModuleView
from veomni_hook.patches.site import Code, Missed, Reason, Site, Status

__all__ = ["CANDIDATES", "OP", "WORDS", "find"]

OP = "absent_modality"
WORDS = "_features("
CANDIDATES = (
    "every call of self.get_image_features, self.get_video_features or self.get_audio_features in a forward,"
    " below an if, or in a method that the forward calls"
)
_IMPORT = ("veomni_hook.multimodal", "absent as veomni_absent")
#: The methods whose results replace embeddings of placeholders.
METHODS = ("get_image_features", "get_video_features", "get_audio_features")
MERGED = Template("EMBEDS = EMBEDS.masked_scatter(*ARGUMENTS, **OPTIONS)")
#: What the results are merged into, unless the condition says so itself.
_EMBEDDINGS = "inputs_embeds"
#: How a condition asks for features that are given, and a chain refuses them.
LOOKED_UP = Template("GIVEN.get(KEY)", names="GIVEN")
REFUSED = Template("if TEST:\n    raise ERROR\nelse:\n    ...")
EITHER = Template("GIVEN or DATA is not None", names="DATA")


@dataclass(frozen=True, slots=True)
class _Condition:
    """When a forward has data for a call, and when it makes none for lack of data.

    Attributes:
        without: the condition that it makes none.
        present: the condition that there is data; empty: not known apart from given features.
        lookups: the conditions that no features are given.
        further: all other conditions: about the configuration or the embeddings.
    """

    without: str
    present: str = ""
    lookups: tuple[str, ...] = ()
    further: tuple[str, ...] = ()

    def calls(self, *, later: bool) -> str:
        """When a place calls the tower: with data, or, if it comes later, without, too."""
        called = self.present
        if later:
            # With or without data: always, unless features are given.
            called = " and ".join(self.lookups) and f"{called} or {' and '.join(self.lookups)}"
            called = f"({called})" if called and self.further else called
        return " and ".join(filter(None, (called, *self.further))) or "True"


@dataclass(frozen=True, slots=True)
class _Call:
    """A call that is made only if a batch has the data.

    Attributes:
        node: the call.
        statement: the statement with the condition and the call.
        condition: when upstream makes no call for lack of data.
        given: what the call gives to the method.
        towers: attributes of ``self`` that the method uses.
        outputs: attributes of the result that the forward uses; empty: the result itself.
        embeddings: the name of what the result is merged into.
    """

    node: ast.Call
    statement: ast.If
    condition: _Condition
    given: Arguments
    towers: tuple[str, ...]
    outputs: tuple[str, ...]
    embeddings: str


def find(view: ModuleView) -> Iterator[Site]:
    """Every candidate of a module."""
    if not any(f"self.{name}(" in view.document.source for name in METHODS):
        return
    for owner, forward in view.forwards():
        apart = [
            (name, candidate)
            for name, method in view.helpers(owner, forward).items()
            for candidate in (calls_in(method) if name not in METHODS else ())
            if own_attribute(candidate.func) in METHODS
        ]
        for name, hidden in apart:
            reason = Reason(f"forward calls {name}, which calls it", Code.OTHER_FORM)
            yield Site(OP, f"{owner.name}.{name}", Status.MISSED, reason=reason, lineno=hidden.lineno)
        target = f"{owner.name}.forward"
        sites: list[Site] = []
        known: list[_Call] = []
        for call, around in _candidates(forward):
            try:
                if apart:
                    # Which of the places calls a tower last is not known then.
                    raise Missed(f"{apart[0][0]} may call its tower, too", apart[0][1], Code.OTHER_FORM)
                known.append(_read(view, owner, forward, call, around))
            except Missed as miss:
                sites.append(Site(OP, target, Status.MISSED, reason=miss.reason, lineno=call.lineno))
        sites += [_site(view, target, forward, call, known) for call in known]
        yield from sorted(sites, key=lambda site: site.lineno)


def _candidates(forward: FunctionNode) -> Iterator[tuple[ast.Call, list[ast.If]]]:
    """The calls of `METHODS` below a condition, in text order, each with the conditions around it."""
    conditions = in_text_order(node for node in walk_ast(forward) if isinstance(node, ast.If))
    for call in in_text_order(
        candidate for candidate in calls_in(forward) if own_attribute(candidate.func) in METHODS
    ):
        around = [
            condition
            for condition in conditions
            if contains(condition, call) and not contains(condition.test, call)
        ]
        if around:
            yield call, around


def _read(
    view: ModuleView, owner: ast.ClassDef, forward: FunctionNode, call: ast.Call, around: list[ast.If]
) -> _Call:
    """Read a call of one of `METHODS`; ``around`` are the conditions around it, the outermost first.

    Raises:
        Missed: something of it is not known.
    """
    if not any(_asked(branch.test) for branch in around):
        raise Missed("every batch calls it, unless features are given", around[-1].test, Code.OTHER_FORM)
    name = own_attribute(call.func)
    if (method := view.inherited_methods(owner).get(name)) is None:
        raise Missed(f"{name} is not a method of a class of the file", call, Code.OTHER_FILE)
    arguments = read_arguments(view, owner, method, call)
    asking = _without_refusals(around)
    statement, condition = _condition(asking, parameter_names(forward), {*arguments.data.values()})
    if any(own_attribute(inner_call.func) for other in statement.orelse for inner_call in calls_in(other)):
        raise Missed("its condition has an else that calls a part of the model", statement, Code.OTHER_FORM)
    merged = next(filter(None, map(MERGED.match, statement.body)), None)
    embeddings = merged["EMBEDS"] if merged else _EMBEDDINGS
    whole = around[0] if statement is asking[0] else statement
    if embeddings not in bound_names(_before(forward, whole)):
        raise Missed(f"{embeddings} is not computed before it", statement, Code.NO_ROOM)
    towers = tuple(view.attributes_used(owner, method))
    return _Call(call, whole, condition, arguments, towers, attributes_read(forward, call), embeddings)


def _without_refusals(around: list[ast.If]) -> list[ast.If]:
    """The conditions without those at the begin of a chain that only raise errors.

    if pixel_values is not None and features is not None:
        raise ValueError(...)
    elif pixel_values is not None:
    """
    first, *rest = around
    chained = REFUSED.match(first) is not None and first.orelse == rest[:1]
    return _without_refusals(rest) if chained else around


def _condition(around: list[ast.If], parameters: set[str], data: set[str]) -> tuple[ast.If, _Condition]:
    """The statement that asks for data, and what it asks.

    That is the innermost, or one around it that asks as well whether features are given:

        if given.get("image") or pixel_values is not None:
            if given.get("image") is None:
    """
    if bound := [
        node for branch in around for node in walk_ast(branch.test) if isinstance(node, ast.NamedExpr)
    ]:
        raise Missed(f"its condition binds {ast.unparse(bound[0].target)}", bound[0], Code.OTHER_FORM)
    inner = around[-1]
    asking = [branch for branch in around if _asked(branch.test) & data]
    if not asking:
        raise Missed("its condition does not ask whether its data is None", inner.test, Code.OTHER_FORM)
    outer = asking[0]
    if outer is inner and DATA.isdisjoint(name for branch in around[:-1] for name in read_names(branch.test)):
        return inner, _asks(inner.test, parameters, data)
    if around[-2:] == [outer, inner] and EITHER.match(outer.test) and _is_lookup(inner.test):
        return outer, _Condition(f"not ({ast.unparse(outer.test)})")
    raise Missed("several statements decide whether it is called", inner, Code.OTHER_FORM)


def _asked(test: ast.expr) -> set[str]:
    """The names that a condition compares with None."""
    asked = (compared_with_none(node, ast.IsNot) for node in walk_ast(test))
    return {name.id for name in asked if isinstance(name, ast.Name)}


def _is_lookup(part: ast.expr) -> bool:
    """``given.get("image") is None``: no features are given."""
    compared = compared_with_none(part, ast.Is)
    return compared is not None and LOOKED_UP.match(compared) is not None


def _asks(test: ast.expr, parameters: set[str], data: set[str]) -> _Condition:
    """What a condition asks. Data is not absent where features are given, or a part is not configured."""
    parts = test.values if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) else [test]
    names: set[str] = set()
    present: list[str] = []
    lookups: list[str] = []
    further: list[str] = []
    for part in parts:
        used, text = read_names(part), ast.unparse(part)
        if isinstance(compared_with_none(part, ast.IsNot), ast.Name) and used <= parameters:
            present.append(f"{min(used)} is not None")
            names |= used
        elif _is_lookup(part):
            lookups.append(text)
        elif used and used <= names:
            present.append(text)
        elif isinstance(part, ast.Compare) and used in ({"self"}, {_EMBEDDINGS}):
            further.append(text)
        else:
            raise Missed(f"its condition is not about data alone: {text}", part, Code.OTHER_FORM)
    if not names & data:
        raise Missed("its condition does not ask whether its data is None", test, Code.OTHER_FORM)
    there = " and ".join(present)
    absent = f"not ({there})" if len(present) > 1 else f"{min(names)} is None"
    return _Condition(" and ".join([absent, *lookups, *further]), there, tuple(lookups), tuple(further))


def _before(forward: FunctionNode, condition: ast.stmt) -> list[ast.stmt]:
    """The statements that run before a condition, in the blocks around it."""
    statements: list[ast.stmt] = []
    for block in blocks(forward):
        for index, statement in enumerate(block):
            if contains(statement, condition):
                statements += block[:index]
    return statements


def _elsewhere(forward: FunctionNode, call: _Call, every: Iterable[_Call]) -> Iterator[str]:
    """The conditions, true where another of the calls ``every`` calls the towers of ``call``."""
    block = next(block for block in blocks(forward) if call.statement in block)
    bound = parameter_names(forward) | bound_names(_before(forward, call.statement))
    for other in every:
        same = {*call.towers} <= {*other.towers} and {*call.outputs} == {*other.outputs}
        if other is call or not same or other.statement not in block or not other.condition.present:
            continue
        later = block.index(other.statement) > block.index(call.statement)
        condition = other.condition.calls(later=later)
        if read_names(ast.parse(condition, mode="eval")) <= bound:
            yield condition


def _site(view: ModuleView, target: str, forward: FunctionNode, call: _Call, every: Sequence[_Call]) -> Site:
    """The call, with the statement that is inserted in front of its condition."""
    arguments, names = call.given, ", ".join(call.given.data.values())
    others = tuple(_elsewhere(forward, call, every))
    layout = f'        layout="{arguments.layout}",\n' if arguments.layout else ""
    also = indent(f"elsewhere={tuple_of(others)},\n", " " * 8) if others else ""
    code = f"""\
if {call.condition.without}:
    {call.embeddings} = veomni_absent.plus_zero(
        self,
        {call.embeddings},
        lambda {names}: {arguments.text},
        data={_quoted(arguments.data)},
        towers={_quoted(call.towers)},
        outputs={_quoted(call.outputs)},
{layout}{also}    )
"""
    comment = f"{own_attribute(call.node.func)} without data"
    try:
        edits = before_statement(view, forward, call.statement, code, comment)
    except ValueError as error:
        return Site(OP, target, Status.MISSED, reason=Reason(str(error)), lineno=call.node.lineno)
    captures = {"data": names, "towers": ", ".join(call.towers)}
    return Site.calling(OP, target, arguments.form, call.node, edits, _IMPORT, captures=captures)


def _quoted(names: Iterable[str]) -> str:
    return tuple_of([f'"{name}"' for name in names])
