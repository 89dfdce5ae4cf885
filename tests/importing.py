"""Executes patched code as an import does: slots serve only the text of a module that is being imported."""

from __future__ import annotations

import sys
from importlib.metadata import version
from types import CodeType, ModuleType

from packaging.version import Version

#: Whether models count positions in the words of which an idiom knows; older releases have others.
POSITIONS_ARE_COUNTED = Version(version("transformers")) >= Version("5.9")


def exec_module(module: ModuleType, code: CodeType) -> None:
    """Execute ``code`` in ``module``, which has its name in ``sys.modules`` meanwhile.

    This function has the name of a loader's, by which slots know an import.
    """
    name = module.__name__
    before = sys.modules.get(name)
    sys.modules[name] = module
    try:
        exec(code, vars(module))
    finally:
        if before is None:
            del sys.modules[name]
        else:
            sys.modules[name] = before
