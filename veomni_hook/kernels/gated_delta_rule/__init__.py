"""Linear attention by the gated delta rule, with samples that share a row kept apart.

Upstream computes it in float32, chunk by chunk in a Python loop, and without another package it cannot
separate samples. `variants` declares the op; patched code calls `call`.
"""
