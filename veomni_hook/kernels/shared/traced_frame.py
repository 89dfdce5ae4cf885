"""What dynamo knows of the frame that it is tracing.

Functions that ask must be constants to dynamo (`answered_while_tracing`): dynamo calls them, and does not
trace them. They read the frame that calls them, because their arguments would have to be constants, too.
dynamo adds no guard for what they return, except for a `number` that may vary.

All of this is private to torch. Where a release has it in another form, the answer is the cautious one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter
from types import CodeType
from typing import Any, TypeVar

__all__ = ["answered_while_tracing", "frames", "number", "origin_of", "traced", "variable"]

AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])


def answered_while_tracing(function: AnyFunction) -> AnyFunction:
    """Let dynamo call ``function`` while it traces, and take the result as a constant."""
    # Same as torch.compiler.assume_constant_result, which imports dynamo.
    setattr(function, "_dynamo_marked_constant", True)  # noqa: B010 - mypy knows no such attribute
    return function


def variable(name: str) -> Any:
    """Return dynamo's variable of a local name; None if there is none."""
    local = traced("symbolic_locals", default={}).get(name)
    return None if local is None else local.realize()


def number(name: str) -> Any:
    """Return the value of a local name that holds a number or None. If it may vary, this adds a guard."""
    value = variable(name)
    symbol = getattr(value, "sym_num", None)
    return value.as_python_constant() if symbol is None else symbol.node.pytype(symbol)


def frames() -> Iterator[tuple[CodeType, Mapping[str, Any]]]:
    """Yield the code and the globals of the traced functions, from the inside."""
    translator = traced("output.current_tx", default=None)
    while translator is not None:
        yield translator.f_code, translator.f_globals
        translator = getattr(translator, "parent", None)


def origin_of(code: CodeType) -> CodeType:
    """Return the code that dynamo made ``code`` of: for a compiled frame, or to go on after a graph break."""
    dynamo = sys.modules.get("torch._dynamo.resume_execution")
    if dynamo is None:
        return code
    pieces = getattr(getattr(dynamo, "ContinueExecutionCache", None), "generated_code_metadata", {})
    compiled = getattr(sys.modules.get("torch._dynamo.utils"), "orig_code_map", {})
    while (origin := compiled.get(code) or getattr(pieces.get(code), "code", None)) is not None:
        code = origin
    return code


def traced(names: str, *, default: object) -> Any:
    """Return an attribute of the frame's translator; ``default`` if this torch has no such one."""
    # Imported here, they are in use already; processes that do not compile load none.
    try:
        from torch._dynamo.symbolic_convert import InstructionTranslator

        return attrgetter(names)(InstructionTranslator.current_tx().output.current_tx)
    except (AttributeError, ImportError):
        return default
