"""Layers that mix the positions of a row, and whether the boundaries of samples reach them."""
