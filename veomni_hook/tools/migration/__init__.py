"""Configs of patchgen and of other releases: what their patches are still good for, and what replaces them.

Text and `ast` only: the release that is judged need not be installed, and nothing is imported.
"""
