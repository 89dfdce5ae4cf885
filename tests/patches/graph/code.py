"""Helpers that turn code into a form, and that execute the same code."""

import ast
import textwrap
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.graph import Form, Scope, canonical, digest
from veomni_hook.patches.reasons import Reason

HEADER = """
import torch
from torch import nn
import torch.nn.functional as F
from transformers.activations import ACT2FN
"""


def module(text: str, header: str = HEADER) -> ast.Module:
    return ast.parse(header + textwrap.dedent(text))


def last_function(tree: ast.Module) -> FunctionNode:
    found = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    return found[-1]


def outcome(text: str, header: str = HEADER) -> Form | Reason:
    """The form of the last function."""
    tree = module(text, header)
    return canonical(last_function(tree), Scope(tree))


def method_outcome(text: str, owner: str = "M", name: str = "forward") -> Form | Reason:
    """The form of a method."""
    scope = Scope(module(text))
    members = {
        member.name: member for member in scope.classes[owner].body if isinstance(member, ast.FunctionDef)
    }
    return canonical(members[name], scope, scope.classes[owner])


def form(text: str, header: str = HEADER) -> Form:
    found = outcome(text, header)
    assert isinstance(found, Form), found
    return found


def method_form(text: str, owner: str = "M", name: str = "forward") -> Form:
    found = method_outcome(text, owner, name)
    assert isinstance(found, Form), found
    return found


def forward(body: str, arguments: str = "h") -> Form:
    """The form of a ``forward`` with this body."""
    return method_form(f"class M(nn.Module):\n    def forward(self, {arguments}):\n        {body}\n")


def unknown(text: str) -> str:
    """Why the last function has no form."""
    found = outcome(text)
    assert isinstance(found, Reason), found.result
    return found.removesuffix(f" (line {found.line})")


def executed(text: str, name: str | None = None) -> Callable[..., object]:
    """The last function, or the one with this name, executed by Python."""
    tree = module(text, "")
    space = {"torch": torch, "nn": nn, "F": functional}
    exec(compile(tree, "<code>", "exec"), space)
    found = space[name or last_function(tree).name]
    assert callable(found)
    return found


def one(expression: str, arguments: str = "x") -> str:
    """A function that returns one expression."""
    return f"def f({arguments}):\n    return {expression}\n"


def same(first: str, second: str) -> bool:
    """Whether two functions have one form."""
    return digest(form(first)) == digest(form(second))
