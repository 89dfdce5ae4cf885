"""One run of upstream's text, or of the text with inserted calls, on stand-ins; helpers of ours are recorded."""

from __future__ import annotations

import ast
import inspect
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType, FunctionType
from typing import Any

from tests.patches.idioms.applied import spliced
from tests.proof.recording import Endless, Event, Thing, World, key_of

#: What callers of transformers' models pass by these names, whatever a forward calls them.
PUBLIC = ("position_ids", "attention_mask", "use_cache")
IDS, EMBEDDINGS = "input_ids", "inputs_embeds"
PROBE, MARK = "veomni_probe", "veomni_mark"
#: How often an argument is absent.
_ABSENT = 0.4


@dataclass(frozen=True)
class Inserted:
    """A call of a helper: by what, with what, after how many events, and what came of it."""

    helper: str
    line: int
    owner: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    at: int
    result: Any


@dataclass
class Run:
    """One run of a text.

    Attributes:
        given: the arguments, by name; None for those that are absent.
        ended: what was returned or raised, to be compared.
    """

    world: World
    given: dict[str, Any]
    ended: Any = None
    complete: bool = False

    @property
    def calls(self) -> list[Event]:
        """The calls, to be compared: all but those that ask a tensor for its shape."""
        return [each for each in self.world.events if not _asks_for_shape(each.callee)]


def _asks_for_shape(callee: Any) -> bool:
    return (
        isinstance(callee, Thing)
        and callee._s_how == "attribute"
        and callee._s_name in ("size", "dim", "numel")
    )


class Helper:
    """In place of a module or a slot of ours: records, and does what helpers do where there is nothing to do."""

    def __init__(self, world: World, name: str, *, marks: bool) -> None:
        self._world, self._name, self._marks = world, name, marks

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            frame = _method_of(sys._getframe(1))
            helper, at = f"{self._name}.{name}", len(self._world.events)
            result = _done(self._world, helper, args, kwargs)
            if name == "found" and self._marks:
                result = {**args[1], MARK: self._world.given(MARK)}
            code = frame.f_code
            owner = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
            line = sys._getframe(1).f_lineno
            self._world.inserted.append(Inserted(helper, line, owner, args, kwargs, at, result))
            return result

        return call


def _method_of(frame: FrameType) -> FrameType:
    while frame.f_code.co_name in ("<lambda>", "<listcomp>", "<genexpr>", "<dictcomp>") and frame.f_back:
        frame = frame.f_back
    return frame


def _called(_: World, *args: Any) -> Any:
    """What a bound call computes: a method of torch's tensors, or a module of the owner."""
    _, callee, *given = args
    if isinstance(callee, Thing) and callee._s_how == "attribute":
        return getattr(given[0], callee._s_name)(*given[1:])
    return callee(*given)


def _sharded(_: World, module: Any, *entering: Any, **__: Any) -> Any:
    return entering


def _shared(world: World, module: Any, hidden: Any, boundaries: Any, *tables: Any) -> Any:
    return (world.given("share"), hidden, *boundaries, *tables)


#: What helpers return where they change nothing; None: those that are not here.
_DONE: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(
        ("found", "gather", "part_of_rows", "converted", "plus_zero", "at"), lambda _, *args, **__: args[1]
    ),
    **dict.fromkeys(("values", "place", "sent", "picked", "lengths"), lambda _, *args: args[0]),
    **dict.fromkeys(("added", "of_sizes", "followed"), lambda _, *args: args[0](*args[1:])),
    "shard": _sharded,
    "whole_keys": lambda _, *args: args[2:],
    "rows_to_add": lambda _, *args: args[4],
    "check": lambda _, upstream, condition, message: upstream(condition, message()),
    "selected": lambda _, tensor, mask: tensor[mask].numel(),
    "chosen": lambda _, mask: mask.bool(),
    "made": lambda world, numbers, **options: world.module("torch").tensor(numbers, **options),
    "computed": lambda *_, **__: lambda function: function,
    "call": _called,
    "separated": lambda _, *args: args[2],
    "makes_cache": lambda *_: True,
}


def _done(world: World, helper: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a helper returns if it changes nothing."""
    name = helper.partition(".")[2]
    compute = _shared if helper == "veomni_towers.shard" else _DONE.get(name)
    return None if compute is None else compute(world, *args, **kwargs)


class Texts:
    """A module's text as it is, and with the edits of sites; both can be run."""

    def __init__(self, name: str, upstream: str, sites: Sequence[Any], target: str) -> None:
        self.name, self.target = name, target
        self.upstream, self.edited = ast.parse(upstream), ast.parse(spliced(upstream, sites))
        self.aliases = [pair.rpartition(" as ")[2] for site in sites for _, pair in site.imports]
        self.aliases += [slot.name for site in sites for slot in site.slots]

    def run(
        self,
        number: int,
        *,
        edited: bool,
        marks: bool = False,
        shallow: Sequence[str] = (),
        extras: Sequence[str] = (),
    ) -> Run:
        """Run the target once: branches and absent arguments by number."""
        world = World(number)
        also = {name: Helper(world, name, marks=marks) for name in self.aliases} if edited else {}
        scope = world.execute(self.edited if edited else self.upstream, self.name, also)
        call, signature = _callable(world, scope, self.target, shallow)
        parameters = [each for each in signature.parameters.values() if each.name != "self"]
        given = _drawn(world, number, parameters, extras)
        run = Run(world, given)
        named = {each.name for each in parameters}
        positional = [each.name for each in parameters if each.kind is each.POSITIONAL_ONLY]
        rest = {name: value for name, value in given.items() if name not in positional}
        if not any(each.kind is each.VAR_KEYWORD for each in parameters):
            rest = {name: value for name, value in rest.items() if name in named}
        try:
            result = call(*(given[name] for name in positional), **rest)
            if inspect.isgenerator(result):
                result = list(result)
            run.ended, run.complete = ("returned", key_of(result)), True
        except (Exception, Endless) as error:  # what upstream raises, both texts raise
            run.ended = ("raised", type(error).__name__, str(error))
        return run

    def attributes(self, method: str) -> tuple[set[str], set[str]]:
        """The attributes that a method of the target's class reads, and those of them that are used as modules."""
        read, called = set[str](), set[str]()
        for number in range(6):
            world = World(number)
            scope = world.execute(self.upstream, self.name, {})
            bound, signature = _callable(world, scope, f"{self.target.rpartition('.')[0]}.{method}", ())
            module = bound.__self__  # type: ignore[attr-defined]
            kind = type(module)
            names = set[str]()

            def seen(self: Any, name: str, kind: Any = kind, names: set[str] = names) -> Any:
                names.add(name)
                return super(kind, self).__getattribute__(name)

            module.__class__ = type(kind)(kind.__name__, (kind,), {"__getattribute__": seen})
            try:
                bound(**_drawn(world, number, list(signature.parameters.values()), ()))
            except (Exception, Endless):
                pass  # what it read before counts
            names = {
                n
                for n in names
                if n[0] != "_" and n != "config" and not isinstance(getattr(kind, n, None), FunctionType)
            }
            read |= names
            held = {id(value): name for name in names if (value := vars(module).get(name)) is not None}
            called |= {held[id(each.callee)] for each in world.events if id(each.callee) in held}
        return read, called


def _callable(
    world: World, scope: dict[str, Any], target: str, shallow: Sequence[str]
) -> tuple[Callable[..., Any], inspect.Signature]:
    """The function or the bound method that a target names, of an object made as its constructor says."""
    owner, _, name = target.rpartition(".")
    if not owner or not isinstance(kind := scope.get(owner), type):
        function = scope[name]
        return function, inspect.signature(function)
    world.defining = True
    try:
        needed = list(inspect.signature(kind.__init__).parameters.values())[1:]
        named = [
            p for p in needed if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
        ]
        module = kind(**{each.name: world.given(each.name) for each in named})
    except Exception:  # what its constructor would hold are stand-ins then
        module = kind.__new__(kind)
        vars(module)["config"] = world.given("config")
    finally:
        world.defined()
    for each in shallow:
        if callable(getattr(kind, each, None)):
            vars(module)[each] = Shallow(world, each, getattr(module, each))
    return getattr(module, name), inspect.signature(getattr(module, name))


class Shallow:
    """A method that is called and not run."""

    def __init__(self, world: World, name: str, method: Callable[..., Any]) -> None:
        self.world, self.name, self.method = world, name, method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        bound = inspect.signature(self.method).bind(*args, **kwargs).arguments
        extra = bound.pop("kwargs", {})
        result = Thing(self.world, "call", (*bound.values(),), (self.name, *bound))
        self.world.events.append(Event(f"{self.name}{key_of(bound)}{key_of(extra)}", self, (), bound, result))
        return result


def _drawn(
    world: World, number: int, parameters: Sequence[inspect.Parameter], extras: Sequence[str]
) -> dict[str, Any]:
    """Arguments by name; which of those that may be absent are is drawn, and one of ids and embeddings is."""
    draw = random.Random(number)
    given: dict[str, Any] = {}
    for each in parameters:
        if each.kind in (each.VAR_KEYWORD, each.VAR_POSITIONAL):
            continue
        absent = each.default is None and number > 1 and draw.random() < _ABSENT
        given[each.name] = None if absent else world.given(each.name)
    if {IDS, EMBEDDINGS} <= given.keys():
        ids = number % 3 != 2
        given[IDS], given[EMBEDDINGS] = (world.given(IDS), None) if ids else (None, world.given(EMBEDDINGS))
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        public = PUBLIC if number % 2 else ()
        given |= {name: world.given(name) for name in (*public, PROBE, *extras) if name not in given}
    return given
