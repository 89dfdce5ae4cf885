"""The mode ``deterministic = "batch_invariant"``: a row has the same bits in any batch.

`mode` switches it; `products` replaces torch's matrix products, by `triton` on a GPU and row by row on a CPU;
`attention` is what the name ``sdpa`` means to transformers meanwhile, on the `segments` of a mask, by torch's
flash attention on a GPU and by `blocks` on a CPU. The choice of kernels leaves out those that are not
`veomni_hook.kernels.selection.declaration.Kernel.invariant`.
"""
