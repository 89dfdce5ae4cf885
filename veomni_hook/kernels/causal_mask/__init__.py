"""The attention mask under ``torch.compile``: left out where transformers leaves it out without compiling.

This op has no kernels: `veomni_hook.kernels.causal_mask.compiled` answers what the patched
``transformers.masking_utils`` asks while dynamo traces.
"""
