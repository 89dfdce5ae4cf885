"""Compiles what an op launches: `python -m tests.kernels.absent_gpu sm90 rms_norm`; prints JSON, a line a call.

``first`` in place of an op: the first call of each.
"""

import json
import os
import sys

# Before triton is imported: functions are compiled or interpreted from then on. And no GPU that is there.
os.environ.pop("TRITON_INTERPRET", None)
os.environ["CUDA_VISIBLE_DEVICES"] = ""

from tests.kernels.absent_gpu.calls import OPS, first
from tests.kernels.absent_gpu.gpu import GPUS, pretend

if __name__ == "__main__":
    gpu, op = sys.argv[1:]
    compiled = pretend(GPUS[gpu])
    for name, call in first() if op == "first" else OPS[op]():
        compiled.clear()
        try:
            call()
        except Exception as error:
            print(json.dumps({"call": name, "failed": f"{type(error).__name__}: {error}"}), flush=True)
            continue
        print(json.dumps({"call": name, "compiled": compiled}), flush=True)
