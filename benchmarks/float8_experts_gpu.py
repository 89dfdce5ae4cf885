"""One layer's experts in bfloat16 and in float8: `python -m benchmarks.float8_experts_gpu`.

On Blackwell also in MX.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch
from torch.nn.functional import silu

from benchmarks._record import RESULTS

#: Tokens, hidden size, inner size, experts, experts of a token: DeepSeek-V3's with 32 of its 256 experts,
#: Qwen3-30B-A3B's, Mixtral's. Few tokens show from which number of rows on casts pay.
SHAPES = [
    *((tokens, 7168, 2048, 32, 8) for tokens in (2048, 4096, 16384)),
    *((tokens, 2048, 768, 128, 8) for tokens in (8192, 16384, 65536)),
    (8192, 4096, 14336, 8, 2),
]
#: Sides take turns: whatever multiplies leaves the GPU at its power limit, and the next one begins there.
ROUNDS, STEPS, WARM = 3, 6, 2
BLACKWELL = (10, 0)


def main() -> None:
    """Measure and record."""
    from veomni_hook.tools.bench.record import circumstances, write

    rows = [measured(*shape) for shape in SHAPES]
    write(
        circumstances("float8_experts_gpu", "cuda", dtype="bfloat16", shapes=rows),
        RESULTS / "float8_experts_gpu-cuda.json",
    )


def measured(tokens: int, hidden: int, inner: int, experts: int, top_k: int) -> dict[str, Any]:
    """Return milliseconds and GiB of all sides, and how far apart results and gradients are, in norms."""
    from veomni_hook.kernels.moe_experts import triton

    torch.manual_seed(0)

    def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
        x = torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * scale
        return x.requires_grad_()

    x, up = random(tokens, hidden), random(experts, 2 * inner, hidden, scale=0.02)
    down = random(experts, hidden, inner, scale=0.02)
    shares, index = torch.randn(tokens, experts, device="cuda").softmax(-1).topk(top_k)
    weights = shares.bfloat16().requires_grad_()
    grad = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
    leaves = x, weights, up, down
    sides: dict[str, Any] = {}
    results: dict[str, list[torch.Tensor]] = {}
    kernels = {"bfloat16": triton.kernel("gated"), "float8": triton.in_float8("gated")}
    if torch.cuda.get_device_capability() >= BLACKWELL:
        kernels["mxfp8"] = triton.in_float8("gated", mx=True)
    times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in kernels}
    for name, run in ROUNDS * [*kernels.items()]:
        torch.cuda.reset_peak_memory_stats()
        before, (forward, both) = torch.cuda.memory_allocated(), times[name]
        for step in range(WARM + STEPS):
            for leaf in leaves:
                leaf.grad = None
            events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
            events[0].record()
            y = run(x, index, weights, up, down, silu)
            events[1].record()
            y.backward(grad)
            events[2].record()
            torch.cuda.synchronize()
            if step >= WARM:
                forward.append(events[0].elapsed_time(events[1]))
                both.append(events[0].elapsed_time(events[2]))
        peak = (torch.cuda.max_memory_allocated() - before) / 2**30
        results[name] = [y.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]
        sides[name] = {
            "forward_ms": round(statistics.median(forward), 3),
            "both_ms": round(statistics.median(both), 3),
            "peak_gib": round(peak, 2),
        }
    exact = results.pop("bfloat16")
    for name, cast in results.items():
        apart = (
            round(float((one.float() - other.float()).norm() / other.float().norm()), 4)
            for one, other in zip(cast, exact, strict=True)
        )
        sides[name]["apart"] = dict(zip(("y", "dx", "dw", "dup", "ddown"), apart, strict=True))
    shape = {"tokens": tokens, "hidden": hidden, "inner": inner, "experts": experts, "top_k": top_k}
    row = {**shape, "sides": sides}
    print(row, flush=True)
    return row


if __name__ == "__main__":
    main()
