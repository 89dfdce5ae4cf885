"""A training step of Qwen3-8B's shapes beside its peers: `python -m benchmarks.qwen3_8b_step_gpu`.

4 layers, 4 x 4,096 tokens, bfloat16, forward and backward from no gradients, on one CUDA device; each side in
an interpreter of its own, in turn, with the same named attention backend. Times are medians; memory
is the peak above what stands before a step (the gradients count). The floor is the time of the step's matrix
products and attention alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

from benchmarks._record import RESULTS

SIDES = ("eager", "compile", "liger", "ours", "ours+compile", "floor")
LAYERS, HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 4, 4096, 12288, 32, 8, 128, 151_936
BATCH, LENGTH = 4, 4096
WARM, STEPS = 4, 12


def main() -> None:
    """Run every side in an interpreter of its own and record the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--attention", default="cudnn", choices=("cudnn", "flash"))
    parser.add_argument("--kernels", default="auto", help="what ours runs with")
    parser.add_argument("--sides", default="eager,compile,liger,ours,floor", help=f"of {', '.join(SIDES)}")
    options = parser.parse_args()
    if options.worker is not None:
        print(json.dumps(floor(options.attention) if options.worker == "floor" else side(options)))
        return
    found = {}
    for name in (side.strip() for side in options.sides.split(",")):
        command = [sys.executable, "-m", "benchmarks.qwen3_8b_step_gpu", "--worker", name]
        command += ["--attention", options.attention, "--kernels", options.kernels]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            print(f"{name:12} failed")
            continue
        found[name] = json.loads(done.stdout.splitlines()[-1])
        one = found[name]
        print(
            f"{name:12}{one['step_ms']:8.1f} ms",
            *(f"{k} {v}" for k, v in one.items() if k != "step_ms"),
            flush=True,
        )
    record(found, options)


def record(found: dict[str, dict[str, object]], options: argparse.Namespace) -> None:
    """Write what was measured to `results/`."""
    from veomni_hook.bench.record import circumstances, write

    target = RESULTS / f"qwen3_8b_step_gpu-{options.attention}.json"
    more = {"attention": options.attention, "kernels": options.kernels, "sides": found}
    write(circumstances("qwen3_8b_step_gpu", "cuda", **more), target)
    print(f"written: {target.relative_to(RESULTS.parent.parent)}")


def side(options: argparse.Namespace) -> dict[str, object]:
    """Train in this process."""
    if options.worker.startswith("ours"):
        from veomni_hook import activate

        activate(kernels=options.kernels)
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    if options.worker == "liger":
        from liger_kernel.transformers import apply_liger_kernel_to_qwen3

        apply_liger_kernel_to_qwen3()
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        tie_word_embeddings=False,
        attn_implementation="sdpa",
    )
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = Qwen3ForCausalLM(config).train()
    torch.set_default_dtype(torch.float32)
    ids = torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1)).cuda()
    run = torch.compile(model) if "compile" in options.worker else model

    def step() -> torch.Tensor:
        loss: torch.Tensor = run(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        return loss.detach()

    began = time.perf_counter()
    with attention(options.attention):
        first = step().item()
        warm = time.perf_counter() - began
        norm = torch.stack([p.grad.float().norm() for p in model.parameters()]).norm().item()
        model.zero_grad()
        taken, peak = measured(step, model.zero_grad)
    facts = {"step_ms": taken, "extra_gib": round(peak, 2), "loss": first, "gradient_norm": norm}
    return facts | {"first_step_s": round(warm, 1)}


def measured(step: Callable[[], object], clear: Callable[[], object]) -> tuple[float, float]:
    """The median milliseconds of a step, and the GiB that it needs above what stands before it."""
    import torch

    times = []
    for number in range(WARM + STEPS):
        clear()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        step()
        end.record()
        end.synchronize()
        if number >= WARM:
            times.append(start.elapsed_time(end))
    return statistics.median(times), (torch.cuda.max_memory_allocated() - before) / 2**30


def attention(name: str):
    """The context in which `scaled_dot_product_attention` takes one backend."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return sdpa_kernel(SDPBackend.CUDNN_ATTENTION if name == "cudnn" else SDPBackend.FLASH_ATTENTION)


def floor(name: str) -> dict[str, object]:
    """The matrix products of a step, each forward, for its input and for its weight, and the attention."""
    import torch

    tokens = BATCH * LENGTH
    sizes = [(HIDDEN, (HEADS + 2 * KV_HEADS) * HEAD_DIM), (HEADS * HEAD_DIM, HIDDEN)]
    sizes += [(HIDDEN, 2 * INTERMEDIATE), (INTERMEDIATE, HIDDEN)]
    made = [
        (
            torch.randn(tokens, i, device="cuda").bfloat16(),
            torch.randn(o, i, device="cuda").bfloat16() / i**0.5,
        )
        for i, o in [*sizes, (HIDDEN, VOCABULARY)]
    ]
    q, k, v = (
        torch.randn(BATCH, h, LENGTH, HEAD_DIM, device="cuda").bfloat16() for h in (HEADS, KV_HEADS, KV_HEADS)
    )
    for tensor in (q, k, v):
        tensor.requires_grad_()

    def products(x: torch.Tensor, weight: torch.Tensor) -> None:
        y = x @ weight.t()
        y @ weight
        y.t() @ x

    def step() -> None:
        for x, weight in made[:-1] * LAYERS:
            products(x, weight)
        for part in made[-1][0].split(2048):
            products(part, made[-1][1])
        for _ in range(LAYERS):
            y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            y.backward(y.detach())

    with attention(name):
        taken, _ = measured(step, lambda: None)
    return {"step_ms": taken}


if __name__ == "__main__":
    main()
