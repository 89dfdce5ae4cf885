"""Gated activations, ours beside upstream, torch.compile and Liger: `python -m benchmarks.gated_mlp_gpu`.

Forward: two reads, one write; backward: three reads, two writes. "Fused" gates and ups are halves of the last
dimension of one projection.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch.nn import functional

from benchmarks._peers import Row, bandwidth, by_turns, host_time, record, wall_time
from benchmarks._steps import step
from veomni_hook.kernels.gated_mlp import triton as fused

Tensor = torch.Tensor
Gate = Callable[[Tensor, Tensor], Tensor]
SHAPES = ((16384, 12288), (65536, 3072), (16384, 11008), (8192, 28672), (4096, 4096))
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
}


def upstream(gate: Tensor, up: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
    """The middle of upstream's gated MLP."""
    return activation(gate) * up


def sides(name: str) -> dict[str, Gate]:
    """The implementations that this machine has."""
    eager = partial(upstream, activation=ACTIVATIONS[name])
    found: dict[str, Gate] = {"eager": eager, "compile": torch.compile(eager, dynamic=False)}
    try:
        from liger_kernel.ops.geglu import LigerGELUMulFunction
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction
    except ImportError:
        print("liger_kernel is not installed")
    else:
        found["liger"] = (LigerSiLUMulFunction if name == "silu" else LigerGELUMulFunction).apply
    return found | {"ours": partial(fused.product, activation=ACTIVATIONS[name])}


def main() -> None:
    """Measure every shape and record the results."""
    torch.manual_seed(0)
    copied = bandwidth()
    cases = [("silu", shape, "") for shape in SHAPES]
    cases += [("silu", SHAPES[0], " fused"), ("gelu_tanh", SHAPES[0], "")]
    rows = [row for case in cases for row in measured(*case, copied)]
    record(
        "gated_mlp_gpu",
        rows,
        copy_bytes_per_second=copied,
        host_milliseconds=steps(64, host_time),
        wall_milliseconds_4096_x_4096=steps(4096, wall_time),
    )


def steps(rows: int, timed: Callable[[Callable[[], object]], float]) -> dict[str, float]:
    """A forward and backward of ``rows`` x 4096 by every implementation."""
    found = {}
    for name, side in sides("silu").items():
        given = [torch.randn(rows, 4096, device="cuda").bfloat16() for _ in "gu"]
        found[name] = timed(partial(step, side, given, [torch.randn_like(given[0])]))
    print(f"{timed.__name__} of a forward and backward at {rows} x 4096, ms: {found}")
    return found


def measured(name: str, shape: tuple[int, int], kind: str, copied: float) -> Iterator[Row]:
    """Forward, backward and both at one size."""
    torch._dynamo.reset()
    rows, columns = shape
    calls, backwards = {}, {}
    for peer, side in sides(name).items():
        # Of its own: Liger's backward writes gradients over gate and up.
        gate, up = torch.randn(rows, 2 * columns, device="cuda").bfloat16().chunk(2, dim=-1)
        if not kind:
            gate, up = gate.contiguous(), up.contiguous()
        calls[peer] = partial(without_grad, side, gate, up)
        leaves = [x.detach().requires_grad_() for x in (gate, up)]
        y = side(*leaves)
        backwards[peer] = partial(torch.autograd.grad, y, leaves, torch.randn_like(y), retain_graph=True)
    size = f"{rows} x {columns}{kind}"
    one = rows * columns * 2
    both = {peer: 0.0 for peer in calls}
    for part, moved, found in (("forward", 3, calls), ("backward", 5, backwards)):
        times = by_turns(found)
        both = {peer: both[peer] + taken for peer, taken in times.items()}
        yield row(name, part, size, moved * one, times, copied)
    yield row(name, "forward + backward", size, 8 * one, both, copied)


def row(name: str, part: str, size: str, moving: int, times: dict[str, float], copied: float) -> Row:
    """One line of the table."""
    shares = {peer: moving / taken * 1e3 / copied for peer, taken in times.items()}
    return Row(name, part, "bfloat16", size, moving, times, shares)


def without_grad(side: Gate, gate: Tensor, up: Tensor) -> Tensor:
    """One forward that keeps nothing."""
    with torch.no_grad():
        return side(gate, up)


if __name__ == "__main__":
    main()
