"""Whether the packed caches are valid here: `python -m benchmarks.sonic.check`, which needs no GPU.

It compares what the keys of both caches hold with what they held where `build.sh` packed them, and exits with
1 if something differs: the kernels then compile here, for minutes. `--write` records what they hold.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
from pathlib import Path

import cutlass
import triton
import tvm_ffi
from quack.cache_utils import _compute_source_fingerprint
from triton.backends.nvidia.compiler import get_ptxas_version
from triton.runtime.cache import triton_key

QUACK = Path(os.environ["QUACK_CACHE_DIR"])
TRITON = Path(os.environ["TRITON_CACHE_DIR"])
RECORD = QUACK.parent / "keys.json"


def held() -> dict[str, str]:
    """Return what the keys hold here."""
    return {
        # It holds the next three as well, which say why it differs.
        "fingerprint": _compute_source_fingerprint(),
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "cutlass": cutlass.__version__,
        "tvm_ffi": tvm_ffi.__version__,
        "Triton": triton.__version__,
        "Triton's sources": hashlib.sha256(triton_key().encode()).hexdigest(),
        "ptxas": get_ptxas_version(90),
    }


def main() -> int:
    """Print the differences and what is in the caches; return 1 if something differs or a cache is empty."""
    here = held()
    if sys.argv[1:] == ["--write"]:
        RECORD.write_text(json.dumps(here, indent=1) + "\n")
    packed = json.loads(RECORD.read_text())
    different = [name for name in here if here[name] != packed.get(name)]
    for name in different:
        print(f"{name} differs: packed with {packed.get(name)!r}, here {here[name]!r}")
    counts = len(list(QUACK.glob(f"{here['fingerprint']}/*.o"))), len(list(TRITON.glob("*/*.cubin")))
    print(f"{counts[0]} kernels of QuACK under this fingerprint, {counts[1]} of Triton")
    return int(bool(different) or 0 in counts)


if __name__ == "__main__":
    sys.exit(main())
