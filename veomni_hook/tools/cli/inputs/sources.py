"""A transformers package as source files, installed or in a folder; nothing is imported."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from veomni_hook.finders import targets
from veomni_hook.locate import locate
from veomni_hook.tools.cli.inputs.targets import (
    MODELS,
    families,
    family_meant,
    transformers_folder,
    unknown_family,
)
from veomni_hook.tools.cli.usage import UsageError

#: Modules outside `transformers.models` that idioms examine: many models share their code.
SHARED = tuple(sorted(targets.SHARED.keys() - {targets.REMOTE_LOADING}))

_VERSION = re.compile(r"^__version__\s*=\s*[\"']([^\"']+)[\"']", re.MULTILINE)


@dataclass(frozen=True)
class SourceTree:
    """One transformers package.

    Attributes:
        folder: the package's folder.
        version: its own version, or `unknown`.
    """

    folder: str
    version: str

    @property
    def models(self) -> str:
        """The folder that contains its families."""
        return os.path.join(self.folder, "models")

    def files(self, wanted: Iterable[str] = ()) -> dict[str, str]:
        """Return modeling modules with their files, sorted.

        Args:
            wanted: families (`qwen3`, with all its files), what follows `modeling_` in a file's name, what
                `family_meant` understands, dotted module names, or paths of Python files; by default every
                family and the shared modules.

        Raises:
            UsageError: one of them does not exist; the message has the nearest names.
        """
        files: dict[str, str] = {}
        known = families(models=self.models)
        shared = (module for module in SHARED if os.path.isfile(self.path(module)))
        for one in list(wanted) or (*known, *shared):
            files |= self._named(one, known)
        return dict(sorted(files.items()))

    def beside(self) -> dict[str, str]:
        """Return the processing and configuration modules of all families with their files, sorted."""
        names = [
            f"{MODELS}.{family}.{file.removesuffix('.py')}"
            for family in families(models=self.models)
            for file in os.listdir(os.path.join(self.models, family))
            if file.endswith(".py")
        ]
        return {name: self.path(name) for name in sorted(filter(targets.is_target_if_named, names))}

    def path(self, module: str) -> str:
        """The path that a module of the package would have."""
        return os.path.join(self.folder, *module.split(".")[1:]) + ".py"

    def _named(self, name: str, known: Mapping[str, Sequence[str]]) -> dict[str, str]:
        if name.endswith(".py"):
            return {name: _existing(name, name)}
        if name in SHARED or name.startswith(f"{MODELS}."):
            return {name: _existing(name, self.path(name))}
        name = family_meant(name, known)
        if "." in name:
            spec = locate(name)
            if spec is None or not spec.has_location or not (spec.origin or "").endswith(".py"):
                raise UsageError(
                    f"there is no module {name} with a source file",
                    where="this Python environment",
                    fix="name an installed module, a family, or a Python file",
                )
            return {name: str(spec.origin)}
        names = [(name, file) for file in known.get(name, ())]
        names = names or [
            (home, own) for home, files in known.items() if (own := f"modeling_{name}") in files
        ]
        if not names:
            raise unknown_family(name, known, self.folder)
        return {(module := f"{MODELS}.{home}.{file}"): self.path(module) for home, file in names}


def source_tree(path: str | None = None, *, where: str = "--source") -> SourceTree:
    """Return the installed transformers, or the package at a path.

    Args:
        path: the package's folder (`…/transformers`), or one that contains it directly or below `src`.
        where: the option that names the path, for the error.

    Raises:
        UsageError: there is no such package.
    """
    if path is None:
        folder = transformers_folder()
    else:
        near = (path, os.path.join(path, "transformers"), os.path.join(path, "src", "transformers"))
        folders = [one for one in near if os.path.isdir(os.path.join(one, "models"))]
        if not folders:
            raise UsageError(
                f"no transformers package in {path}",
                where=where,
                fix="name a folder `transformers` that holds `models`, as in an unpacked wheel or a checkout",
            )
        folder = folders[0]
    try:
        match = _VERSION.search(read_source(os.path.join(folder, "__init__.py")))
    except FileNotFoundError:
        match = None
    return SourceTree(folder, match.group(1) if match else "unknown")


def read_source(path: str) -> str:
    """Return the text of a Python file, decoded as Python does.

    Raises:
        OSError: it cannot be read.
        SyntaxError: it declares an unknown encoding.
        UnicodeDecodeError: its bytes are not valid in its encoding.
    """
    from importlib.util import decode_source

    with open(path, "rb") as file:
        return decode_source(file.read())


def _existing(module: str, path: str) -> str:
    if not os.path.isfile(path):
        raise UsageError(
            f"there is no module {module}",
            where=path,
            fix="`veomni-hook list --all --by module` shows every modeling module",
        )
    return path
