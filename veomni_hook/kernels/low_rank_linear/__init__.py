"""A linear layer with a low-rank term, ``linear(x) + scale * up(down(x))``, as adapters (LoRA) have it.

The term is added to the layer's result in place, so that nothing of the size of the result or of the input is
made for it, forward or backward. Plain PyTorch; the products are the device library's.
"""
