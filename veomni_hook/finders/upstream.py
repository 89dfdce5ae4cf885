"""The installed source of a module: its path, its bytes, and its distribution."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, SourceFileLoader

from veomni_hook.finders.targets import is_remote
from veomni_hook.releases import installed

__all__ = ["Upstream", "read_upstream"]


@dataclass(frozen=True)
class Upstream:
    """The installed source of a target module, read but not decoded."""

    module: str
    path: str
    data: bytes
    distribution: str
    version: str

    @property
    def uses_torch(self) -> bool:
        """Whether it imports torch, as all code that computes with tensors does."""
        return b"import torch" in self.data or b"from torch" in self.data


def read_upstream(fullname: str, spec: ModuleSpec) -> tuple[Upstream | None, str]:
    """Read the source behind a spec; None with the reason if there is no source to patch."""
    loader = spec.loader
    if not isinstance(loader, SourceFileLoader):
        return None, f"no source file: loaded by {type(loader).__name__} from {spec.origin}"
    try:
        data = loader.get_data(loader.path)
    except OSError as error:
        return None, f"the source cannot be read: {error}"
    distribution = fullname.partition(".")[0]
    if is_remote(fullname):  # belongs to no distribution; it is written for transformers
        return Upstream(fullname, loader.path, data, distribution, _version("transformers")), ""
    root = os.path.join(loader.path, *[os.pardir] * fullname.count("."))
    return Upstream(fullname, loader.path, data, distribution, _version(distribution, root)), ""


def _version(distribution: str, root: str = "") -> str:
    """The version that is imported: a checkout on PYTHONPATH may shadow the installed distribution."""
    module = sys.modules.get(distribution)
    version = getattr(module, "__version__", None)
    if isinstance(version, str):
        return version
    if root:
        try:
            with open(os.path.normpath(os.path.join(root, "__init__.py")), encoding="utf-8") as file:
                assigned = re.search(r"^__version__\s*=\s*[\"']([^\"']+)[\"']", file.read(), re.MULTILINE)
        except OSError:
            assigned = None
        if assigned:
            return assigned[1]
    return installed(distribution) or "unknown"
