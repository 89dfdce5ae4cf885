"""Heads that are split in two parts along their width, and joined again, as latent attention does (MLA).

Upstream's calls become ``slot.call(module, torch.split, x, sizes, -1)`` and ``slot.call(module, torch.cat,
(x, y), -1)``. `variants` declares the op.
"""
