"""Activates the hook in child processes of `veomni-hook run`; see `veomni_hook.finders.children`.

This file shadows the environment's own `sitecustomize`. That one runs after activation, so its imports are
patched; its errors propagate from here, and Python reports them as usual.
"""

import os
import sys


def _activate() -> None:
    if os.environ.get("VEOMNI_HOOK") != "1":
        return
    import veomni_hook.install  # noqa: F401
    from veomni_hook.finders.state import STATE

    if STATE.finder in sys.meta_path[1:]:  # finders that sitecustomize put ahead would hide modules from it
        sys.meta_path.remove(STATE.finder)
        sys.meta_path.insert(0, STATE.finder)


def _run_hidden_sitecustomize() -> None:
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is None or spec.loader is None:
        return
    module = module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


_own = os.path.dirname(__file__)
sys.path[:] = [entry for entry in sys.path if os.path.normpath(entry) != _own]
try:
    _activate()
except ImportError:
    pass  # the hidden one may make this package importable; otherwise the second attempt reports the error
finally:
    try:
        _run_hidden_sitecustomize()
    finally:
        _activate()
