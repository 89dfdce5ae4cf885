"""A training step of one model beside its peers: every side in an interpreter of its own, in turn.

A script names a `Case` and calls `main`. 4 x 4,096 tokens, bfloat16, forward and backward from no gradients,
on one CUDA device, all with the same named attention backend. Times are medians; memory is the peak above
what stands before a step (the gradients count). The floor is the time of the step's matrix products and
attention alone. With ``+float8`` all linear layers but the head are torchao's, with a scale for each row; the
floor then has operands that are float8 already. ``+precision`` is our setting ``precision=float8``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from benchmarks._record import RESULTS

SIDES = (
    *("eager", "compile", "liger", "ours", "ours+compile", "floor"),
    *("compile+float8", "ours+float8", "ours+compile+float8", "floor+float8"),
    *("ours+precision", "ours+compile+precision"),
)
BATCH, LENGTH = 4, 4096
WARM, STEPS, LAYERS = 4, 12, 4


class Case(NamedTuple):
    """What is trained.

    Attributes:
        name: of the script.
        description: of its ``--help``.
        model: builds it with so many layers, on the default device and in the default dtype; called where
            upstream or a side has been imported.
        liger: the name of Liger's function for the family.
        floor: the products of a layer, as (rows, inner, columns), each forward, for its input and for its
            weight.
        head: those of the head, and how many.
        heads: of queries, of keys, and their width.
        vocabulary: of the ids.
        environment: of the sides, by name, beside that of the caller.
    """

    name: str
    description: str
    model: Callable[[int], Any]
    liger: str
    floor: Sequence[tuple[int, int, int]]
    head: tuple[int, int, int, int]
    heads: tuple[int, int, int]
    vocabulary: int
    environment: dict[str, dict[str, str]]


def main(case: Case) -> None:
    """Run every side in an interpreter of its own and record the results."""
    parser = argparse.ArgumentParser(description=case.description)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--attention", default="cudnn", choices=("cudnn", "flash"))
    parser.add_argument("--kernels", default="auto", help="what ours runs with")
    parser.add_argument("--sides", default="eager,compile,liger,ours,floor", help=f"of {', '.join(SIDES)}")
    parser.add_argument("--layers", type=int, default=LAYERS)
    options = parser.parse_args()
    if options.worker is not None:
        measure = floor if options.worker.startswith("floor") else side
        print(json.dumps(measure(case, options)))
        return
    found = {}
    for name in (side.strip() for side in options.sides.split(",")):
        command = [sys.executable, "-m", f"benchmarks.{case.name}", "--worker", name]
        command += ["--attention", options.attention, "--kernels", options.kernels]
        command += ["--layers", str(options.layers)]
        environment = os.environ | case.environment.get(name, {})
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, env=environment)
        if done.returncode:
            print(f"{name:12} failed", flush=True)
            continue
        found[name] = json.loads(done.stdout.splitlines()[-1])
        one = found[name]
        print(
            f"{name:12}{one['step_ms']:8.1f} ms",
            *(f"{k} {v}" for k, v in one.items() if k != "step_ms"),
            flush=True,
        )
    record(case, found, options)


def record(case: Case, found: dict[str, dict[str, object]], options: argparse.Namespace) -> None:
    """Write what was measured to `results/`."""
    from veomni_hook.tools.bench.record import circumstances, write

    depth = "" if options.layers == LAYERS else f"-{options.layers}_layers"
    target = RESULTS / f"{case.name}-{options.attention}{depth}.json"
    more = {"attention": options.attention, "kernels": options.kernels, "layers": options.layers}
    more["sides"] = found
    if case.environment:
        more["environment"] = case.environment
    write(circumstances(case.name, "cuda", **more), target)
    print(f"written: {target.relative_to(RESULTS.parent.parent)}")


def side(case: Case, options: argparse.Namespace) -> dict[str, object]:
    """Train in this process."""
    if options.worker.startswith("ours"):
        from veomni_hook import activate

        activate(kernels=options.kernels, precision="float8" if "precision" in options.worker else "none")
    import torch

    if options.worker == "liger":
        import liger_kernel.transformers

        getattr(liger_kernel.transformers, case.liger)()
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = case.model(options.layers).train()
    torch.set_default_dtype(torch.float32)
    ids = torch.randint(
        0, case.vocabulary, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1)
    ).cuda()
    if options.worker.endswith("float8"):
        in_float8(model)
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


def in_float8(model: Any) -> None:
    """Let torchao compute all linear layers in float8, but for the head."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    head = model.get_output_embeddings()
    convert_to_float8_training(
        model,
        config=Float8LinearConfig.from_recipe_name("rowwise"),
        module_filter_fn=lambda module, name: module is not head,
    )


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


def floor(case: Case, options: argparse.Namespace) -> dict[str, object]:
    """The matrix products of a step, each forward, for its input and for its weight, and the attention."""
    import torch

    made = [
        (
            torch.randn(rows, inner, device="cuda").bfloat16(),
            torch.randn(columns, inner, device="cuda").bfloat16() / inner**0.5,
            number,
        )
        for rows, inner, columns, number in (*((*sizes, options.layers) for sizes in case.floor), case.head)
    ]
    heads, kv_heads, width = case.heads
    q, k, v = (
        torch.randn(BATCH, each, LENGTH, width, device="cuda").bfloat16()
        for each in (heads, kv_heads, kv_heads)
    )
    for tensor in (q, k, v):
        tensor.requires_grad_()

    products = [(products_of(x, weight, options.worker, case), number) for x, weight, number in made]

    def step() -> None:
        for multiply, number in products:
            for _ in range(number):
                multiply()
        for _ in range(options.layers):
            y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            y.backward(y.detach())

    with attention(options.attention):
        taken, _ = measured(step, lambda: None)
    return {"step_ms": taken}


def products_of(x: Any, weight: Any, worker: str, case: Case) -> Callable[[], None]:
    """A function that multiplies: forward, for the input ``[rows, inner]``, for the weight."""
    import torch

    if not worker.endswith("float8") or weight.shape[0] == case.vocabulary:

        def in_bfloat16() -> None:
            y = x @ weight.t()
            y @ weight
            y.t() @ x

        return in_bfloat16

    def rows(operand: Any) -> tuple[Any, Any]:
        scale = operand.abs().amax(1, keepdim=True).float() / torch.finfo(torch.float8_e4m3fn).max
        return (operand / scale).to(torch.float8_e4m3fn).contiguous(), scale

    y = x @ weight.t()
    pairs = [(rows(a), rows(b)) for a, b in ((x, weight), (y, weight.t()), (y.t(), x.t()))]

    def in_float8_rows() -> None:
        for (a, scales_a), (b, scales_b) in pairs:
            torch._scaled_mm(a, b.t(), scales_a, scales_b.t(), out_dtype=torch.bfloat16, use_fast_accum=True)

    return in_float8_rows
