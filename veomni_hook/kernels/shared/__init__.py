"""What kernels of several ops share: operands as rows, custom operators, launches, activations, Ascend."""
