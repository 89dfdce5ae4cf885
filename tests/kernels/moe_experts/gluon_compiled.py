"""Compiles Gluon's kernels for a Hopper GPU that is not there; prints JSON, a line a kernel.

`python -m tests.kernels.moe_experts.gluon_compiled few` compiles the usual ones, `all` every kind.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
from typing import Any

# Before triton is imported: functions are compiled or interpreted from then on. And no GPU that is there.
os.environ.pop("TRITON_INTERPRET", None)
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import torch
import triton
from triton.runtime.jit import JITFunction

import veomni_hook.kernels.moe_experts.triton  # noqa: F401 - `pretend` answers for what is imported
from tests.kernels.absent_gpu.gpu import GPUS, pretend
from veomni_hook.kernels.gated_mlp.triton import ACTIVATIONS
from veomni_hook.kernels.moe_experts import gluon_products
from veomni_hook.kernels.moe_experts.triton_routing import numbers_of, routing_of

EXPERTS, TOKENS, TOP_K = 16, 512, 4


def spilled(ptx: str) -> int:
    """Bytes of registers that a thread stores, as the assembler says."""
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as source:
        source.write(ptx)
        source.flush()
        path = triton.knobs.nvidia.ptxas.path
        command = [path, "-v", "--gpu-name=sm_90a", "-o", os.devnull, source.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    (bytes_,) = {
        int(line.split(" bytes spill stores")[0].split()[-1]) for line in said.splitlines() if "spill" in line
    }
    return bytes_


def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def routing() -> Any:
    numbers = zeros(numbers_of(TOKENS * TOP_K, EXPERTS), dtype=torch.int32)
    return routing_of(numbers, zeros(TOKENS, TOP_K, dtype=torch.int64), EXPERTS, 128, TOKENS * TOP_K)


def weight_gradient(a: int, b: int, dtype: torch.dtype, *, swapped: bool) -> None:
    rows, wide = zeros(TOKENS, a, dtype=dtype), zeros(TOKENS * TOP_K, b, dtype=dtype)
    operands = (wide, rows) if swapped else (rows, wide)
    out = zeros(EXPERTS, operands[0].shape[1], operands[1].shape[1], dtype=dtype)
    gluon_products.weight_gradient(*operands, out, routing(), (not swapped, swapped))


def gate_up_backward(form: int, activation: str, *, transposed: bool = True) -> None:
    hidden, inner, pairs = 512, 704, TOKENS * TOP_K
    paired = 0 if form == 4 else 1
    products = zeros(pairs, inner * (1 + paired))
    gluon_products.gate_up_backward(
        zeros(TOKENS, hidden),
        zeros(EXPERTS, *((hidden, inner) if transposed else (inner, hidden))),
        products, products, zeros(pairs, inner), zeros(3, pairs, dtype=torch.float32),
        routing(), zeros(TOKENS, TOP_K), form=form, activation=ACTIVATIONS[activation],
        paired=paired, transposed=transposed,
    )  # fmt: skip


def main(every: bool) -> None:
    kernels: list[Any] = []
    pretend(GPUS["sm90"])
    run = JITFunction.run

    def kept(self: Any, *operands: Any, **options: Any) -> Any:
        kernels.append(run(self, *operands, **options))
        return kernels[-1]

    JITFunction.run = kept
    bf16, f16 = torch.bfloat16, torch.float16
    weight_gradient(512, 768, bf16, swapped=False)
    weight_gradient(512, 1536, bf16, swapped=True)
    gate_up_backward(0, "silu")
    if every:
        for dtype, swapped in itertools.product((bf16, f16), (False, True)):
            weight_gradient(144, 272, dtype, swapped=swapped)
        for activation in ACTIVATIONS:
            gate_up_backward(0, activation)
            gate_up_backward(4, activation, transposed=False)
        gate_up_backward(0, "silu", transposed=False)
    for kernel in kernels:
        ptx = kernel.asm["ptx"]
        line = {"name": kernel.name, "shared": kernel.metadata.shared, "spilled": spilled(ptx)}
        print(json.dumps(line | {"wgmma": ptx.count("wgmma.mma_async")}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1] == "all")
