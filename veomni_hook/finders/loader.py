"""The loader of a patched module: serves the stored source and executes its code object.

It is a `SourceFileLoader` on the stored file, so `inspect`, `linecache`, resources and `importlib.reload`
behave as for any source module. If no folder is writable, the file remains the upstream one, the code object
has a virtual file name, and `get_source` returns the text (linecache asks the loader).
"""

from __future__ import annotations

import os
from copy import copy
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from types import CodeType


def virtual_path(fullname: str) -> str:
    """Return the `co_filename` of a module that is in memory only.

    Not of the form `<...>`: before Python 3.13, linecache does not ask the loader for such names. The last
    path parts are the real ones, because transformers derives a model's name from them.
    """
    return os.sep + os.path.join("veomni_hook-in-memory", *fullname.split(".")) + ".py"


class PatchedLoader(SourceFileLoader):
    """Loads one patched module.

    Attributes:
        upstream: path of the installed, unpatched file.
        filename: the `co_filename` of the code: the stored file, or a virtual one.
        foreign: the loader of another hook ahead of this one, or None.
    """

    def __init__(
        self,
        fullname: str,
        path: str,
        *,
        upstream: str,
        text: str | None = None,
        code: CodeType | None = None,
        foreign: SourceFileLoader | None = None,
    ) -> None:
        super().__init__(fullname, path)
        self.upstream = upstream
        self.filename = path if text is None else virtual_path(fullname)
        self._text = text
        self._code = code
        self.foreign = foreign

    def get_code(self, fullname: str | None = None) -> CodeType | None:
        """Return the patched module's code object.

        If another hook's loader is ahead of ours (beartype's claw, jaxtyping's), a copy of that loader,
        pointed at the patched source, produces the code, so that its transformation also runs.
        """
        if self.foreign is not None:
            chained = copy(self.foreign)
            chained.path = self.path
            if self._text is None:
                return chained.get_code(self.name)
            return chained.source_to_code(self._text.encode(), self.filename)
        if self._code is None:
            self._code = self.source_to_code(self.get_source(self.name).encode(), self.filename)
        return self._code

    def get_source(self, fullname: str) -> str:
        """Return the patched source, as stored."""
        if self._text is not None:
            return self._text
        source = super().get_source(fullname)
        return source or ""

    def spec(self) -> ModuleSpec:
        """Return the module spec: `origin` is the stored file."""
        spec = spec_from_file_location(self.name, self.path, loader=self)
        if spec is None:  # happens only for a loader without a location, and this one has one
            raise ImportError(f"no spec for {self.name} at {self.path}", name=self.name, path=self.path)
        return spec
