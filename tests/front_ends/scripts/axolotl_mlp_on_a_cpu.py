"""Axolotl's `train`, with its two Triton operators of the gated MLP computed by formulas, for want of a GPU."""

import runpy
import sys

import torch
from axolotl.kernels import swiglu

silu = torch.nn.functional.silu


@swiglu.swiglu_forward.register_kernel("cpu")
def forward(gate, up):
    return silu(gate) * up


@swiglu._swiglu_bwd_op.register_kernel("cpu")
def backward(grad, gate, up):
    """Write the product and the gradients of both factors over the arguments."""
    share = torch.sigmoid(gate)
    product, of_up = silu(gate) * up, grad * silu(gate)
    of_gate = grad * up * share * (1 + gate * (1 - share))
    for argument, result in ((grad, product), (gate, of_gate), (up, of_up)):
        argument.copy_(result)


if __name__ == "__main__":
    sys.argv = ["train", "config.yaml"]
    runpy.run_module("axolotl.cli.train", run_name="__main__")
