"""Torch's own ``nn.LayerNorm``, where a method of a model calls it.

Patched code calls ``slot.call(self, self.norm, hidden_states)``; kernels are called with
``(hidden_states, norm)``. A kernel skips the call of the module ``norm``, so every kernel here refuses
unless ``norm`` is exactly torch's class and nothing observes its calls. `variants` declares the op, whose
code is that of `veomni_hook.kernels.layer_norm`.
"""
