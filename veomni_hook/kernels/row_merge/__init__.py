"""Features in the rows of placeholder tokens: merged, as ``masked_scatter`` does, or added.

Patched code calls ``slot.call(self, torch.Tensor.masked_scatter, inputs, mask, source)``; kernels are
called with ``(inputs, mask, source, method)``. `rules` decides which calls are of whole rows. No kernel reads
a value of the device on the host. `variants` declares the op.
"""
