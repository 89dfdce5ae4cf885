"""Calls in layer code: functions and modules of the file, torch's, and attention."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.code.edit import before
from veomni_hook.patches.code.scope import global_bindings
from veomni_hook.patches.code.template import Found, Template
from veomni_hook.patches.code.tree import chain, decorator_name, last_name, walk_ast
from veomni_hook.patches.idioms import causal_conv, gated_delta_rule
from veomni_hook.patches.idioms.layer_loop.attention import (
    INTERFACE,
    STATE,
    Queries,
    asks_interface,
    attended,
    convolved,
    of_cache,
    of_keys,
    queries_of,
    ruled,
)
from veomni_hook.patches.idioms.layer_loop.collections import Collections
from veomni_hook.patches.idioms.layer_loop.modules import Attributes, lineage, method_of
from veomni_hook.patches.idioms.layer_loop.operations import (
    check_known,
    of_function,
    of_torch_module,
    operation,
)
from veomni_hook.patches.idioms.layer_loop.shapes import SHAPED, filled
from veomni_hook.patches.idioms.layer_loop.values import (
    ATTENTION,
    EMPTY,
    KEYS,
    NOTHING,
    PLACES,
    PLAIN,
    POSITIONS,
    Arguments,
    Items,
    Many,
    Method,
    Module,
    Operation,
    Plain,
    Size,
    Tensor,
    Unknown,
    Value,
    Whole,
    all_joined,
    bare,
    fresh,
    holds_tensor,
    is_positional,
    read_from,
    shaped,
    tensor_like,
    used,
)
from veomni_hook.patches.idioms.moe_experts import find as moe_experts
from veomni_hook.patches.idioms.varlen_attention import read
from veomni_hook.patches.interpreter.domain import Frame
from veomni_hook.patches.interpreter.walk import bound, evaluate, run, super_name
from veomni_hook.patches.routes.view import ModuleView
from veomni_hook.patches.site import Code, Missed, Site, Status

__all__ = ["Calls"]

_DEPTH = 40
#: Decorators that leave what a method computes as it is.
_DECORATORS = frozenset(
    """
    auto_docstring can_return_tuple capture_outputs check_model_inputs classmethod deprecate_kwarg
    dynamic_rope_update force_accelerate_hooks merge_with_config_defaults no_grad override staticmethod
    torch_compilable_check use_kernel_forward_from_hub use_kernel_func_from_hub use_kernelized_func
    """.split()
)
_LAST = Template("torch.nn.functional.pad(X, (TAPS - X.shape[-1], 0))", names="X")
#: What a mask of padding has: a number for each position.
_OF_POSITIONS = shaped("B S")


class Calls(Collections):
    """What calls do with positions.

    Args:
        view: the file.
        tower: whether attention stays within segments, as in towers.

    Attributes:
        attributes: those of its classes.
        names: the names that it binds at its top level.
        experts: the classes of experts, and whether their own idiom knows what they compute.
        rules: where the names of functions begin whose calls get all positions of a share of the heads.
        convolutions: the same, of convolutions along the positions whose part begins with zeros.
        masks: arguments of calls that must be this process's part of a mask.
        queries: by the identity of a method of attention: with what it gets all keys, or None.
        asking: whether one of them is followed.
        absent: parameters of the model's forward that are None where its layers are split.
        refusing: the method of attention, and its frame's depth, whose branches may be refused.
        refusals: statements at which the branches begin that are refused, by their identity, and why.
        segments: attention by segments in the methods that were followed.
        boundaries: what a tower's forward calls the boundaries of these segments.
    """

    def __init__(self, view: ModuleView, *, tower: bool = False) -> None:
        super().__init__()
        self.view, self.tower = view, tower
        self.attributes = Attributes(view)
        self.names = global_bindings(view.document.tree)
        sites = view.sites(moe_experts.find)
        self.experts = {site.target.partition(".")[0]: site.status is Status.ROUTED for site in sites}
        self.rules = _routed(view, gated_delta_rule.find)
        # Layers are counted by their rules when they run: one that convolves alone would count as missed.
        self.convolutions = _routed(view, causal_conv.find) if self.rules else frozenset()
        self.masks: dict[int, ast.expr] = {}
        self.queries: dict[int, Queries | None] = {}
        self.asking = False
        self.absent: frozenset[str] = frozenset()
        self.refusing: tuple[FunctionNode, int] | None = None
        self.refusals: dict[int, tuple[ast.stmt, str]] = {}
        self.segments: list[Found] = []
        self.boundaries: set[str] = set()

    def call(self, node: ast.Call, frame: Frame[Value]) -> Value:
        start = self.view.document.start(node.func)
        for starts, rule in ((self.convolutions, convolved), (self.rules, ruled)):
            if start in starts:
                function = self.view.functions.get(last_name(node.func))
                return rule(self._arguments(node, frame), function)
        if _LAST.match(node, self.view.scope.dotted) is not None:
            return STATE  # the last positions, which a cache keeps
        try:
            return self._call(node, frame)
        except Missed:
            if not (masks := self._masks(node, frame)):
                raise
        # As upstream's function that zeroes what is padded: it needs the mask of the same positions.
        result = self._call(node, frame.fork({**frame.values, **dict.fromkeys(masks, _OF_POSITIONS)}))
        self.masks.update({id(mask): mask for mask in masks.values()})
        return result

    def _masks(self, node: ast.Call, frame: Frame[Value]) -> dict[str, ast.expr]:
        """The masks that a method passes to a function of the file, by name."""
        known = isinstance(node.func, ast.Name) and node.func.id not in frame.values
        if self.tower or "self" not in frame.values or not known:
            return {}
        if last_name(node.func) not in self.view.scope.functions:
            return {}
        passed = [*node.args, *(keyword.value for keyword in node.keywords)]
        names = {argument.id: argument for argument in passed if isinstance(argument, ast.Name)}
        values = {name: bare(frame.values.get(name, PLAIN)) for name in names}
        masks = [name for name, value in values.items() if isinstance(value, Whole) and "mask" in value.name]
        return {name: names[name] for name in masks}

    def _call(self, node: ast.Call, frame: Frame[Value]) -> Value:
        if name := super_name(node.func):
            return self._above(name, self._arguments(node, frame), frame)
        path = chain(node.func)
        if path == f"{INTERFACE}.get_interface":
            return ATTENTION
        dotted = self.view.scope.dotted(node.func) if path.partition(".")[0] not in frame.values else ""
        arguments = self._arguments(node, frame)
        if dotted == "torch.arange" and arguments.given == (Size((POSITIONS,)),) and self.asking:
            return PLACES
        if (known := of_function(dotted, arguments, node)) is not None:
            return known
        function = bare(evaluate(node.func, frame))
        if function == PLAIN and isinstance(node.func, ast.Attribute) and node.func.attr in SHAPED:
            return filled(arguments)
        return self._called(function, arguments, node, frame)

    def of_method(self, method: Method, *operands: Value) -> Value:
        """The result of a method for these operands.

        Raises:
            Missed: it moves or mixes positions, or cannot be followed.
        """
        return self._followed(method, Arguments(operands), Frame(self, {}))

    def _arguments(self, node: ast.Call, frame: Frame[Value]) -> Arguments:
        """The arguments of a call."""
        positional: list[Value] = []
        for argument in node.args:
            value = evaluate(argument, frame)
            if not isinstance(argument, ast.Starred):
                positional.append(value)
            elif isinstance(value, Items):
                positional += value.values
            elif value == PLAIN == evaluate(node.func, frame):
                positional.append(PLAIN)  # a method of a value without positions
            elif not isinstance(value, Whole):
                raise Missed("arguments of unknown number")
        named: dict[str, Value] = {}
        bag = None
        for keyword in node.keywords:
            value = evaluate(keyword.value, frame)
            if keyword.arg is not None:
                named[keyword.arg] = value
            elif isinstance(value, Whole):
                bag = value
                named.update(value.held)
            elif not isinstance(value, Many | Plain) or holds_tensor(value):
                raise Missed("keyword arguments that are not known")
        return Arguments(tuple(positional), named, bag)

    def _called(self, function: Value, arguments: Arguments, node: ast.Call, frame: Frame[Value]) -> Value:
        """The result of a call of a value."""
        if isinstance(function, Method):
            return self._followed(function, arguments, frame)
        if isinstance(function, Module):
            return all_joined(self._module(name, arguments, frame) for name in function.names)
        if isinstance(function, Operation):
            return _operation(function, arguments, node)
        if isinstance(function, Items):
            value = arguments.first
            for part in function.values:
                value = self._called(bare(part), Arguments((value,)), node, frame)
            return value
        if isinstance(function, Unknown):
            raise Missed(f"it calls {function.reason}")
        # A function of another file must not get a part of the positions.
        for value in arguments.every:
            if isinstance(value, Tensor):
                raise Missed(f"it calls {ast.unparse(node.func)}, which is not followed")
            if isinstance(value, Size):
                tensor_like(value)
        return next((value for value in arguments.every if isinstance(value, Whole | Unknown)), PLAIN)

    def _module(self, name: str, arguments: Arguments, frame: Frame[Value]) -> Value:
        """A call of an instance of one class."""
        if name in ATTENTION.names:
            if self.tower:
                raise Missed("its attention is not split at boundaries", code=Code.NO_BOUNDARIES)
            return attended(arguments)
        if name.startswith("torch.nn."):
            return of_torch_module(name, arguments)
        if name not in self.view.scope.classes:
            raise Missed(f"{name.rpartition('.')[2]} is a class of another file", code=Code.OTHER_FILE)
        if name in self.experts:
            return self.sent(name, arguments)
        if method_of(self.view, name, "__call__") is not None:
            raise Missed(f"{name} defines __call__", code=Code.REPLACED)
        if (forward := method_of(self.view, name, "forward")) is not None:
            return self._followed(forward, arguments, frame)
        if base := self._torch_base(name):
            return of_torch_module(base, arguments)
        raise Missed(f"{name} has no forward in this file", code=Code.OTHER_FILE)

    def _torch_base(self, name: str) -> str:
        """The class of torch, other than Module, that a class inherits from; empty if there is none."""
        bases = [base for owner in lineage(self.view, name) for base in owner.bases]
        for base in map(self.view.scope.dotted, bases):
            if base.startswith("torch.nn.") and base != "torch.nn.Module":
                return base
        return ""

    def sent(self, name: str, arguments: Arguments) -> Value:
        """Experts that their own idiom knows: each token goes through its experts alone."""
        if not self.experts[name]:
            owner = self.view.classes[name]
            raise Missed(f"experts that are not recognised: {name}", owner, Code.OTHER_FORM)
        passed = (*arguments.given, *arguments.named.values())
        tensors = [value for value in passed if isinstance(value, Tensor)]
        if len(tensors) < len(passed) or len(tensors) < 2:
            raise Missed(f"what {name} gets is not followed")
        rows = {tensor.dims[0] for tensor in tensors}
        if len(rows) > 1 or not is_positional(*rows):
            raise Missed(f"what {name} gets is not one row for each position")
        return Tensor((*rows, *(fresh() for _ in tensors[0].dims[1:])))

    def _above(self, name: str, arguments: Arguments, frame: Frame[Value]) -> Value:
        """A call of ``super().name``."""
        own = frame.values.get("self")
        owner = own.names[0] if isinstance(own, Module) and frame.home is not None else ""
        if (method := method_of(self.view, owner, name, frame.home)) is not None:
            return self._followed(method, arguments, frame)
        if name == "forward" and (base := self._torch_base(owner)):
            return of_torch_module(base, arguments)
        raise Missed(f"super().{name} is in another file", code=Code.OTHER_FILE)

    def _followed(self, method: Method, arguments: Arguments, frame: Frame[Value]) -> Value:
        """The result of a function or method of the file.

        Raises:
            Missed: it moves or mixes positions, or cannot be followed.
        """
        function, own = method.node, method.owner
        if self.tower:
            try:
                segments = read(function)
            except Missed as error:
                raise Missed(error.reason.after(function.name)) from None
            self.segments += [segments] if segments is not None else []
        decorators = {decorator_name(decorator) for decorator in function.decorator_list}
        if other := sorted(name for name in decorators - _DECORATORS if "kernel" not in name):
            raise Missed(f"{function.name} is decorated with {other[0]}", function, Code.DECORATED)
        if frame.depth > _DEPTH:
            raise Missed(f"{function.name} calls itself", function)
        inner, where = Frame(self, {}, depth=frame.depth + 1), function.name
        inner.home = method.home
        if own is not None:
            where = f"{own.names[0]}.{function.name}"
            if "staticmethod" not in decorators:
                arguments = replace(arguments, given=(own, *arguments.given))
        self.followed[f"{inner.home.name}.{function.name}" if inner.home else function.name] = None
        try:
            inner.values = self._parameters(function, arguments)
            result = self._attending(function, inner)
        except Missed as error:
            error.reason = error.reason if ": " in error.reason else error.reason.after(where)
            raise
        return NOTHING if result is None or result == EMPTY else result

    def _attending(self, function: FunctionNode, frame: Frame[Value]) -> Value | None:
        """The result of a method; attention that mixes positions gets the keys of all of them, if it can.

        Raises:
            Missed: neither can be followed.
        """
        if self.tower or not asks_interface(function):
            return run(function.body, frame)
        masks, errors, key = self.masks, list[Missed](), id(function)
        values_before = frame.values
        for queries, values in [(None, frame.values), *queries_of(self.view, function, frame.values)]:
            if self.queries.get(key, queries) != queries:
                continue  # what it gets is the same in all of its calls
            frame.values, self.masks, self.asking = {**values}, {**masks}, queries is not None
            try:
                result = run(function.body, frame)
            except Missed as error:
                errors.append(error)
            else:
                self.queries[key] = queries
                return result
            finally:
                self.asking = False
        if not errors:
            raise Missed("its attention is called in several ways", function)
        # It may have other ways beside the one that can be followed.
        outer, self.refusing = self.refusing, (function, frame.depth)
        frame.values, self.masks = {**values_before}, {**masks}
        try:
            result = run(function.body, frame)
        except Missed:
            raise errors[0] from None
        finally:
            self.refusing = outer
        self.queries[key] = None
        return result

    def left_out(
        self, error: Missed, test: ast.expr, block: Sequence[ast.stmt], frame: Frame[Value]
    ) -> Value:
        function, depth = self.refusing or (None, -1)
        if function is None or frame.depth != depth or not block or "self" not in frame.values:
            raise error
        # Whether there is something may be true of every call; settings and classes of caches have a default.
        operators = [part for node in walk_ast(test) if isinstance(node, ast.Compare) for part in node.ops]
        if any(isinstance(part, ast.Is | ast.IsNot) for part in operators):
            raise error
        if before(self.view.document, function, block[0]) is None:
            raise error
        self.refusals[id(block[0])] = block[0], error.reason
        return self.raised()

    def _parameters(self, function: FunctionNode, arguments: Arguments) -> dict[str, Value]:
        """The values of a function's parameters; those that ``**`` may set are not known."""
        passed = bound(function, arguments.given, {**arguments.named})
        values = passed.values
        for name, default in passed.defaults.items():
            values[name] = Whole(name) if default is None else evaluate(default, Frame(self, {}))
            if arguments.bag is not None and default is not None and name not in self.absent:
                values[name] = Whole(name) if values[name] == NOTHING else PLAIN
        if function.args.vararg is not None:
            values[function.args.vararg.arg] = Items(tuple(passed.rest))
        elif passed.rest:
            raise Missed("it gets more arguments than it has parameters", function, Code.OTHER_ARGUMENTS)
        if (kwarg := function.args.kwarg) is not None:
            if any(name in self.absent and value != NOTHING for name, value in passed.others.items()):
                raise Missed("it passes on something else under the name of what is None", function)
            parts = tuple((name, value) for name, value in passed.others.items() if holds_tensor(value))
            values[kwarg.arg] = Whole(f"**{kwarg.arg}", parts)
        return values


def _routed(view: ModuleView, find: Callable[[ModuleView], Iterator[Site]]) -> frozenset[int]:
    """Where the names of functions begin whose calls an idiom routes."""
    sites = (site for site in view.sites(find) if site.status is Status.ROUTED)
    return frozenset(edit.start for site in sites for edit in site.edits)


def _operation(function: Operation, arguments: Arguments, node: ast.Call) -> Value:
    """A method of a value."""
    value, name = used(function.value), function.name
    if isinstance(value, Tensor):
        check_known(arguments)
        return operation(name, [value, *arguments.given], arguments.named)
    if isinstance(value, Whole):
        if (result := of_cache(name, arguments)) is not None:
            return result
        if name in ("get", "pop", "items", "keys", "values", "copy"):
            return read_from(value, arguments.first if name in ("get", "pop") else PLAIN)
        raise Missed(f"it asks {value.name} for {name}")
    if value in (STATE, KEYS):
        return STATE if value == STATE else of_keys(name, arguments)
    if isinstance(value, Many) and name in ("values", "get"):
        return value if name == "values" else value.value
    if isinstance(value, Many | Items) and name in ("keys", "items", "index", "count"):
        return PLAIN
    raise Missed(f"it calls {ast.unparse(node.func)}, which is not followed")
