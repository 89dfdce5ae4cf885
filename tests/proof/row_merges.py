"""The prover of merged rows: bound calls and checks by their text, added rows by their results."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.proof.call_sites import definition
from tests.proof.compare import MODE, Differs, Run, agree, run
from tests.proof.provers import Proof, Unreached, slots_of, with_kernels


def prove_row_merge(site: Any, module: Any) -> Proof:
    """What a site changes is upstream's code with a slot or a check around it, or computes the same."""
    return _added(site, module) if site.part == "addition" else _said(site, module)


def _said(site: Any, module: Any) -> Proof:
    loader: Any = module.__spec__.loader
    upstream = edited = Path(loader.upstream).read_text(encoding="utf-8")
    for edit in sorted(site.edits, key=lambda edit: edit.start, reverse=True):
        edited = edited[: edit.start] + edit.text + edited[edit.end :]
    restored = _Restored()
    if ast.dump(restored.visit(ast.parse(edited))) != ast.dump(ast.parse(upstream)):
        raise Differs("what the site edits is not upstream's around its slots and checks")
    patched = _Restored()
    patched.visit(definition(ast.parse(Path(module.__file__).read_text(encoding="utf-8")), site.target))
    if not restored.count or patched.count < restored.count:
        raise Unreached("the patched module lacks a slot or a check")
    return Proof(gradients=0)


class _Restored(ast.NodeTransformer):
    """Puts upstream's calls back, and counts them."""

    def __init__(self) -> None:
        self.count = 0

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        called, given = ast.unparse(node.func), node.args
        if called == "veomni_row_merge_rows.call":
            method = [ast.unparse(each) for each in given[:2]]
            if method != ["self", "torch.Tensor.masked_scatter"]:
                return node
            self.count += 1
            return ast.Call(ast.Attribute(given[2], "masked_scatter", ast.Load()), given[3:], [])
        if called == "veomni_counts.selected":
            elements = ast.Subscript(given[0], given[1], ast.Load())
            return ast.Call(ast.Attribute(elements, "numel", ast.Load()), [], [])
        if called == "veomni_counts.check" and isinstance(given[2], ast.Lambda):
            names, values = given[2].args.args, given[2].args.defaults
            if [each.arg for each in names] != [ast.unparse(each) for each in values]:
                return node
            self.count += 1
            return ast.Call(given[0], [given[1], given[2].body], [])
        return node


def _added(site: Any, module: Any) -> Proof:
    name, _, method = site.target.rpartition(".")
    kind = getattr(module, name)
    owner = kind.__new__(kind)
    nn.Module.__init__(owner)
    (slot,) = (each for each in slots_of(module, site.op) if each.variant == site.variant)
    mask = torch.arange(12).view(2, 6) % 5 < 2
    count = 0
    for dtype in MODE.dtypes:
        rows = {
            "hidden": torch.randn(2, 6, 8, dtype=dtype),
            "source": torch.randn(int(mask.sum()), 8, dtype=dtype),
        }

        def step(rows: Any = rows) -> Run:
            return run(
                lambda hidden, source: getattr(owner, method)(hidden, mask.to(hidden.device), source), rows
            )

        theirs = with_kernels(f"{site.op}=eager", step)
        ours = with_kernels(f"{site.op}={MODE.kernels}", step)
        record = slot.record(owner)
        if record is None or record.latest.last.backend != MODE.kernels:
            raise Unreached("the guard found no kernel")
        agree(theirs, ours, exact=MODE.run is None, dtype=dtype)
        count += len(theirs.gradients)
    return Proof(gradients=count)
