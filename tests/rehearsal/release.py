"""A release that does not exist: the installed transformers, or another one, with some modules rewritten."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path

from tests.rehearsal.code import Facts
from tests.rehearsal.names import facts_of
from veomni_hook.finders.targets import is_target

#: Code outside of `models` that is renamed with it: what models call with their own parameters.
_WITH_MODELS = (
    "masking_utils.py", "modeling_layers.py", "modeling_flash_attention_utils.py", "modeling_rope_utils.py",
    "vision_utils.py", "loss/*.py", "integrations/*.py",
)  # fmt: skip
#: Code that reads attributes of models or calls their methods, and keeps its names.
_OUTSIDE = (
    "modeling_utils.py", "generation/*.py", "utils/*.py", "trainer*.py", "cache_utils.py", "activations.py",
)  # fmt: skip


@dataclass(frozen=True)
class Release:
    """A release of transformers, by the folder that holds its package."""

    folder: Path

    @classmethod
    def at(cls, folder: Path | None) -> Release:
        """The release in ``folder``, or the installed one."""
        if folder is not None:
            return cls(folder.resolve())
        spec = find_spec("transformers")
        if spec is None or spec.origin is None:
            raise ModuleNotFoundError("transformers is not installed")
        return cls(Path(spec.origin).parent.parent)

    @cached_property
    def files(self) -> dict[str, Path]:
        """What is rewritten: modeling modules and what is renamed with them, by module."""
        package = self.folder / "transformers"
        found = sorted(package.glob("models/*/modeling_*.py"))
        found += [path for pattern in _WITH_MODELS for path in sorted(package.glob(pattern))]
        return {self._module(path): path for path in found if path.name != "__init__.py"}

    @property
    def modeling(self) -> list[str]:
        """The modules that the hook patches: those of models, and a few that these share."""
        return [module for module in self.files if is_target(module)]

    def _module(self, path: Path) -> str:
        return ".".join(path.relative_to(self.folder).with_suffix("").parts)

    def text(self, module: str) -> str:
        """The text of a module."""
        return self.files[module].read_text(encoding="utf-8")

    def facts(self, seed: object) -> Facts:
        """What rewrites must know of the release; parameters to rename are drawn."""
        models = {module: self.text(module) for module in self.files if ".models." in module}
        shared = (self.text(module) for module in self.files if module not in models)
        package = self.folder / "transformers"
        outside = (
            path.read_text(encoding="utf-8") for each in _OUTSIDE for path in sorted(package.glob(each))
        )
        return facts_of(models, shared, outside, random.Random(f"{seed} names"))

    def written(self, texts: Mapping[str, str], folder: Path) -> Release:
        """A release in ``folder`` with other texts of some modules; all else are links to this one's files."""
        for each in self.folder.glob("transformers-*.dist-info"):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / each.name).symlink_to(each)
        paths = {
            folder.joinpath(*module.split(".")).with_suffix(".py"): text for module, text in texts.items()
        }
        real = {parent for path in paths for parent in path.parents if folder in parent.parents}
        _linked(
            self.folder / "transformers",
            folder / "transformers",
            real | {folder / "transformers"},
            set(paths),
        )
        for path, text in paths.items():
            path.write_text(text, encoding="utf-8")
        return Release(folder)


def _linked(source: Path, target: Path, real: set[Path], written: set[Path]) -> None:
    """Link everything in ``source``; folders in ``real`` are folders of their own."""
    target.mkdir(parents=True)
    for each in source.iterdir():
        there = target / each.name
        if there in real:
            _linked(each, there, real, written)
        elif there not in written and each.name != "__pycache__":
            there.symlink_to(each)
