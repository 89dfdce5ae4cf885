"""Remote code (`trust_remote_code`): modules under `transformers_modules`, patched when they are executed.

`transformers.dynamic_module_utils` creates the spec of an entry module itself; its patched form calls
`spec_from_file_location` of this module. Relative imports of an entry module go through `sys.meta_path`.

`__file__` and the loader's path remain the original's: `save_pretrained` copies that file and its neighbours.
`co_filename` is the stored patched file, which tracebacks and debuggers show.
"""

from __future__ import annotations

import importlib.util
import os
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import CodeType, ModuleType

from veomni_hook.finders.loader import PatchedLoader
from veomni_hook.finders.patched_form import patched_loader
from veomni_hook.finders.settings_in_force import current_settings
from veomni_hook.finders.state import STATE
from veomni_hook.finders.tracebacks import fold

__all__ = ["RemoteLoader", "patching", "spec_from_file_location"]


class RemoteLoader(SourceFileLoader):
    """Executes the patched form of one remote module.

    The source is read when the module is executed: transformers executes a module again, with a new spec,
    when its file has changed.

    Attributes:
        patched: the loader of the patched form; None before execution, and if nothing applies.
    """

    def __init__(self, fullname: str, original: SourceFileLoader) -> None:
        super().__init__(fullname, str(original.path))
        self._original = original
        self.patched: PatchedLoader | None = None

    def exec_module(self, module: ModuleType) -> None:
        """Execute the patched form, or the original if nothing applies."""
        try:
            super().exec_module(module)
        except Exception as error:
            if not fold(error):
                raise
            raise error  # VEOMNI_TRACEBACK=full shows the frames of veomni_hook, too
        if module.__spec__ is not None:  # executed again: the last loaded form represents the module
            module.__spec__.loader = module.__loader__ = self

    def get_code(self, fullname: str | None = None) -> CodeType | None:
        """Return the code object of the patched form, or of the original if nothing applies."""
        spec = importlib.util.spec_from_file_location(self.name, self.path, loader=self._original)
        self.patched = None if spec is None else patched_loader(self.name, spec)
        return (self.patched or self._original).get_code(self.name)

    def get_source(self, fullname: str) -> str | None:
        """Return the source that was executed; the file still holds the original."""
        return (self.patched or self._original).get_source(self.name)


def patching(fullname: str, spec: ModuleSpec) -> ModuleSpec:
    """Return a spec that loads a remote module's patched form, or ``spec`` if it is not to be patched."""
    settings = current_settings()
    loader = spec.loader
    if (
        not (settings.enabled and settings.remote_code)
        or spec.submodule_search_locations is not None
        or not isinstance(loader, SourceFileLoader)
    ):
        return spec
    patching_loader = RemoteLoader(fullname, loader)
    return importlib.util.spec_from_file_location(fullname, loader.path, loader=patching_loader) or spec


def spec_from_file_location(name: str, location: str | os.PathLike[str]) -> ModuleSpec | None:
    """Replaces importlib's function in `transformers.dynamic_module_utils`."""
    spec = importlib.util.spec_from_file_location(name, location)
    if spec is None or not STATE.handles:
        return spec
    STATE.asked.add(name)
    return patching(name, spec)
