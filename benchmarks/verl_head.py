"""verl's fused head (``FusedLinearForPPO``), its own function and ours: forward and backward on a GPU.

    VEOMNI_HOOK=0 python -m benchmarks.verl_head    # verl's
    python -m benchmarks.verl_head                  # with the hook

16,384 tokens, bfloat16; time is the shortest of five steps after the first, memory the peak above what was
held before. A row of JSON a shape; `results/verl_head-cuda.json` holds the rows of both. Needs verl.
"""

from __future__ import annotations

import json
import time

import torch

import veomni_hook.install  # noqa: F401 - before verl

# isort: split
from verl.utils.experimental.torch_functional import FusedLinearForPPO

ROWS = 16_384
SHAPES = ((4096, 151_936), (2048, 151_936), (4096, 32_000))

for hidden, vocabulary in SHAPES:
    torch.manual_seed(0)
    states = torch.randn(1, ROWS, hidden, device="cuda", dtype=torch.bfloat16).requires_grad_()
    weight = torch.randn(vocabulary, hidden, device="cuda", dtype=torch.bfloat16) / hidden**0.5
    weight.requires_grad_()
    tokens = torch.randint(0, vocabulary, (1, ROWS), device="cuda")
    head, times = FusedLinearForPPO(chunk_size=512), []
    for _ in range(6):
        states.grad = weight.grad = None
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
        held, start = torch.cuda.memory_allocated(), time.perf_counter()
        log_probs, entropy = head(states, weight, tokens, 0.9)
        (log_probs.sum() + 0.01 * entropy.float().sum()).backward()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    row = {
        "hidden": hidden,
        "vocabulary": vocabulary,
        "ms": round(min(times[1:]) * 1e3, 1),
        "peak_gib": round((torch.cuda.max_memory_allocated() - held) / 2**30, 2),
        "log_probs": log_probs.sum().item(),
        "entropy": entropy.float().sum().item(),
        "weight_gradient": weight.grad.float().norm().item(),
    }
    print(json.dumps(row), flush=True)
