"""Whether a forward that was put on an instance only passes its argument on to the forward of the class.

Tools wrap the factors of adapters to move inputs to another device, and call the class's forward as it is
where none is to be moved (ms-swift's LoRA).
"""

from __future__ import annotations

import ast
from functools import lru_cache
from itertools import chain
from operator import attrgetter
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from veomni_hook.kernels.shared.origin import definition_of

__all__ = ["passes_on"]

#: What a wrapper may read of tensors, so that its way depends on nothing but their devices.
_OF_TENSORS = frozenset(("device", "to"))
_GLOBALS = frozenset(("hasattr",))
#: Syntax that changes nothing but locals, or makes no value that a call could change.
_HARMLESS = (
    ast.Return, ast.If, ast.Assign, ast.Expr, ast.Name, ast.Attribute, ast.Call, ast.keyword, ast.Starred,
    ast.Subscript, ast.Slice, ast.Constant, ast.Compare, ast.cmpop, ast.BoolOp, ast.boolop, ast.UnaryOp,
    ast.Not, ast.IfExp, ast.Tuple, ast.List, ast.Dict, ast.expr_context,
)  # fmt: skip


def passes_on(module: nn.Module, x: torch.Tensor) -> bool:
    """Return whether the forward on ``module`` itself, called with ``x``, only calls the class's with ``x``.

    It is run, with a stand-in for the class's forward: that must be called once, with ``x`` itself, and what
    it returns must be returned. Code that could change anything is not run.
    """
    wrapper = module.__dict__["forward"]
    if type(wrapper) is not MethodType or wrapper.__self__ is not module:
        return False
    function = wrapper.__func__
    if type(function) is not FunctionType or not _changes_nothing(function.__code__):
        return False
    if function.__defaults__ or function.__kwdefaults__ or _GLOBALS & function.__globals__.keys():
        return False
    inputs: list[Any] = []
    stand_in = _StandIn(module, inputs)
    try:
        result = function(stand_in, x)
    except Exception:  # the call itself raises it again
        return False
    return result is stand_in and len(inputs) == 1 and inputs[0] is x


class _StandIn:
    """A module whose class's forward notes its input and returns this object; it has no names of its own."""

    def __init__(self, module: nn.Module, inputs: list[object]) -> None:
        self.__module, self.__inputs = module, inputs

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.__module, name)
        if isinstance(value, (torch.Tensor, bool, int, float, str, type(None))):
            return value
        if (
            getattr(value, "__func__", None) is type(self.__module).forward
            and value.__self__ is self.__module
        ):
            return self.__forward
        raise TypeError(f"{name} could change something")

    def __forward(self, x: object) -> _StandIn:
        self.__inputs.append(x)
        return self


@lru_cache(maxsize=64)
def _changes_nothing(code: CodeType) -> bool:
    """Return whether ``code`` only reads, calls what it was passed, and asks tensors for their devices."""
    try:
        definition = definition_of(code)
    except (OSError, TypeError, SyntaxError):  # what it does is not known
        return False
    # The file may have been edited since it was imported.
    compiled = compile(ast.Module([definition], []), code.co_filename, "exec")
    parts = attrgetter("co_code", "co_consts", "co_names", "co_varnames")
    if not any(isinstance(one, CodeType) and parts(one) == parts(code) for one in compiled.co_consts):
        return False
    nodes = chain.from_iterable(map(ast.walk, definition.body))
    return all(isinstance(node, _HARMLESS) and _reads_no_more(node, code.co_varnames) for node in nodes)


def _reads_no_more(node: ast.AST, locals_: tuple[str, ...]) -> bool:
    """Return whether a name is local or known, and an attribute only read, of a tensor only its device."""
    if isinstance(node, ast.Name):
        return node.id in locals_ or node.id in _GLOBALS
    if isinstance(node, ast.Subscript):
        return isinstance(node.ctx, ast.Load)
    if isinstance(node, ast.Attribute):
        return isinstance(node.ctx, ast.Load) and (
            node.attr in _OF_TENSORS or not hasattr(torch.Tensor, node.attr)
        )
    return True
