"""Evaluate calls in layer code: functions and modules of the file, torch's, and attention."""

from __future__ import annotations

import ast
from abc import abstractmethod
from collections.abc import Iterable, Mapping

from veomni_hook.patches.code.expressions import decorator_name
from veomni_hook.patches.idioms.layer_loop.expressions import Environment, Expressions, joined
from veomni_hook.patches.idioms.layer_loop.modules import lineage, method_of
from veomni_hook.patches.idioms.layer_loop.operations import torch_name
from veomni_hook.patches.idioms.layer_loop.shapes import fresh
from veomni_hook.patches.idioms.layer_loop.values import (
    BATCH,
    NOTHING,
    PLAIN,
    POSITIONS,
    Attention,
    Items,
    Many,
    Maybe,
    Method,
    Module,
    Operation,
    Own,
    Plain,
    Size,
    Tensor,
    Unknown,
    Unproven,
    Value,
    Whole,
    is_positional,
    of_all,
)
from veomni_hook.patches.idioms.moe_experts import find as moe_experts
from veomni_hook.patches.routes.view import ModuleView
from veomni_hook.patches.site import Status

__all__ = ["Calls"]

_DEPTH = 40
_INTERFACE = "ALL_ATTENTION_FUNCTIONS"
#: Arguments of attention that hold no positions, or all of them: the interface's implementations know them.
_ATTENTION_ARGUMENTS = {
    "attention_mask",
    "cache_position",
    "cu_seq_lens_k",
    "cu_seq_lens_q",
    "deterministic",
    "dropout",
    "enable_gqa",
    "is_causal",
    "is_training",
    "layer_idx",
    "max_length_k",
    "max_length_q",
    "output_attentions",
    "position_ids",
    "s_aux",
    "scaling",
    "sliding_window",
    "softcap",
    "training",
    "use_cache",
    "use_top_left_mask",
}
#: Decorators that leave what a method computes as it is.
_DECORATORS = {
    "auto_docstring",
    "can_return_tuple",
    "capture_outputs",
    "check_model_inputs",
    "classmethod",
    "deprecate_kwarg",
    "dynamic_rope_update",
    "merge_with_config_defaults",
    "no_grad",
    "override",
    "staticmethod",
    "torch_compilable_check",
    "use_kernel_forward_from_hub",
    "use_kernel_func_from_hub",
    "use_kernelized_func",
}
_POINTWISE = {
    "Dropout", "ELU", "GELU", "Hardtanh", "Identity", "LeakyReLU", "ReLU", "ReLU6", "SELU", "SiLU", "Sigmoid",
    "Softplus", "Tanh",
}  # fmt: skip
_NORMS = {"LayerNorm", "RMSNorm"}
_RANDOM = {"bernoulli", "rand", "randint", "randn", "randperm"}
_QUESTIONS = {"hasattr", "isinstance", "callable", "issubclass", "type", "id", "print", "repr"}
_NUMBERS = {"abs", "bool", "float", "int", "max", "min", "round", "str", "sum", "pow", "divmod"}
_LOOPS = {"range", "reversed", "sorted", "set", "dict"}


class Calls(Expressions):
    """Evaluates calls.

    Args:
        view: the file.
    """

    def __init__(self, view: ModuleView) -> None:
        super().__init__(view)
        self._depth = 0
        #: Classes whose methods were followed, for the reliance of a route.
        self.followed: set[str] = set()
        #: Whether their own idiom knows what experts compute.
        self._experts = {
            site.target.partition(".")[0]: site.status is Status.ROUTED
            for site in view.sites(moe_experts.find)
        }

    @abstractmethod
    def body(self, statements: Iterable[ast.stmt], scope: Environment) -> Value:
        """Run a function's body; the value is what it returns."""

    def call(self, node: ast.Call, scope: Environment) -> Value:
        """The result of a call.

        Raises:
            Unproven: it moves or mixes positions, or cannot be followed.
        """
        if self._is_super(node.func):
            return self._above(node, scope)
        dotted = self.view.scope.dotted(node.func) if not self._is_local(node.func, scope) else ""
        if ast.unparse(node.func) == f"{_INTERFACE}.get_interface":
            return Attention()
        given, named, bag = self._arguments(node, scope)
        if dotted.startswith("builtins."):
            return self._builtin(dotted.rpartition(".")[2], given, node)
        every = list(of_all([*given, *named.values()]))
        if name := torch_name(dotted):
            return self._torch(name, given, named, node, every)
        if dotted.startswith("torch.") or dotted.partition(".")[0] in (
            "logger",
            ":logger",
            "warnings",
            "math",
        ):
            if not any(isinstance(each, Tensor) for each in every):
                return PLAIN
        if dotted.startswith("torch.nn.") and not every:
            return Module((dotted,), node)
        function = self.evaluate(node.func, scope)
        return self._called(function, given, named, bag, node, dotted)

    _call = call

    def _called(  # noqa: PLR0913 - a call has that many parts
        self,
        function: Value,
        given: list[Value],
        named: dict[str, Value],
        bag: Whole | None,
        node: ast.Call,
        dotted: str,
    ) -> Value:
        function = function.value if isinstance(function, Maybe) else function
        if isinstance(function, Attention):
            return self._attend(given, named, node)
        if isinstance(function, Method):
            return self.invoke(function, given, named, bag, node)
        if isinstance(function, Module):
            return self._module(function, given, named, bag, node)
        if isinstance(function, Operation):
            return self._operation(function, given, named, node)
        if isinstance(function, Items):
            value = given[0] if given else PLAIN
            for each in function.values:
                value = self._called(each, [value], {}, None, node, "")
            return value
        if isinstance(function, Unknown):
            raise Unproven(f"it calls {function.reason}", node)
        every = list(of_all([*given, *named.values()]))
        if dotted.endswith("apply_chunking_to_forward") and len(given) > 3:
            return self._called(given[0], given[3:], {}, None, node, "")
        if any(isinstance(each, Tensor) for each in every):
            raise Unproven(f"it calls {ast.unparse(node.func)}, which is not followed", node)
        for each in every:
            if isinstance(each, Size):
                self.tensor_like(each, node)
        whole = [each for each in every if isinstance(each, Whole)]
        return whole[0] if whole else PLAIN

    def _arguments(
        self, node: ast.Call, scope: Environment
    ) -> tuple[list[Value], dict[str, Value], Whole | None]:
        """The arguments of a call; ``**`` of a value for all positions apart."""
        given: list[Value] = []
        for each in node.args:
            value = self.evaluate(each, scope)
            if not isinstance(each, ast.Starred):
                given.append(value)
            elif isinstance(value, Items):
                given += value.values
            elif isinstance(value, Whole):
                continue
            else:
                raise Unproven("arguments of unknown number", node)
        named: dict[str, Value] = {}
        bag = None
        for keyword in node.keywords:
            value = self.evaluate(keyword.value, scope)
            if keyword.arg is not None:
                named[keyword.arg] = value
            elif isinstance(value, Whole):
                bag = value
            elif not (isinstance(value, Many | Plain) and not _holds_tensor(value)):
                raise Unproven("keyword arguments that are not known", node)
        return given, named, bag

    def _builtin(self, name: str, given: list[Value], node: ast.Call) -> Value:
        first = given[0] if given else PLAIN
        if name in _QUESTIONS:
            return PLAIN
        if name == "len":
            if isinstance(first, Tensor):
                return Size(first.dims[0])
            return Plain(len(first.values)) if isinstance(first, Items) else PLAIN
        if name == "getattr":
            return first if isinstance(first, Whole) else PLAIN
        if name in ("tuple", "list"):
            return first
        if name in _NUMBERS:
            for each in of_all(given):
                if isinstance(self.tensor_like(each, node), Tensor):
                    raise Unproven(f"{name} of values of some positions", node)
            return PLAIN
        if name in _LOOPS:
            for each in of_all(given):
                self.tensor_like(each, node)
            return first if isinstance(first, Items | Many) else PLAIN
        if name == "enumerate":
            return _numbered(first)
        if name == "zip":
            return _zipped(given, node)
        raise Unproven(f"it calls {name}, which is not followed", node)

    def _torch(
        self, name: str, given: list[Value], named: dict[str, Value], node: ast.Call, every: list[Value]
    ) -> Value:
        if name in _RANDOM:
            raise Unproven("it draws random numbers, which differ between ranks", node)
        for each in every:
            if isinstance(each, Whole | Unknown):
                self.tensor_like(each, node)
        if any(isinstance(each, Tensor) for each in every):
            return self.called(name, given, named, node)
        if any(isinstance(each, Size) and is_positional(each.dim) for each in every):
            raise Unproven(f"it calls {name} with the number of positions", node)
        return PLAIN

    def _operation(
        self, function: Operation, given: list[Value], named: dict[str, Value], node: ast.Call
    ) -> Value:
        """A method of a value."""
        value, name = function.value, function.name
        if isinstance(value, Tensor):
            for each in of_all([*given, *named.values()]):
                if isinstance(each, Whole | Unknown):
                    self.tensor_like(each, node)
            return self.called(name, [value, *given], named, node)
        if isinstance(value, Whole):
            if name == "update" and len(given) >= 2 and all(isinstance(each, Tensor) for each in given[:2]):
                return Items(tuple(given[:2]))  # the cache is empty: it returns what it is given
            if name in ("get", "pop", "items", "keys", "values", "copy"):
                return value
            raise Unproven(f"it asks {value.name} for {name}", node)
        if isinstance(value, Many) and name in ("values", "get"):
            return value if name == "values" else value.value
        if isinstance(value, Many | Items) and name in ("keys", "items", "index", "count"):
            return PLAIN
        raise Unproven(f"it calls {ast.unparse(node.func)}, which is not followed", node)

    def _attend(self, given: list[Value], named: dict[str, Value], node: ast.Call) -> Value:
        """Attention of the user's implementation: what it gets must be what the all-to-all expects."""
        names = ("module", "query", "key", "value", "attention_mask")
        passed = dict(zip(names, given, strict=False)) | named
        for name in ("query", "key", "value"):
            tensor = passed.get(name)
            dims = tensor.dims if isinstance(tensor, Tensor) else ()
            right = len(dims) == 4 and dims[2] == (POSITIONS,) and dims[0] in ((BATCH,), ())
            if not right or is_positional(dims[1]) or is_positional(dims[3]):
                raise Unproven(f"the {name} of its attention is not [batch, heads, positions, width]", node)
        for name, value in passed.items():
            if name not in (*names, *_ATTENTION_ARGUMENTS):
                raise Unproven(f"its attention takes {name}, which may hold positions", node)
            if name not in names[:4] and any(isinstance(each, Tensor) for each in of_all([value])):
                raise Unproven(f"its attention takes a part of the positions as {name}", node)
        result = Tensor(((BATCH,), (POSITIONS,), fresh(), fresh()))
        return Items((result, Unknown("attention weights, which hold a part of the positions")))

    def _module(  # noqa: PLR0913 - a call has that many parts
        self, module: Module, given: list[Value], named: dict[str, Value], bag: Whole | None, node: ast.Call
    ) -> Value:
        results = [self._one_module(name, module.made, given, named, bag, node) for name in module.names]
        value = results[0]
        for each in results[1:]:
            value = joined(value, each)
        return value

    def _one_module(  # noqa: PLR0913 - a call has that many parts
        self,
        name: str,
        made: ast.expr | None,
        given: list[Value],
        named: dict[str, Value],
        bag: Whole | None,
        node: ast.Call,
    ) -> Value:
        first = given[0] if given else next(iter(named.values()), PLAIN)
        if name == ":activation" or ".activations." in name:
            return self.called("silu", [self.tensor_like(first, node)], {}, node)
        if name.startswith("torch.nn."):
            return self._torch_module(name.removeprefix("torch.nn."), first, made, node)
        if name not in self.view.scope.classes:
            if name.endswith("pytorch_utils.Conv1D"):
                return self.called("linear", [self.tensor_like(first, node)], {}, node)
            raise Unproven(f"{name.rpartition('.')[2]} is a class of another file", node)
        if name in self._experts:
            known = self._experts[name]
            if not known:
                raise Unproven(f"experts that are not recognised: {name}", self.view.classes[name])
            return self._sent(name, given, named, node)
        found = method_of(self.view, name, "forward")
        if method_of(self.view, name, "__call__") is not None:
            raise Unproven(f"{name} defines __call__", node)
        if found is None:
            for owner in lineage(self.view, name):
                for base in owner.bases:
                    if (dotted := self.view.scope.dotted(base)).startswith("torch.nn."):
                        return self._torch_module(dotted.removeprefix("torch.nn."), first, made, node)
            raise Unproven(f"{name} has no forward in this file", node)
        return self.invoke(Method(found[0], Own(name)), given, named, bag, node)

    def _torch_module(self, name: str, first: Value, made: ast.expr | None, node: ast.Call) -> Value:
        value = self.tensor_like(first, node)
        if not isinstance(value, Tensor):
            return PLAIN
        if name in _POINTWISE:
            return value
        if name == "Linear":
            return self.called("linear", [value], {}, node)
        if name in _NORMS:
            return self.called("layer_norm", [value], {}, node)
        if name == "Embedding":
            return Tensor((*value.dims, fresh()))
        if name == "Softmax" and isinstance(made, ast.Call):
            given, named, _ = self._arguments(made, {})
            return self.called("softmax", [value, *given], named, node)
        raise Unproven(f"it calls torch's {name}, which may mix positions", node)

    def _sent(self, name: str, given: list[Value], named: dict[str, Value], node: ast.Call) -> Value:
        """Experts that their own idiom knows: each token goes through its experts alone."""
        tensors = [value for value in (*given, *named.values()) if isinstance(value, Tensor)]
        rows = tensors[0].dims[0] if tensors else ()
        if len(tensors) < len(given) + len(named) or len(tensors) < 2:
            raise Unproven(f"what {name} gets is not followed", node)
        if not is_positional(rows) or any(each.dims[0] != rows for each in tensors):
            raise Unproven(f"what {name} gets is not one row for each position", node)
        return Tensor((rows, *(fresh() for _ in tensors[0].dims[1:])))

    def invoke(  # noqa: PLR0913 - a call has that many parts
        self,
        method: Method,
        given: list[Value],
        named: Mapping[str, Value],
        bag: Whole | None,
        node: ast.AST | None = None,
    ) -> Value:
        """The result of a function or method of the file.

        Raises:
            Unproven: it moves or mixes positions, or cannot be followed.
        """
        function = method.node
        decorators = {decorator_name(each) for each in function.decorator_list}
        if other := sorted(name for name in decorators if name not in _DECORATORS and "kernel" not in name):
            raise Unproven(f"{function.name} is decorated with {other[0]}", function)
        if self._depth > _DEPTH:
            raise Unproven(f"{function.name} calls itself", function)
        own: list[Value] = (
            [method.owner] if method.owner is not None and "staticmethod" not in decorators else []
        )
        scope = self._parameters(function, [*own, *given], named, bag)
        if method.owner is not None:
            self.followed.add(method.owner.owner)
        self._depth += 1
        try:
            return self.body(function.body, scope)
        except Unproven as error:
            where = f"{method.owner.owner}.{function.name}" if method.owner is not None else function.name
            text = str(error)
            raise Unproven(text if ": " in text else f"{where}: {text}") from None
        finally:
            self._depth -= 1

    def _parameters(
        self,
        function: ast.FunctionDef | ast.AsyncFunctionDef,
        given: list[Value],
        named: Mapping[str, Value],
        bag: Whole | None,
    ) -> dict[str, Value]:
        """The values of a function's parameters; those that ``**`` may set are not known."""
        spec = function.args
        names = [each.arg for each in (*spec.posonlyargs, *spec.args)]
        scope: dict[str, Value] = dict(zip(names, given, strict=False))
        defaults = dict(zip(reversed(names), reversed(spec.defaults), strict=False))
        for each, default in zip(spec.kwonlyargs, spec.kw_defaults, strict=True):
            names.append(each.arg)
            if default is not None:
                defaults[each.arg] = default
        scope.update({name: value for name, value in named.items() if name in names})
        for name in names:
            if name not in scope:
                value = self.evaluate(defaults[name], {}) if name in defaults else Whole(name)
                if bag is not None and name in defaults:
                    value = Whole(name) if value == NOTHING else PLAIN
                scope[name] = value
        if spec.vararg is not None:
            scope[spec.vararg.arg] = Items(tuple(given[len(spec.posonlyargs) + len(spec.args) :]))
        elif len(given) > len(spec.posonlyargs) + len(spec.args):
            raise Unproven(f"{function.name} gets more arguments than it has parameters", function)
        if spec.kwarg is not None:
            rest = [value for name, value in named.items() if name not in names]
            if any(isinstance(each, Tensor) for each in of_all(rest)):
                raise Unproven(
                    f"{function.name} gets a part of the positions in **{spec.kwarg.arg}", function
                )
            scope[spec.kwarg.arg] = Whole(f"**{spec.kwarg.arg}")
        return scope

    def _is_super(self, function: ast.expr) -> bool:
        inner = function.value if isinstance(function, ast.Attribute) else None
        return isinstance(inner, ast.Call) and isinstance(inner.func, ast.Name) and inner.func.id == "super"

    def _above(self, node: ast.Call, scope: Environment) -> Value:
        """A call of ``super().method``."""
        own = scope.get("self")
        name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        owners = list(lineage(self.view, own.owner)) if isinstance(own, Own) else []
        holding = [owner for owner in owners if name in self.view.methods(owner)]
        here = [owner for owner in holding if any(each is node for each in ast.walk(owner))]
        following = holding[holding.index(here[0]) + 1 :] if here else []
        given, named, bag = self._arguments(node, scope)
        torch = [self.view.scope.dotted(base) for owner in owners for base in owner.bases]
        torch = [base for base in torch if base.startswith("torch.nn.") and base != "torch.nn.Module"]
        if not following and name == "forward" and torch and given:
            return self._torch_module(torch[0].removeprefix("torch.nn."), given[0], None, node)
        if not following or not isinstance(own, Own):
            raise Unproven(f"super().{name} is in another file", node)
        return self.invoke(Method(self.view.methods(following[0])[name], own), given, named, bag, node)

    def _is_local(self, function: ast.expr, scope: Environment) -> bool:
        while isinstance(function, ast.Attribute):
            function = function.value
        return isinstance(function, ast.Name) and function.id in scope


def _holds_tensor(value: Value) -> bool:
    return any(isinstance(each, Tensor) for each in of_all([value]))


def _numbered(value: Value) -> Value:
    """What ``enumerate`` gives."""
    if isinstance(value, Items):
        return Items(tuple(Items((Plain(number), each)) for number, each in enumerate(value.values)))
    if isinstance(value, Many):
        return Many(Items((PLAIN, value.value)))
    return Many(Items((PLAIN, value if isinstance(value, Whole) else PLAIN)))


def _zipped(given: list[Value], node: ast.AST) -> Value:
    """What ``zip`` gives."""
    if any(isinstance(each, Tensor) for each in given):
        raise Unproven("a loop over positions", node)
    if all(isinstance(each, Items) for each in given):
        rows = zip(*(each.values for each in given if isinstance(each, Items)), strict=False)
        return Items(tuple(Items(row) for row in rows))
    parts = [each.value if isinstance(each, Many) else each for each in given]
    if any(isinstance(each, Items) for each in parts):
        raise Unproven("a loop that is not followed", node)
    return Many(Items(tuple(parts)))
