"""Kernels load 16 bytes at a time where rows begin at odd multiples of 16 bytes, which Triton does not see.

As a script, it prints how many accesses of two bytes kernels for an H100 have, compiled without one.
"""

import re
import sys

import pytest
import torch

from tests.processes import outputs, started

pytest.importorskip("triton")

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Triton is for Linux")


def loss():
    """Of a head with a bias: logits have no padding that is not necessary."""
    from veomni_hook.kernels.linear_cross_entropy import triton
    from veomni_hook.kernels.linear_cross_entropy.objective import Objective, Wanted

    x, weight, bias = (torch.ones(shape, dtype=torch.bfloat16) for shape in ((4, 16), (1000, 16), (1000,)))
    target = torch.zeros(4, dtype=torch.long)
    triton.loss_and_statistics(x.requires_grad_(), weight, bias, target, Objective(), Wanted())


def rotation():
    """Of heads of 72, as in Qwen3-VL's tower."""
    from veomni_hook.kernels.rotary import triton

    q, k, _ = torch.ones(64, 3, 16, 72, dtype=torch.bfloat16).unbind(1)
    cos = torch.ones(64, 72)
    triton.kernel("half_split_fp32")(q, k, cos, cos, -2)


#: Accesses of two bytes: the loss reads the logit of the label, twice, and writes it.
CALLS = {loss: 3, rotation: 0}


def test_rows_at_odd_multiples_of_16_bytes():
    printed, _ = outputs(started("-m", __name__, TRITON_INTERPRET="0", CUDA_VISIBLE_DEVICES=""))
    assert [int(line) for line in printed.splitlines()] == [*CALLS.values()]


if __name__ == "__main__":
    from triton.runtime.jit import JITFunction

    from tests.kernels.absent_gpu.gpu import GPUS, pretend

    pretend(GPUS["sm90"])
    run = JITFunction.run

    def printed(self, *operands, **options):
        kernel = run(self, *operands, **options)
        print(len(re.findall(r"(?:ld|st)\.global[\w.:]*(?<!\.v2)(?<!\.v4)\.b16", kernel.asm["ptx"])))
        return kernel

    JITFunction.run = printed
    for call in CALLS:
        call()
