"""What the operands of inserted calls should be, from what runs of upstream's text show."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from types import FunctionType
from typing import Any

from tests.proof.compare import Differs
from tests.proof.inserted_runs import EMBEDDINGS, IDS, PROBE, PUBLIC, Inserted, Run, Shallow, Texts
from tests.proof.recording import Event, Thing, key_of


@cache
def _cache_methods() -> frozenset[str]:
    """What only caches are asked for."""
    import torch
    from transformers import cache_utils

    kinds = [
        v for v in vars(cache_utils).values() if isinstance(v, type) and v.__module__ == cache_utils.__name__
    ]
    names = {
        n for kind in kinds for n, v in vars(kind).items() if isinstance(v, FunctionType) and n[0] != "_"
    }
    return frozenset(names - {*dir(torch.Tensor)})


def caches(events: Sequence[Event]) -> list[Thing]:
    """The objects that were used as caches: an argument, or what was made, with all that belongs to it."""
    found: dict[int, Thing] = {}
    for event in events:
        callee = event.callee
        if isinstance(callee, Thing) and callee._s_how == "attribute" and callee._s_name in _cache_methods():
            (owner,) = callee._s_of
            while isinstance(owner, Thing) and owner._s_how in ("attribute", "item"):
                (owner,) = owner._s_of
            if isinstance(owner, Thing) and owner._s_how in ("given", "call"):
                found[id(owner)] = owner
    return list(found.values())


def _masks(events: Sequence[Event]) -> Iterator[Mapping[str, Any]]:
    """What functions of transformers' ``masking_utils`` were given, by their parameters."""
    from transformers import masking_utils

    for event in events:
        callee = event.callee
        if (
            isinstance(callee, Thing)
            and callee._s_how == "attribute"
            and dotted(callee._s_of[0]) == masking_utils.__name__
        ):
            function = getattr(masking_utils, callee._s_name, None)
            if isinstance(function, FunctionType):
                # Of a keyword that it does not have, nothing is known.
                signature = inspect.signature(function)
                known = {name: v for name, v in event.kwargs.items() if name in signature.parameters}
                yield signature.bind_partial(*event.args, **known).arguments


@dataclass
class Facts:
    """What upstream's own runs show, together."""

    texts: Texts
    runs: Sequence[Run]
    _masked: dict[str, set[str]] = field(default_factory=dict)
    _towers: dict[str, tuple[set[str], set[str]]] = field(default_factory=dict)

    @cached_property
    def cached(self) -> set[str]:
        """The arguments whose objects are used as caches."""
        return {
            each._s_name for run in self.runs for each in caches(run.world.events) if each._s_how == "given"
        }

    @cached_property
    def _masks(self) -> list[Mapping[str, Any]]:
        return [each for run in self.runs for each in _masks(run.world.events)]

    @cached_property
    def precomputed(self) -> set[str]:
        """What a function takes from its argument ``kwargs``."""
        callees = (
            (e.callee, e.args) for run in self.runs for e in run.world.events if isinstance(e.callee, Thing)
        )
        return {
            args[0]
            for callee, args in callees
            if callee._s_name == "pop" and callee._s_of[0]._s_name == "kwargs"
        }

    @cached_property
    def asked(self) -> set[str]:
        """The data for whose lack calls are inserted, in the whole module."""
        return {
            parameter.arg
            for call in ast.walk(self.texts.edited)
            if isinstance(call, ast.Call) and ast.unparse(call.func).endswith(".plus_zero")
            for function in call.args
            if isinstance(function, ast.Lambda)
            for parameter in function.args.args
        }

    def towers(self, method: str) -> tuple[set[str], set[str]]:
        """The attributes of the module that a method may use, and those of them that are modules or called."""
        if method not in self._towers:
            self._towers[method] = self.texts.attributes(method)
        return self._towers[method]

    def masked(self, parameter: str) -> set[str]:
        """The arguments of which mask functions got a parameter, where they are given."""
        if parameter not in self._masked:
            values = [each.get(parameter) for each in self._masks]
            self._masked[parameter] = {each._s_name for value in values for each in roots(value)}
        return self._masked[parameter]


_Facts = Iterator[tuple[str, bool | None, str]]


def _of_samples(facts: Facts, run: Run, call: Inserted) -> _Facts:
    _, kwargs, positions, mask, cache_, inputs, makes, *others = call.args
    given = run.given
    takes_any = PROBE in given
    own = {name for name in given if name in (PROBE, *PUBLIC)}
    yield (
        "kwargs",
        isinstance(kwargs, dict) and (not takes_any or kwargs.get(PROBE) is given[PROBE]),
        (f"what the model was given beside its parameters ({sorted(own)})"),
    )
    for operand, value in (("position_ids", positions), ("attention_mask", mask)):
        shown = facts.masked(operand) & given.keys()
        name = operand if operand in given else next(iter(shown), "")
        if len(shown) == 1 and operand not in shown:
            (name,) = shown
        right = value is given.get(name) if name else value is None
        yield (
            operand,
            right,
            f"{name or 'absent'}, which mask functions get" if shown else f"the caller's {operand}",
        )
    cached = facts.cached & given.keys()
    if len(cached) > 1:
        yield "cache", None, f"several are used as caches: {sorted(cached)}"
    else:
        name = next(iter(cached), "")
        right = cache_ is given[name] if name else cache_ is None
        if not name and cache_ is not None:
            yield "cache", None, "no method of a cache is called"
        else:
            yield "cache", right, f"{name}, which layers use as their cache" if name else "None"
    wanted = given.get(IDS) if given.get(EMBEDDINGS) is None else given.get(EMBEDDINGS)
    yield "inputs", inputs is wanted, "the ids or embeddings of this call"
    yield "use_cache", makes is given.get("use_cache"), "the caller's use_cache"
    if call.helper.endswith(".found"):
        makes_masks = any(facts.masked("position_ids"))
        said = others[0] if others else call.kwargs.get("masks_positions", True)
        yield "masks_positions", said is makes_masks, f"whether mask functions get positions ({makes_masks})"
        pools = any(_pools(each) for each in ast.walk(facts.texts.upstream))
        yield "pools", call.kwargs.get("pools", False) is pools, f"whether layers drop positions ({pools})"
    else:
        yield from _of_layers(facts, run, others[0] if others else call.kwargs.get("layers"))


def _pools(node: ast.AST) -> bool:
    """Whether this is a multiple of a size, at most as many as there are positions."""
    match node:
        case ast.BinOp(ast.BinOp(counted, ast.FloorDiv(), size), ast.Mult(), factor):
            return "shape" in ast.unparse(counted) and ast.unparse(size) == ast.unparse(factor)
    return False


def _of_making(facts: Facts, run: Run, call: Inserted) -> _Facts:
    (found, *_) = [each for each in run.world.inserted if each.helper.endswith(".found")]
    kwargs, positions = call.args
    yield "kwargs", kwargs is found.result, "what the boundaries were put into"
    yield "position_ids", positions is found.args[2], "the positions in which boundaries were looked for"


def _of_layers(facts: Facts, run: Run, layers: Any) -> _Facts:
    """The classes that nothing keeps apart, and the functions that take boundaries in them."""
    pairs = [each for each in layers if _is_layer(each)] if isinstance(layers, tuple) else []
    yield "layers", bool(pairs) and len(pairs) == len(layers), "classes of layers with functions"
    for kind, functions in pairs:
        name = getattr(kind, "__name__", str(kind))
        ran = any(type(each.callee) is kind for each in run.world.events)
        yield f"layers {name}", True if ran else None, f"a class whose objects the model calls ({name})"
        for function, argument, parameter in functions:
            taken = [
                each
                for each in run.world.events
                if isinstance(each.callee, Thing) and each.callee._s_name == function.removeprefix("self.")
            ]
            given = run.given.get(argument)
            right = any(given is root for each in taken for root in roots(each.kwargs.get(parameter)))
            yield f"layers {name}.{function}", True if right else None, f"{argument} as {parameter}"


def _is_layer(value: Any) -> bool:
    return (
        isinstance(value, tuple)
        and len(value) == 2
        and isinstance(value[0], type)
        and isinstance(value[1], tuple)
    )


def _of_shard(facts: Facts, run: Run, call: Inserted) -> _Facts:
    yield "hidden states and others", True, ""
    if call.helper == "veomni_towers.shard":
        return
    used = caches(run.world.events[call.at :])
    handed = call.kwargs.get("cache")
    if not used:
        known = not facts.cached
        yield (
            "cache",
            (handed is None) if known else None,
            "None: no cache is used" if known else "used in this run",
        )
        return
    if len(used) > 1:
        yield "cache", None, "several objects are used as caches"
        return
    yield "cache", handed is used[0], "what the layers use as their cache"


def _of_gather(facts: Facts, run: Run, call: Inserted) -> _Facts:
    if call.helper == "veomni_towers.gather":
        shares = [each.result[0] for each in run.world.inserted if each.helper == "veomni_towers.shard"]
        yield "share", any(call.args[0] is share for share in shares), "what shard returned"
    yield "hidden states", True, ""


def _of_rows_to_add(facts: Facts, run: Run, call: Inserted) -> _Facts:
    later = [each for each in run.world.inserted if each.helper.endswith(".added")]
    for each in later:
        method, _, mask, rows = each.args
        yield "method", key_of(call.args[1]) == key_of(method), "the method that adds rows in the loop"
        yield "mask", call.args[3] is mask, "the mask of the rows that are added in the loop"
        yield (
            "rows",
            any(call.args[4] is part for part in (rows, *getattr(rows, "_s_of", ()))),
            "the rows added in the loop",
        )
        first = call.args[2] is not None and any(
            each_.helper.endswith(".shard") and each_.result[0] is call.args[2]
            for each_ in run.world.inserted
        )
        yield "hidden states", first, "what shard returned"
    for operand in ("method", "mask", "rows") if not later else ():
        yield operand, None, "seen: no run adds rows"


def _of_converted(facts: Facts, run: Run, call: Inserted) -> _Facts:
    tensor, result = call.args
    made = isinstance(result, Thing) and result._s_how == "call" and result._s_of[0]._s_of[0] is tensor
    yield "tensor", made, "what is converted"


def _of_sent(facts: Facts, run: Run, call: Inserted) -> _Facts:
    yield "tensor", True, ""
    yield "device", None, "seen: stand-ins are on no device"


def _of_joined(facts: Facts, run: Run, call: Inserted) -> _Facts:
    visual, *kinds = call.args
    placed = [each.args for each in run.world.events[call.at :] if _puts_at_mask(each)]
    for number, ((at, *_), value) in enumerate(placed[:2]):
        mask, features = kinds[number] if isinstance(kinds[number], tuple) else (None, None)
        yield "visual", at._s_name is visual, "the mask of all visual tokens"
        yield f"mask {number}", at._s_of[0] is mask, "the mask of the tokens of a kind"
        yield f"features {number}", features is not None and _derives(value, features), "the rows of a kind"
    if not placed:
        yield "visual, masks, features", None, "seen: no run joins rows"


def _puts_at_mask(event: Event) -> bool:
    at = event.args[0] if len(event.args) == 2 else None
    return isinstance(at, tuple) and isinstance(at[0], Thing) and at[0]._s_how == "item"


def _derives(value: Any, source: Any) -> bool:
    todo = [value]
    while todo:
        each = todo.pop()
        if each is source:
            return True
        todo += each._s_of if isinstance(each, Thing) else each if isinstance(each, list | tuple) else ()
    return False


def _of_computed(facts: Facts, run: Run, call: Inserted) -> _Facts:
    names = sorted(facts.precomputed)
    if call.kwargs:
        yield "floats", None, "seen: stand-ins have no dtype"
    yield (
        "precomputed",
        sorted(map(str, call.args)) == names,
        f"what the function takes from its kwargs ({names})",
    )


def _of_sizes(facts: Facts, run: Run, call: Inserted) -> _Facts:
    sizes, positions = call.args[0], call.args[1] if len(call.args) > 1 else ()
    called = [each for each in run.world.events if isinstance(each.callee, Shallow)]
    features = [v for each in called if each.callee.name != "get_rope_index" for v in each.kwargs.values()]
    whole = isinstance(sizes, tuple) and isinstance(positions, tuple)
    yield "form", whole, "two tuples"
    given = run.given.get("position_ids")
    if given is not None:
        yield "positions", whole and any(each is given for each in positions), "the positions that are given"
    for each in called if whole else ():
        if each.callee.name == "get_rope_index":
            missing = [
                name for name, value in each.kwargs.items()
                if isinstance(value, Thing) and value._s_how == "given"
                and not any(value is one for one in (*sizes, *positions))
            ]  # fmt: skip
            yield (
                "sizes and positions",
                not missing,
                f"all that get_rope_index reads ({', '.join(missing)} is missing)",
            )
    for number, size in enumerate(sizes if whole else ()):
        if size is not None and features:
            right = any(size is value for value in features)
            yield f"sizes[{number}]", right or None, "an argument of a method of features"


def _of_absent(facts: Facts, run: Run, call: Inserted) -> _Facts:
    """The call without data is upstream's with it; towers and outputs are what the code uses."""
    yield "embeddings", True, ""
    data, towers, outputs = (call.kwargs[name] for name in ("data", "towers", "outputs"))
    if not (callable(call.args[2]) and all(isinstance(each, tuple) for each in (data, towers, outputs))):
        yield "call, data, towers, outputs", False, "a function and three tuples of names"
        return
    method, bound, marks = _called_without(run, call)
    real = [
        each
        for plain in facts.runs
        for each in plain.world.events
        if isinstance(each.callee, Shallow) and each.callee.name == method
    ]
    if not real:
        yield "call", None, f"seen: no run calls {method} with data"
        return
    fits = all(_marks(bound.get(name)) == [mark._s_name] for name, mark in zip(data, marks, strict=False))
    fits = fits and any(_same_place(each, bound, data) for each in real)
    yield "data", fits and len(data) == len(marks), f"the parameters of {method} that get the data"
    others = {name: key_of(value) for name, value in bound.items() if name not in data and value is not None}
    same = any(
        others.items() <= {name: key_of(value) for name, value in one.kwargs.items()}.items() for one in real
    )
    yield "call", same, f"upstream's call of {method}"
    used, all_used = facts.towers(method)
    yield (
        "towers",
        all_used <= {*towers} <= used if used else None,
        f"what {method} uses ({', '.join(sorted(all_used))})",
    )
    read = {name for one in real for name, value in _attributes(one.result).items() if _is_used(facts, value)}
    yield "outputs", {*outputs} == read, f"what is used of the result ({', '.join(sorted(read))})"
    if "layout" in call.kwargs:
        yield "layout", None, "seen: no run shows whether patches are vectors or come in groups"
    said = call.kwargs.get("elsewhere", ())
    if run.complete or not isinstance(said, tuple):
        right: bool | None = isinstance(said, tuple) and any(said) == _elsewhere(facts, run, call, {*towers})
        if not right and isinstance(said, tuple) and any(said) and _given_twice(facts, run):
            right = None  # the place finds features and reads no data
        yield "elsewhere", right, "whether another place calls the towers"


def _marks(value: Any) -> list[str]:
    """The names of the data of which a value is made, as far as it is absent."""
    return [each._s_name for each in roots(value) if each._s_name.startswith("data ")]


def _called_without(run: Run, call: Inserted) -> tuple[str, Mapping[str, Any], list[Thing]]:
    """The method that the call for absent data calls, with which arguments, if each of the data is a mark."""
    compute = call.args[2]
    if not callable(compute):
        raise Differs(f"{call.helper} (line {call.line}): call is no function")
    marks = [run.world.given(f"data {name}") for name in inspect.signature(compute).parameters]
    before = len(run.world.events)
    compute(*marks)
    events = [each for each in run.world.events[before:] if isinstance(each.callee, Shallow)]
    del run.world.events[before:]
    if len(events) != 1:
        raise Differs(f"{call.helper} (line {call.line}): call is not a call of one method of features")
    return events[0].callee.name, events[0].kwargs, marks


def _same_place(event: Event, bound: Mapping[str, Any], data: tuple[str, ...]) -> bool:
    """Whether a call with data has the data in the same parameters, of the same names of arguments."""
    names = {name: [each._s_name.removeprefix("data ") for each in roots(bound.get(name))] for name in data}
    return all(
        name in event.kwargs and {*wanted} <= {each._s_name for each in roots(event.kwargs[name])}
        for name, wanted in names.items()
    )


def _attributes(thing: Thing) -> dict[str, Thing]:
    """What was asked of a stand-in, by the attribute's name."""
    return {
        ast.literal_eval(at)[1]: value for (how, at), value in thing._s_cached.items() if how == "attribute"
    }


def _is_used(facts: Facts, value: Thing) -> bool:
    """Whether more of a stand-in is used than its shape."""
    arguments = (
        argument
        for run in facts.runs
        for event in run.world.events
        for given in (*event.args, *event.kwargs.values())
        for argument in (given if isinstance(given, list | tuple) else (given,))
    )
    return {*_attributes(value)} != {"shape"} or any(value is argument for argument in arguments)


def _given_twice(facts: Facts, run: Run) -> bool:
    """Whether data is given that no method of features gets here, though one does in another run."""

    def data(of: Run) -> set[str]:
        calls = [each for each in of.world.events if isinstance(each.callee, Shallow)]
        return {each._s_name for call in calls for value in call.kwargs.values() for each in roots(value)}

    ever = set[str]().union(*map(data, facts.runs))
    return any(run.given.get(name) is not None for name in ever - data(run))


def _elsewhere(facts: Facts, run: Run, call: Inserted, towers: set[str]) -> bool:
    """Whether the run calls all of the towers at one place with data, or later without.

    A place that no site stands at does not count: a second call is better there than none.
    """
    with_data = [
        each.callee.name
        for each in run.world.events
        if isinstance(each.callee, Shallow)
        and any(root._s_name in facts.asked for value in each.kwargs.values() for root in roots(value))
    ]
    at = next(number for number, each in enumerate(run.world.inserted) if each is call)
    later = [each for each in run.world.inserted[at + 1 :] if each.helper == call.helper]
    names = [*with_data, *(_called_without(run, each)[0] for each in later)]
    return any(name != "get_rope_index" and towers <= facts.towers(name)[0] for name in names)


def roots(value: Any, how: str = "given") -> list[Thing]:
    """The stand-ins of a kind of which a value was made."""
    found: dict[int, Thing] = {}
    seen: set[int] = set()
    todo = [value]
    while todo:
        each = todo.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, Thing):
            if each._s_how == how:
                found[id(each)] = each
            todo += each._s_of
        elif isinstance(each, list | tuple):
            todo += each
        elif isinstance(each, dict):
            todo += each.values()
    return list(found.values())


def dotted(value: Any) -> str:
    """The name under which a text imports a value, with its module; empty for what is made otherwise."""
    if not isinstance(value, Thing) or value._s_how not in ("attribute", "import"):
        return ""
    return ".".join(filter(None, (*map(dotted, value._s_of), str(value._s_name))))


EXPECTED: Mapping[str, Callable[[Facts, Run, Inserted], _Facts]] = {
    "found": _of_samples, "refuse": _of_samples, "shard": _of_shard, "gather": _of_gather, "rows_to_add": _of_rows_to_add,
    "plus_zero": _of_absent, "read_together": _of_sizes, "computed": _of_computed, "converted": _of_converted,
    "joined": _of_joined, "sent": _of_sent, "makes_cache": _of_making,
}  # fmt: skip
