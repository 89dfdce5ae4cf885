"""The prover of hyper-connections: their classes on streams, and each mixture against the op's formula."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from tests.proof.compare import Differs
from tests.proof.inputs import Inputs, positional
from tests.proof.provers import Proof, Unreached, class_prover
from tests.proof.texts import definition, patched, upstream_of
from veomni_hook.kernels.hyper_connection import reference


def prove_hyper_connection(site: Any, module: Any) -> Proof:
    """A class computes the same with kernels; a mixture's operands are those of upstream's expression."""
    return _prove_mixtures(site, module) if site.variant == "mix" else class_prover(_streams)(site, module)


def _streams(owner: nn.Module, method: str) -> Iterator[Inputs]:
    """Streams of every number that divides the columns of the module's matrix."""
    (first,) = positional(owner, method)
    columns = max(p.shape[-1] for p in owner.parameters() if p.dim() == 2)
    for streams in range(1, columns):
        if columns % streams == 0:
            yield {first.name: torch.randn(2, 3, streams, columns // streams)}


def _prove_mixtures(site: Any, module: Any) -> Proof:
    found = [
        node
        for node in ast.walk(patched(module, site.target))
        if isinstance(node, ast.IfExp) and "veomni_hyper_connection_mix.kernel(" in ast.unparse(node.test)
    ]
    if not found:
        raise Unreached("the patched module lacks the inserted code")
    upstream = ast.unparse(definition(ast.parse(upstream_of(module)), site.target))
    errors = {}
    for number, node in enumerate(found):
        assert isinstance(node.body, ast.Call)
        names = [ast.unparse(argument) for argument in node.body.args]
        code = ast.unparse(node.orelse)
        if code not in upstream:
            raise Differs(f"not upstream's: {code}")
        torch.manual_seed(0)
        shapes = (2, 3, 4), (2, 3, 4, 4), (2, 3, 8), (2, 3, 4, 8)
        given = [torch.randn(shape, requires_grad=True) for shape in shapes]
        scope = {**dict(zip(names, [*given, torch.float32], strict=True)), "torch": torch}
        results = [eval(code, scope), reference.mix(*given, torch.float32)]
        pairs = [(result, *torch.autograd.grad(result.square().sum(), given)) for result in results]
        for place, (want, one) in enumerate(zip(*pairs, strict=True)):
            errors[f"{number}.{place}"] = (want - one).abs().max().item()
            if errors[f"{number}.{place}"] > 1e-5:
                raise Differs(f"mixture {number}: difference {errors[f'{number}.{place}']:.2e}")
    return Proof(4 * len(found), errors)
