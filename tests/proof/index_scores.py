"""The prover of index scores: the guard and upstream's statements under it, in a module of the class.

What is around them selects keys: its results are indices, which hardly depend on the last bits and have no
gradients. So only the statements that compute scores are run.
"""

from __future__ import annotations

import ast
from typing import Any

import torch
from torch import nn

from tests.proof.compare import MODE
from tests.proof.provers import Proof, Tally, Unreached, instances, slots_of, typed
from tests.proof.texts import patched
from veomni_hook.patches.code.tree import binding, blocks

_BATCH, _QUERIES, _KEYS, _WIDTH = 2, 3, 5, 8


def prove_index_scores(site: Any, module: Any) -> Proof:
    """Scores with kernels are those of upstream's statements, and so are the gradients of everything read."""
    method = patched(module, site.target)
    guarded = _guarded(method, site.slots[0].name)
    weights = site.captures["weights"]
    made = [each for block in blocks(method) for each in block if binding(each)[0] == weights]
    owner = next(instances(getattr(module, site.target.partition(".")[0])))
    code = ast.unparse(made[0]) if weights.isidentifier() else weights
    read = {node.id for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)} - {"self", weights}
    projected = [layer for name, layer in owner.named_modules() if f"self.{name}(" in code]
    if len(read) != 1 or len(projected) != 1 or not isinstance(projected[0], nn.Linear):
        raise Unreached(f"weights are no projection of one tensor: {code}")
    (states,), (linear,) = read, projected
    call = _function(made[:1] * weights.isidentifier() + guarded, site.captures, states, module)
    slots, tally = slots_of(module, site.op), Tally(site.variant)
    for held, dtype in MODE.mixed():
        counts = held is dtype or not tally.fits(dtype)
        inputs = {
            site.captures["query"]: torch.randn(_BATCH, _QUERIES, linear.out_features, _WIDTH),
            site.captures["key"]: torch.randn(_BATCH, _KEYS, _WIDTH),
            states: torch.randn(_BATCH, _QUERIES, linear.in_features),
        }
        tally.compare(slots, owner.to(held), call(owner), typed(inputs, dtype), dtype, inputs, counts=counts)
    return tally.proof()


def _guarded(function: ast.AST, slot: str) -> list[ast.stmt]:
    """The guard; with the statements after it where it has returned otherwise."""
    for block in blocks(function):
        for number, node in enumerate(block):
            if isinstance(node, ast.If) and f"{slot}.kernel(" in ast.unparse(node.test):
                if not node.orelse:
                    return block[number:]
                name, _ = binding(node.orelse[-1])
                return [node, ast.Return(ast.Name(name, ast.Load()))]
    raise Unreached("the patched module lacks the inserted code")


def _function(statements: list[ast.stmt], captures: Any, states: str, module: Any) -> Any:
    """The statements as a function of a module's instance, which returns one of the operands."""
    body = "\n".join(f"        {line}" for each in statements for line in ast.unparse(each).splitlines())
    names = ", ".join((captures["query"], captures["key"], states))
    scope = dict(vars(module))
    exec(f"def of(self):\n    def call({names}):\n{body}\n    return call\n", scope)
    return scope["of"]
