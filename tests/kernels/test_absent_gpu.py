"""Whether Triton's kernels compile for GPUs, and fit into them, which the interpreter cannot show."""

import json
import sys

import pytest

pytest.importorskip("triton")

from tests.kernels.absent_gpu.calls import OPS
from tests.kernels.absent_gpu.gpu import GPUS
from tests.kernels.absent_gpu.registers import unwritten_in
from tests.processes import outputs, started

# Triton's wheel brings the assembler; its drivers and so its targets are those of Linux.
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Triton is for Linux")
# The first call of each op takes seconds; all calls of one up to three minutes.
CASES = [
    pytest.param("sm90", "first"),
    *(
        pytest.param(gpu, op, marks=pytest.mark.slow)
        for gpu in GPUS
        for op in OPS
        if not op.endswith(("float8", "mxfp8")) or GPUS[gpu].capability >= 89
    ),
]


#: GPUs with MX, and what multiplies in it.
WITH_MX = ("sm100", "sm120")
PRODUCTS = {"gate_up", "gate_up_backward", "rows_product", "weight_gradient"}


@pytest.mark.parametrize(("gpu", "op"), CASES)
def test_kernels_compile_and_fit(gpu, op):
    printed, _ = outputs(started("-m", "tests.kernels.absent_gpu", gpu, op))
    calls = [json.loads(line) for line in printed.splitlines()]
    assert calls and all(each.get("failed") or each["compiled"] for each in calls)
    assert not [each for each in calls if "failed" in each]
    too_much = [
        (each["call"], *kernel)
        for each in calls
        for kernel in each["compiled"]
        if kernel[1] > GPUS[gpu].shared
    ]
    assert not too_much
    kernels = [(each["call"], *kernel) for each in calls for kernel in each["compiled"]]
    assert not [kernel for kernel in kernels if kernel[3] or kernel[5]]
    in_mx = {kernel[1] for kernel in kernels if kernel[4]}
    assert in_mx == (PRODUCTS if op.endswith("mxfp8") and gpu in WITH_MX else set())


def test_a_read_of_an_unwritten_register_is_seen():
    written = "UMOV UR4, 0x400 ;\n@P0 UIADD3.64 UR6, UR4, 0x20, URZ ;\nULDC.64 UR4, c[0x0][0x208] ;"
    assert unwritten_in(f"/*0000*/ {written.splitlines()[0]}") == []
    assert unwritten_in(written) == ["@P0 UIADD3.64 UR6, UR4, 0x20, URZ"]  # UR5
    product = "HGMMA.64x16x16.F32.BF16 R24, R40, gdesc[UR44].tnspB, R24"
    assert unwritten_in("UIADD3 UR46, UP0, UR46, 0x20, URZ ;\nUMOV UR47, UR46 ;\n" + product) == [
        "UIADD3 UR46, UP0, UR46, 0x20, URZ"
    ]
    assert unwritten_in(f"UMOV UR46, 0x1 ;\n{product} ;") == [product]
    assert unwritten_in(f"UIMAD.WIDE UR46, R2, 0x1, URZ ;\n{product}") == []
