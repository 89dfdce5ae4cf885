"""Puts the observer of `veomni-hook compare` or `plan` into a Python process, before the script's first line.

This file shadows the environment's own `sitecustomize`, so it runs that one afterwards.
"""

import os
import sys


def _run_hidden_sitecustomize() -> None:
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is None or spec.loader is None:
        return
    module = module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


_own = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or os.curdir) != _own]
try:
    from veomni_hook.tools.compare.start import install

    install()
finally:
    _run_hidden_sitecustomize()
