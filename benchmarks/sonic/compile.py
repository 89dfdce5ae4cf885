"""SonicMoE's kernels, compiled for an H200 on a machine without a GPU; `build.sh` runs it.

The block of veomni_hook/kernels/moe_experts/bench.py runs on fake tensors, forward and backward. sonic-moe's
operators run their own bodies. Where these would launch a kernel, it is compiled: QuACK's matrix products in
every configuration that their autotuner would try, and Triton's kernels as they are called. Both end in the
caches that the environment names, under the keys that the machine with the GPU looks for.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from shutil import copyfile
from types import SimpleNamespace
from typing import Any

import torch
import triton
from cutlass.base_dsl.compiler import Compiler
from quack import cache_utils, gemm_interface
from quack.gemm import _compile_gemm
from quack.rounding import RoundingMode
from sonicmoe import functional
from sonicmoe.enums import ActivationType
from sonicmoe.functional import backward, forward
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.backends.compiler import GPUTarget
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction

# Tokens, hidden size, inner size, experts, experts of a token: `_BLOCKS` of
# veomni_hook/kernels/moe_experts/bench.py, which cannot be imported where only this is installed.
BLOCKS = ((16384, 2048, 768, 128, 8), (8192, 4096, 1536, 64, 6))
OPERATORS = (
    forward._router_forward,
    forward._up_projection_forward,
    forward._down_projection_forward,
    backward._up_projection_backward_act,
    backward._up_projection_backward_weight,
    backward._down_projection_backward_act,
    backward._down_projection_backward_weight,
    backward._token_broadcast_backward,
    backward._topk_softmax_bwd,
    functional.TC_topk_router_metadata_triton,
)
STARTED = time.perf_counter()


def main() -> None:
    """Fill both caches; what they have already is not compiled again."""
    keys = replace_quack()
    replace_triton()
    for operator in OPERATORS:
        operator.register_fake(operator._init_fn)
    for sizes in BLOCKS:
        run_block(*sizes)
    copy_roundings(keys)


def replace_quack() -> dict[str, tuple[Any, ...]]:
    """Have QuACK compile without launching; return the keys of its cache by hash, filled as it compiles."""
    # It calls cuInit before the first kernel. Nothing after it needs a driver.
    Compiler._check_cuda_dependencies_once = lambda self, libraries: None
    cache_utils.COMPILE_ONLY = True
    gemm_interface._precompile_default_config = compile_configurations
    keys: dict[str, tuple[Any, ...]] = {}
    hashed: Callable[[tuple[Any, ...]], str] = cache_utils._key_to_hash

    def recorded(key: tuple[Any, ...]) -> str:
        name = hashed(key)
        keys[name] = key
        return name

    cache_utils._key_to_hash = recorded
    return keys


def compile_configurations(product: Any, *args: Any, **kwargs: Any) -> None:
    """Compile every configuration that the autotuner of a product would try.

    It takes the place of QuACK's function that compiles the default one, and swallows every error.
    """
    started = time.perf_counter()
    named = dict(zip(product.arg_names, args, strict=False)) | kwargs
    # The two that the product does not take as its operator does.
    assert named.pop("sr_seed_tensor", None) is None
    if isinstance(named.get("concat_layout"), str):
        named["concat_layout"] = tuple(named["concat_layout"].split(","))
    # The pruning reads them there.
    product.nargs = named
    configurations = product.prune_configs({})
    for one in configurations:
        product.fn(**named | {"config": one.kwargs["config"]})
    report(f"QuACK {product.fn.__name__}, {len(configurations)} configurations", started)


def replace_triton() -> None:
    """Have Triton compile for sm_90 without launching."""
    triton.runtime.driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: GPUTarget("cuda", 90, 32),
            get_current_device=lambda: 0,
            get_current_stream=lambda device: 0,
        )
    )
    launch = JITFunction.run

    def compile_kernel(kernel: Any, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> Any:
        if warmup:
            return launch(kernel, *args, grid=grid, warmup=True, **kwargs)
        started = time.perf_counter()
        assert not any(isinstance(value, torch.Tensor) for value in kwargs.values())
        # A dtype stands for a tensor whose address is a multiple of 16, as those of the allocator are.
        dtypes = [value.dtype if isinstance(value, torch.Tensor) else value for value in args]
        found = kernel.warmup(*dtypes, grid=grid, **kwargs)
        name = (getattr(kernel, "base_fn", None) or kernel.fn).__name__
        count = len(found) if isinstance(found, list) else 1
        return report(f"Triton {name}, {count} configurations", started)

    JITFunction.run = compile_kernel
    # Its warm-up compiles every configuration, by the warm-up of the function above.
    Autotuner.run = compile_kernel


def run_block(tokens: int, hidden: int, inner: int, experts: int, top_k: int) -> None:
    """Call a router and experts as `sonic_block` there does, with gradients and without."""
    with FakeTensorMode():
        shapes = ((tokens, hidden), (experts, hidden), (experts, 2 * inner, hidden), (experts, hidden, inner))
        leaves = [torch.empty(shape, dtype=torch.bfloat16).requires_grad_() for shape in shapes]
        x, router, up, down = leaves
        weights = up.permute(1, 2, 0), None, down.permute(1, 2, 0), None
        call = (x, router, *weights, top_k, 0, ActivationType.SWIGLU)
        y = functional.moe_TC_softmax_topk_layer(*call, False, concat_layout=True)[0]
        y.backward(torch.empty_like(y))
        # A missing one would mean that kernels of the backward are missing too.
        assert all(leaf.grad is not None and leaf.grad.shape == leaf.shape for leaf in leaves)
        with torch.no_grad():
            functional.moe_TC_softmax_topk_layer(*call, True, concat_layout=True)


def copy_roundings(keys: dict[str, tuple[Any, ...]]) -> None:
    """Store every product under both forms of its default rounding mode.

    Whether a key holds 0 or `RoundingMode.RN` depends on whether PyTorch's dispatcher passes on an argument
    that equals its default, which may differ between its versions. The kernel is the same.
    """
    place = 1 + list(signature(_compile_gemm).parameters).index("rounding_mode")
    folder: Path = cache_utils.get_cache_path() / cache_utils._compute_source_fingerprint()
    for name, key in list(keys.items()):
        if key[0] != "_compile_gemm":
            continue
        assert key[place] == RoundingMode.RN
        for rounding in (0, RoundingMode.RN):
            other = cache_utils._key_to_hash((*key[:place], rounding, *key[place + 1 :]))
            if not (folder / f"{other}.o").exists():
                copyfile(folder / f"{name}.o", folder / f"{other}.o")


def report(what: str, started: float) -> None:
    """Print a line: when it ended, and the seconds that it took."""
    now = time.perf_counter()
    print(f"{now - STARTED:7.1f} s {now - started:7.2f} s  {what}", flush=True)


if __name__ == "__main__":
    main()
