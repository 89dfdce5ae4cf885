"""The list of built-in specs, determined from file names without importing any spec.

``<family>.py`` in this folder holds the patch configs of ``transformers.models.<family>.modeling_<family>``,
``shared/<name>.py`` those of ``transformers.<name>``, a module that all models share, and
``shared/<package>_<name>.py`` those of a module of another package, or of the modules in one of its folders,
with underscores for dots. What only some settings need of a shared module is in a file with ``_experts``
(expert parallelism), ``_batches`` (values on the host), ``_memory`` or ``_made`` (new models) at its end.

A spec is for a single module that formulas cannot cover: a model whose code must change, or a site that must
not be routed as an idiom would. Formulas belong in `veomni_hook.patches.idioms`, which find them in every
module but skip sites that a spec names. So this folder may contain no family at all.
"""

from __future__ import annotations

import os

__all__ = ["all_spec_modules", "families", "spec_modules"]

_PREFIX = "transformers.models."
_PACKAGES = ("transformers", "accelerate", "trl", "verl")
_PARTS = ("_experts", "_batches", "_memory", "_made")


def families() -> dict[str, tuple[str, ...]]:
    """Return every family that has a spec, sorted, with the modules that its spec covers."""
    return {family: (f"{_PREFIX}{family}.modeling_{family}",) for family in sorted(_files())}


def spec_modules(source_module: str) -> list[str]:
    """Return the names of the spec modules that cover ``source_module``; none is imported.

    Cheap enough for every import of a target: it checks for one file, or a few.
    """
    if not source_module.startswith(_PREFIX):
        package, _, name = source_module.partition(".")
        if package not in _PACKAGES:
            return []
        if package == "transformers":
            names = (name, *(f"{name}{part}" for part in _PARTS))
        else:
            name = f"{package}_{name.replace('.', '_')}"
            home = source_module.rpartition(".")[0].replace(".", "_")
            names = (name, *(f"{name}{part}" for part in _PARTS), home)
        return [f"{__name__}.shared.{name}" for name in names if _has(name, "shared")]
    family, _, name = source_module[len(_PREFIX) :].partition(".")
    if name != f"modeling_{family}" or not _has(family):
        return []
    return [f"{__name__}.{family}"]


def all_spec_modules() -> list[str]:
    """Return the names of all built-in spec modules, sorted; none is imported."""
    shared = [f"{__name__}.shared.{name}" for name in sorted(_files("shared"))]
    return [*(f"{__name__}.{family}" for family in families()), *shared]


def _has(name: str, folder: str = "") -> bool:
    if name.startswith("_"):
        return False
    if os.path.isdir(__path__[0]):
        return os.path.isfile(os.path.join(__path__[0], folder, f"{name}.py"))
    return name in _files(folder)


def _files(folder: str = "") -> set[str]:
    # pkgutil also lists a package in a zip file; imported here because most processes never need it.
    from pkgutil import iter_modules

    modules = iter_modules([os.path.join(__path__[0], folder) if folder else __path__[0]])
    return {module.name for module in modules if not module.ispkg and not module.name.startswith("_")}
