"""Kernels: what each op can be computed with, how one is chosen, and the slots that patched code asks.

One folder an op: its declaration (``__init__``), the plain definition (``reference``) and one file a backend.
Importing this package, or `registry`, loads no torch; a backend's file is imported when it is first used.
"""
