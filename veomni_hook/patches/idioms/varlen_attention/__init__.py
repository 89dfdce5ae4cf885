"""Attention within the segments of a packed sequence, as vision and audio towers compute it."""
