"""The prover of residual additions and their norms: the guard's own statements, without the layer around them."""

from __future__ import annotations

import ast
import builtins
import inspect
import textwrap
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from tests.proof.build import build, randomise
from tests.proof.compare import MODE
from tests.proof.configs import HIDDEN
from tests.proof.inputs import Inputs
from tests.proof.provers import Proof, Tally, Unreached, slots_of, typed
from veomni_hook.patches.code.scope import bound_names, loaded
from veomni_hook.patches.routes.compose import copy_name

RESULTS = "results"


def prove_addition(site: Any, module: Any) -> Proof:
    """Prove every guard of a method, over dtypes, shapes and strides: all names that upstream's lines bind."""
    cls = getattr(module, site.target.partition(".")[0])
    copy = getattr(module, copy_name(site.target), None)
    if copy is None:
        raise Unreached("its method has no copy")
    source = inspect.getsource(copy)
    guards = [node for node in ast.walk(ast.parse(textwrap.dedent(source))) if _asks(node, site.op)]
    if not guards:
        raise Unreached("no guard stands in it")
    slots, tally = slots_of(module, site.op), Tally(site.variant)
    for guard in guards:
        assert isinstance(guard, ast.If)
        owner, call, names = _alone(guard, cls, module)
        width = max(parameter.numel() for parameter in owner.parameters())  # the norm's weight
        for (held, dtype), inputs in (
            (mixed, given) for mixed in MODE.mixed() for given in _inputs(names, width)
        ):
            owner.to(held)
            tally.compare(slots, owner, call, typed(inputs, dtype), dtype, names, counts=held is dtype)
    return tally.proof()


def _asks(node: ast.AST, op: str) -> bool:
    if not isinstance(node, ast.If):
        return False
    names = (each.id for each in ast.walk(node.test) if isinstance(each, ast.Name))
    return any(name.startswith(f"veomni_{op}_") for name in names)


class _Sum(nn.Module):
    """In place of another part of the layer."""

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        return sum(tensors[1:], tensors[0])


def _alone(guard: ast.If, cls: type[nn.Module], module: Any) -> tuple[nn.Module, Any, list[str]]:
    """A layer with nothing but its norm, a function of the guard alone, and the tensors that it reads."""
    asked = next(node for node in ast.walk(guard.test) if isinstance(node, ast.Call)).args
    norm = next(each for each in asked if isinstance(each, ast.NamedExpr))
    assert isinstance(norm.value, ast.Attribute)
    owner = cls.__new__(cls)
    nn.Module.__init__(owner)
    if isinstance(asked[-1], ast.Name):
        setattr(owner, norm.value.attr, build(getattr(module, asked[-1].id)))
    else:  # torch's own class
        setattr(owner, norm.value.attr, randomise(nn.LayerNorm(HIDDEN)))
    for node in ast.walk(guard):
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "self":
            called = any(isinstance(each, ast.Call) and each.func is node for each in ast.walk(guard))
            indexed = any(isinstance(each, ast.Subscript) and each.value is node for each in ast.walk(guard))
            if not hasattr(owner, node.attr):
                weight = nn.Parameter(torch.full((2,), 0.5) if indexed else torch.tensor(0.5))
                setattr(owner, node.attr, _Sum() if called else weight)
    names = list(_read(guard, module))
    # Both ways bind what upstream's lines bind, as far as others read it.
    bound = sorted(bound_names(guard.orelse) & bound_names(guard.body))
    results = ", ".join(f"{name!r}: {name}" for name in bound)
    text = f"def {RESULTS}(self, {', '.join(names)}):\n{textwrap.indent(ast.unparse(guard), '    ')}\n"
    scope = dict(vars(module))
    exec(f"{text}    return {{{results}}}", scope)
    return owner, partial(scope[RESULTS], owner), names


def _read(guard: ast.If, module: Any) -> Iterator[str]:
    """The locals that upstream's lines read before they bind them."""
    known = {"self", *vars(module), *vars(builtins)}
    for statement in guard.orelse:
        for name in dict.fromkeys(loaded([statement])):
            if name not in known:
                known.add(name)
                yield name
        known |= bound_names([statement])


def _inputs(names: list[str], width: int) -> Iterator[Inputs]:
    for shape in ((2, 3, width), (5, width), (3, 2, width)):
        given = {name: torch.randn(shape) * 2 for name in sorted(names)}
        if shape[0] == 3:  # a view whose rows are not next to each other
            given = {name: value.transpose(0, 1) for name, value in given.items()}
        yield given
