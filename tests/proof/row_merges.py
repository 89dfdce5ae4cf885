"""The prover of rows that are added at a mask: by their results."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.proof.compare import MODE, Run, agree, run
from tests.proof.provers import Proof, Unreached, slots_of, with_kernels


def prove_added_rows(site: Any, module: Any) -> Proof:
    """Rows are added as upstream adds them."""
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
        record = slot.records.of(owner)
        if record is None or record.latest.last.backend != MODE.kernels:
            raise Unreached("the guard found no kernel")
        agree(theirs, ours, exact=MODE.run is None, dtype=dtype)
        count += len(theirs.gradients)
    return Proof(gradients=count)
