"""Does overlap of the exchange with projections pay? Two GPUs or more.

    torchrun --nproc_per_node 2 -m benchmarks.ulysses_overlap_gpu

A decoder layer of Qwen3-8B's shapes (attention and MLP, bfloat16, torch's flash attention), forward and
backward, whose sequence the processes share, in three forms: one exchange for q, k and v; an exchange for
each, started as soon as its projection is done, and in the backward in the same way (VeOmni's async
Ulysses); and without any exchange, which is the floor of both. Prints a row for each length, in milliseconds,
and writes them with `--out FILE`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed
from torch.nn import functional

HIDDEN, HEADS, KEYS, WIDTH, INNER = 4096, 32, 8, 128, 12288
LENGTHS = (8192, 12288, 16384, 24576, 32768)
ROUNDS, CALLS = 25, 4


def blocks(x: Tensor, size: int) -> Tensor:
    """``[part, heads, width]`` as ``[size, part, heads / size, width]``: a block for each process."""
    part, heads, width = x.shape
    return x.view(part, size, heads // size, width).transpose(0, 1).contiguous()


def start(send: Tensor) -> tuple[Tensor, Any]:
    """Begin an exchange of blocks: what is received, and the work to wait for."""
    received = torch.empty_like(send)
    return received, distributed.all_to_all_single(received, send, async_op=True)


class _Exchanged(torch.autograd.Function):
    """Positions for heads, or back, at once."""

    @staticmethod
    def forward(ctx: Any, send: Tensor) -> Tensor:
        received, work = start(send)
        work.wait()
        return received

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        received, work = start(grad.contiguous())
        work.wait()
        return received


class _Projected(torch.autograd.Function):
    """Three projections, each exchanged while the next is computed; the gradients likewise."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        size = distributed.get_world_size()
        projected = ((x @ weight.t()).view(len(x), -1, WIDTH) for weight in weights)
        begun = [start(blocks(one, size)) for one in projected]
        for _, work in begun:
            work.wait()
        ctx.save_for_backward(x, *weights)
        return tuple(received for received, _ in begun)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        x, *weights = ctx.saved_tensors
        begun = [start(grad.contiguous()) for grad in grads]
        to_x, to_weights = torch.zeros_like(x), []
        for weight, (received, work) in zip(weights, begun, strict=True):
            work.wait()
            grad = received.transpose(0, 1).reshape(len(x), -1)
            to_x.addmm_(grad, weight)
            to_weights.append(grad.t() @ x)
        return to_x, *to_weights


class _Out(torch.autograd.Function):
    """The output's exchange and projection; the exchange of its gradient overlaps that of the weight."""

    @staticmethod
    def forward(ctx: Any, send: Tensor, weight: Tensor) -> Tensor:
        received, work = start(send)
        work.wait()
        rows = received.transpose(0, 1).reshape(send.shape[1], -1)
        ctx.save_for_backward(rows, weight)
        return rows @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        rows, weight = ctx.saved_tensors
        to_rows = (grad @ weight).view(len(rows), -1, WIDTH)
        received, work = start(blocks(to_rows, distributed.get_world_size()))
        to_weight = grad.t() @ rows
        work.wait()
        return received, to_weight


def layer(form: str, x: Tensor, weights: dict[str, Tensor]) -> Tensor:
    """The layer in one of the three forms."""
    size = distributed.get_world_size()
    q, k, v = (weights[name] for name in ("q", "k", "v"))
    if form == "overlapped":
        heads = _Projected.apply(x, q, k, v)
    else:
        projected = [(x @ weight.t()).view(len(x), -1, WIDTH) for weight in (q, k, v)]
        counts = [one.shape[1] // size for one in projected]
        send = torch.cat([blocks(one, size) for one in projected], 2)
        received = _Exchanged.apply(send) if form == "one exchange" else send
        heads = received.split(counts, 2)
    query, key, value = (one.flatten(0, 1).transpose(0, 1)[None] for one in heads)
    output = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    send = output[0].transpose(0, 1).reshape(size, len(x), HEADS // size, WIDTH)
    if form == "overlapped":
        attended = _Out.apply(send.contiguous(), weights["o"])
    else:
        back = _Exchanged.apply(send.contiguous()) if form == "one exchange" else send
        attended = back.transpose(0, 1).reshape(len(x), -1) @ weights["o"].t()
    x = x + attended
    gate, up = (x @ weights["up"].t()).chunk(2, -1)
    return x + (functional.silu(gate) * up) @ weights["down"].t()


def step(form: str, x: Tensor, weights: dict[str, Tensor], grad: Tensor) -> None:
    """Forward and backward."""
    torch.autograd.backward(layer(form, x, weights), grad)


def measured(call: Callable[[], None]) -> float:
    """Milliseconds of a call."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    distributed.barrier()
    events[0].record()
    for _ in range(CALLS):
        call()
    events[1].record()
    torch.cuda.synchronize()
    return events[0].elapsed_time(events[1]) / CALLS


def main() -> None:
    """Print the rows; all forms take turns in each round."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    distributed.init_process_group("nccl")
    torch.manual_seed(distributed.get_rank())
    shapes = {"q": (HEADS * WIDTH, HIDDEN), "k": (KEYS * WIDTH, HIDDEN), "v": (KEYS * WIDTH, HIDDEN)}
    shapes |= {"o": (HIDDEN, HEADS * WIDTH), "up": (2 * INNER, HIDDEN), "down": (HIDDEN, INNER)}
    weights = {
        name: (torch.randn(shape, device="cuda", dtype=torch.bfloat16) * 0.02).requires_grad_()
        for name, shape in shapes.items()
    }
    rows = []
    for length in LENGTHS:
        part = length // distributed.get_world_size()
        x = torch.randn(part, HIDDEN, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        grad = torch.randn_like(x)
        forms = ("one exchange", "overlapped", "no exchange")
        times: dict[str, list[float]] = {form: [] for form in forms}
        for form in forms[:2]:  # both compute the same
            x.grad = None
            step(form, x, weights, grad)
            if form == forms[0]:
                expected = x.grad.clone()
            elif (off := ((x.grad - expected).abs().max() / expected.abs().max()).item()) > 2e-2:
                raise SystemExit(f"overlapped is off by {off}")
        for round_ in range(ROUNDS + 2):
            for form in forms:
                time = measured(partial(step, form, x, weights, grad))
                if round_ > 1:
                    times[form].append(time)
        row = {"tokens": length, **{form: round(statistics.median(t), 3) for form, t in times.items()}}
        row["overlapped / one exchange"] = round(row["overlapped"] / row["one exchange"], 4)
        rows.append(row)
        if distributed.get_rank() == 0:
            print(row, flush=True)
    if distributed.get_rank() == 0 and chosen.out:
        name = torch.cuda.get_device_name()
        device = f"{distributed.get_world_size()} x {name}"
        facts = {"device": device, "torch": torch.__version__, "rows": rows}
        chosen.out.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
