"""What is counted where Triton compiles, for a GPU that is not there; without "says", as before Triton 3.4."""

from __future__ import annotations

import json
import sys

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from veomni_hook.tools.cli.cache import warming

KNOBS = triton.knobs


@triton.jit
def double(x, size: tl.constexpr):
    places = x + tl.arange(0, size)
    tl.store(places, tl.load(places) * 2)


def counted(sizes: list[int]) -> dict[str, object]:
    folder = warming._cache_folder()
    with warming._counted(folder) as counts:
        for size in sizes:
            source = ASTSource(double, {"x": "*fp32", "size": "constexpr"}, {"size": size})
            triton.compile(source, target=GPUTarget("cuda", 90, 32))
    assert KNOBS.compilation.listener is None, "as before"
    return {**counts, "cache": folder}


if "says" not in sys.argv[1:]:
    del triton.knobs
print(json.dumps([counted([64, 128]), counted([64, 128, 256])]))
