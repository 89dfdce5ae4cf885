"""An activation that upstream writes as several operators, in one pass.

Guards stand in the ``forward`` of the class that computes it, which most models take from
``transformers.activations``, and call ``slot.kernel(self, x)``. The device code is that of
`veomni_hook.kernels.gated_mlp`: a product without its second factor.
"""
