"""Serve the package `patchgen` to config modules where it is not installed.

VeOmni's configs are made with classes of that package, which comes with VeOmni's repository and not with its
wheel. While a config module is loaded, and only then, an import of `patchgen` or `patchgen.patch_spec` that
nothing else can serve finds our classes of the same surface (`veomni_hook.patches.patchgen`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType

from veomni_hook.patches import patchgen

__all__ = ["MODULES", "serving_patchgen"]

_PACKAGE = "patchgen"
MODULES = (_PACKAGE, f"{_PACKAGE}.patch_spec")


class _Patchgen:
    """Finds and loads both modules, with the names of `veomni_hook.patches.patchgen`.

    The last finder: anything that is installed comes first.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in MODULES:
            return None
        loader: object = self
        return spec_from_loader(fullname, loader, origin=__file__, is_package=fullname == _PACKAGE)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        module.__doc__ = patchgen.__doc__
        vars(module).update({name: getattr(patchgen, name) for name in patchgen.__all__})
        vars(module)["__all__"] = list(patchgen.__all__)


@contextmanager
def serving_patchgen() -> Iterator[None]:
    """Serve `patchgen` within the block; afterwards it is as unknown as it was before."""
    finder = _Patchgen()
    sys.meta_path.append(finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in MODULES:
            loader = getattr(getattr(sys.modules.get(name), "__spec__", None), "loader", None)
            if isinstance(loader, _Patchgen):
                del sys.modules[name]
