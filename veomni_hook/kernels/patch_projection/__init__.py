"""A convolution whose stride is its kernel: one matrix product of the input's blocks with the weight.

Patched code calls ``slot.call(self, self.proj, pixels)``; kernels are called with ``(pixels, convolution)``.
A kernel skips the call of the module ``convolution``, so every kernel here refuses unless this is exactly
torch's Conv1d, Conv2d or Conv3d and nothing observes its calls (`rules`). Plain PyTorch, on every device.
"""
