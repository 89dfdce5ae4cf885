"""Kernels: the implementations of each op, the selection of one, and the slots that patched code asks.

One folder per op: its declaration (``__init__``), its definition (``reference``) and one file per backend.
Importing this package, or `registry`, does not import torch; a backend's file is imported on first use.
"""
