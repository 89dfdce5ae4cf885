"""The layer loop of base models: sliced before it and gathered after it, or refused with a reason.

With sequence parallelism, every rank of a group has the same batch, and a model's layers run on a part of its
positions. Masks, positions and rotary tables are made before the loop at full length, so nothing of them
changes. What runs in the loop is evaluated on what is known of the positions
(`veomni_hook.patches.idioms.layer_loop.positions`): it must work on each position by itself, except in
attention of the user's implementation, which gets all positions. Everything else is refused.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Sequence
from functools import partial

from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.code.edit import Edit
from veomni_hook.patches.code.scope import free_name, loaded, parameter_names, parameters
from veomni_hook.patches.code.tree import calls_in, own_attribute, walk_ast
from veomni_hook.patches.idioms.layer_loop.loop import CROSS, Loop, decided, loops
from veomni_hook.patches.idioms.layer_loop.modules import Attributes, method_of
from veomni_hook.patches.idioms.layer_loop.reasons import TOWER, attends, reason_for
from veomni_hook.patches.idioms.layer_loop.towers import decided_tower
from veomni_hook.patches.idioms.layer_loop.values import classes_in
from veomni_hook.patches.interpreter.walk import receiver_name
from veomni_hook.patches.routes.cache_parameter import cache_parameters, hands_on_cache
from veomni_hook.patches.routes.guards import before_body, before_statement, in_place, tuple_of
from veomni_hook.patches.routes.view import ModuleView
from veomni_hook.patches.site import Code, Missed, Reason, Site, Status
from veomni_hook.patches.upstream_names import names

__all__ = ["CANDIDATES", "OP", "SETTING", "WORDS", "find"]

OP = "layer_loop"
WORDS = ""
SETTING = "parallel"
CANDIDATES = (
    "every forward that takes input_ids and loops over modules of its own, calling each, or makes a mask and "
    "calls a module of its own that loops (part base_model); other loops over layers with attention (tower)"
)

_IMPORT = ("veomni_hook.parallel", "sequence as veomni_sequence")
_KEYS = ("veomni_hook.parallel", "whole_keys as veomni_keys")
_TOWERS = ("veomni_hook.parallel", "towers as veomni_towers")
#: The comment above a statement that refuses a pass.
_NOT_HERE = "sequence parallelism: not for this model"
_WHOLE_KEYS = "sequence parallelism: this rank's queries, the keys of all positions"
_SHARDED, _SPLIT, _MODEL = "sharded", "split", "base_model"
_MASK = re.compile(r"\bcreate_\w*mask\w*\b")


def find(view: ModuleView) -> Iterator[Site]:
    """Every layer loop of a module."""
    sharded: list[Loop] = []
    for owner, forward in view.forwards():
        takes_ids = _takes_ids(forward)
        layers = list(loops(forward))
        if takes_ids and layers:
            yield _site(view, owner, forward, layers, sharded)
        elif takes_ids and (inner := _apart(view, owner, forward)):
            reason = Reason(f"its layers are in {inner}, apart from its mask", Code.OTHER_LOOP)
            edits = before_body(view, forward, _refusal(forward, reason), _NOT_HERE)
            site = partial(Site, OP, f"{owner.name}.forward", part=_MODEL, lineno=forward.lineno)
            yield site(Status.REFUSED, reason=reason, edits=edits, imports=(_IMPORT,))
        elif layers and attends(view, owner, layers[0]):
            yield _tower(view, owner, forward, layers)
    yield from _inside(view, sharded)


def _site(
    view: ModuleView,
    owner: ast.ClassDef,
    forward: FunctionNode,
    layers: list[ast.For],
    sharded: list[Loop],
) -> Site:
    """The site of a base model; ``sharded`` gets its loop, and those of classes that inherit its forward."""
    site = partial(
        Site, OP, f"{owner.name}.forward", part=_MODEL, lineno=layers[0].lineno, imports=(_IMPORT,)
    )
    try:
        loop = decided(view, owner, forward, layers)
        others = [decided(view, other, forward, layers) for other in _inheriting(view, owner)]
        edits = _sliced_and_gathered(view, forward, loop)
    except Missed as error:
        reason = reason_for(view, owner, layers[0], error.reason)
        holding = next(part for part in forward.body if any(inner is layers[0] for inner in ast.walk(part)))
        code = _refusal(forward, reason)
        return site(
            Status.REFUSED, reason=reason, edits=before_statement(view, forward, holding, code, _NOT_HERE)
        )
    sharded += [loop, *others]
    return site(
        Status.ROUTED,
        variant=_SHARDED,
        captures={"hidden_states": loop.hidden, **{name: name for name in loop.others}},
        edits=edits,
        relies_on=loop.followed,
    )


def _tower(view: ModuleView, owner: ast.ClassDef, forward: FunctionNode, layers: list[ast.For]) -> Site:
    """The site of a tower: its loop runs on a part of the segments, or on all of them in every rank."""
    site = partial(Site, OP, f"{owner.name}.forward", part="tower", lineno=layers[0].lineno)
    try:
        owners = [owner, *_inheriting(view, owner)]
        tower, *others = (decided_tower(view, owner, forward, layers) for owner in owners)
        if any((other.boundaries, other.others) != (tower.boundaries, tower.others) for other in others):
            raise Missed("classes that inherit from it have other layers", layers[0], Code.UNKNOWN_MODULE)
    except Missed as error:
        return site(Status.REFUSED, reason=error.reason.after(TOWER))
    split = (*tower.boundaries, *tower.others)
    return site(
        Status.ROUTED,
        variant=_SPLIT,
        captures={"hidden_states": tower.hidden, **{name: name for name in split}},
        edits=_split_and_gathered(view, forward, tower),
        relies_on=tower.followed,
        imports=(_TOWERS,),
    )


def _split_and_gathered(view: ModuleView, forward: FunctionNode, tower: Loop) -> tuple[Edit, ...]:
    receiver, share, hidden = receiver_name(forward), free_name(forward, "share"), tower.hidden
    targets = ", ".join((share, hidden, *tower.boundaries, *tower.others))
    arguments = ", ".join((receiver, hidden, tuple_of(tower.boundaries), *tower.others))
    part, gathered = (
        f"{targets} = veomni_towers.shard({arguments})",
        f"veomni_towers.gather({share}, {hidden})",
    )
    said = "sequence parallelism: the layers run on this rank's images, frames or chunks"
    return (
        *(in_place(view, aside, gathered) for aside in tower.aside),
        *before_statement(view, forward, tower.statement, part, said),
        *before_statement(
            view, forward, tower.following, f"{hidden} = {gathered}", "sequence parallelism: all rows again"
        ),
    )


def _apart(view: ModuleView, owner: ast.ClassDef, forward: FunctionNode) -> str:
    """The class that loops over the layers of a model that makes the mask itself; empty if none does."""
    if not _MASK.search(view.text(owner)):
        return ""
    own = Attributes(view).of(owner.name)
    called = {own_attribute(call.func) for call in calls_in(forward)}
    for class_name in classes_in(own[name] for name in sorted(called & own.keys())):
        inner = method_of(view, class_name, "forward")
        if inner is not None and list(loops(inner.node)) and not _takes_ids(inner.node):
            return class_name
    return ""


def _takes_ids(forward: FunctionNode) -> bool:
    return bool(parameter_names(forward).intersection(names("token ids")))


def _inheriting(view: ModuleView, owner: ast.ClassDef) -> Iterator[ast.ClassDef]:
    """The other classes of the file that run the forward of ``owner``: their layers may be others."""
    for other in view.classes.values():
        method = method_of(view, other.name, "forward")
        if other is not owner and method is not None and method.home is owner:
            yield other


def _sliced_and_gathered(view: ModuleView, forward: FunctionNode, loop: Loop) -> tuple[Edit, ...]:
    receiver, hidden = receiver_name(forward), loop.hidden
    parts = ", ".join((hidden, *loop.others))
    targets = parts if loop.others else f"({hidden},)"
    # Whoever gets a cache that the layers filled would find a part of the positions in it.
    caches = [name for name in cache_parameters(view, forward) if name in loaded([loop.statement])]
    makes_cache = parameter_names(forward).intersection(names("whether it makes a cache"))
    if len(caches) > 1 or (not caches and (makes_cache or hands_on_cache(view, loop.statement))):
        among = ", ".join(caches) or "its arguments"
        raise Missed(f"which of {among} is the cache is not known", loop.statement, Code.OTHER_ARGUMENTS)
    cache = f", cache={caches[0]}" if caches else ""
    code = f"{targets} = veomni_sequence.shard({receiver}, {parts}{cache})"
    for name in loop.absent:
        code = f"veomni_sequence.absent({receiver}, {name}, {_quoted(CROSS)})\n{code}"
    for name in loop.ids:
        code += f"\n{name} = veomni_sequence.part_of_rows({receiver}, {name})"
    added: tuple[Edit, ...] = ()
    if (addition := loop.addition) is not None:
        rows, method = addition.rows, f"{receiver}.{addition.method}"
        operands = f"{method}, {hidden}, {addition.mask}, {rows}"
        code += f"\n{rows} = veomni_sequence.rows_to_add({receiver}, {operands})"
        arguments = ", ".join(map(view.text, addition.call.args))
        added = (in_place(view, addition.call, f"veomni_sequence.added({method}, {arguments})"),)
    gathered = f"{hidden} = veomni_sequence.gather({receiver}, {hidden})"
    said = "sequence parallelism: the layers run on this rank's part of the positions"
    return (
        *added,
        *before_statement(view, forward, loop.statement, code, said),
        *before_statement(
            view, forward, loop.following, gathered, "sequence parallelism: all positions again"
        ),
    )


def _refusal(forward: FunctionNode, reason: str) -> str:
    return f"veomni_sequence.refused({receiver_name(forward)}, {_quoted(reason)})"


def _inside(view: ModuleView, sharded: Sequence[Loop]) -> Iterator[Site]:
    """The sites of methods that change because they run on a part of the positions: arguments, attention."""
    masks = {id(mask) for loop in sharded for mask in loop.masks}
    queries = {key: value for loop in sharded for key, value in loop.queries.items()}
    refusals = {key: value for loop in sharded for key, value in loop.refusals.items()}
    for target, _, method in view.every_method() if masks or queries or refusals else ():
        site = partial(Site, OP, target, Status.ROUTED, counted=False)
        nodes = [*walk_ast(method)]
        if expressions := [node for node in nodes if isinstance(node, ast.expr) and id(node) in masks]:
            parts = [
                in_place(view, part, f"veomni_sequence.part_of_rows(self, {ast.unparse(part)})")
                for part in expressions
            ]
            line = expressions[0].lineno
            yield site("part_of_rows", edits=tuple(parts), lineno=line, imports=(_IMPORT,))
        for first, reason in (refusals[id(node)] for node in nodes if id(node) in refusals):
            code = f"veomni_sequence.refused_inside(self, {_quoted(reason)})"
            edits = before_statement(view, method, first, code, _NOT_HERE)
            yield site("refused_inside", edits=edits, lineno=first.lineno, imports=(_IMPORT,))
        if (asked := queries.get(id(method))) is not None:
            receiver, hidden = (parameter.arg for parameter in parameters(method)[:2])
            names = ", ".join(filter(None, (asked.cache, asked.mask, asked.positions)))
            code = f"{names} = veomni_keys.whole_keys({receiver}, {hidden}, {names})"
            edits = before_body(view, method, code, _WHOLE_KEYS)
            yield site("whole_keys", edits=edits, lineno=method.lineno, imports=(_KEYS,))


def _quoted(reason: str) -> str:
    """A reason as code."""
    return json.dumps(reason, ensure_ascii=False)
