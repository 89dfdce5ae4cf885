"""Whether Triton's kernels compile for GPUs, and fit into them, which the interpreter cannot show."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from tests.kernels.absent_gpu.calls import OPS
from tests.kernels.absent_gpu.gpu import GPUS

ROOT = Path(__file__).resolve().parents[2]
# Triton's wheel brings the assembler; its drivers and so its targets are those of Linux.
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Triton is for Linux")
#: Seconds each; the others take up to three minutes.
SOON = {"linear_cross_entropy", "moe_router"}
CASES = [
    pytest.param(gpu, op, marks=[] if gpu == "sm90" and op in SOON else pytest.mark.slow)
    for gpu in GPUS
    for op in OPS
]


@pytest.mark.parametrize(("gpu", "op"), CASES)
def test_kernels_compile_and_fit(gpu, op):
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.absent_gpu", gpu, op],
        cwd=ROOT, capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    calls = [json.loads(line) for line in done.stdout.splitlines()]
    assert calls and all(each.get("failed") or each["compiled"] for each in calls)
    assert not [each for each in calls if "failed" in each]
    too_much = [
        (each["call"], *kernel)
        for each in calls
        for kernel in each["compiled"]
        if kernel[1] > GPUS[gpu].shared
    ]
    assert not too_much
