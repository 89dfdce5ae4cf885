"""Activates the hook in child processes of `veomni-hook run`; see `veomni_hook.finders.children`."""

import os
import sys


def _run_hidden_sitecustomize(own: str) -> None:
    # This file shadows whatever sitecustomize the environment has; that one must still run.
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    spec = PathFinder.find_spec("sitecustomize", [p for p in sys.path if os.path.abspath(p or ".") != own])
    if spec is None or spec.loader is None:
        return
    module = module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


_own = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [p for p in sys.path if os.path.abspath(p or ".") != _own]
_run_hidden_sitecustomize(_own)
if os.environ.get("VEOMNI_HOOK") == "1":
    import veomni_hook.install  # noqa: F401
