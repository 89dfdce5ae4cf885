"""Apply all idioms to one module: every site, routed or not."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from importlib import import_module
from importlib.resources import files
from types import ModuleType

from veomni_hook.errors import IdiomError
from veomni_hook.patches.code.document import Document
from veomni_hook.patches.code.tree import forget_walks
from veomni_hook.patches.routes.view import ModuleView, settled
from veomni_hook.patches.site import Site

__all__ = ["IDIOMS", "OPTIONAL", "asked", "every_idiom", "idioms", "recognise"]

# Ten times as fast as with "^" and "$" in every line.
_DECLARED = re.compile(r'\n(WORDS|SETTING) = "(.*)"(?=\n)')


def _declared() -> dict[str, dict[str, str]]:
    """What every idiom declares, by its module below this package, by alphabet; imports none of them."""
    room = files(__name__.rpartition(".")[0])
    modules = {path.name: path for path in room.iterdir()}
    for folder in [path for path in modules.values() if path.is_dir()]:
        modules |= {f"{folder.name}.{path.name}": path for path in folder.iterdir()}
    texts = {n.removesuffix(".py"): path for n, path in sorted(modules.items()) if n.endswith(".py")}
    declarations = {name: dict(_DECLARED.findall(path.read_text("utf-8"))) for name, path in texts.items()}
    return {name: declared for name, declared in declarations.items() if "WORDS" in declared}


_EVERY = _declared()
#: The words of each idiom, and the setting of each that applies only with one.
IDIOMS = {name: declared["WORDS"] for name, declared in _EVERY.items()}
OPTIONAL = {name: declared["SETTING"] for name, declared in _EVERY.items() if "SETTING" in declared}


def idioms(source: str | None = None) -> tuple[ModuleType, ...]:
    """The idiom modules; of a module's text, those that may find something in it: others are not imported."""
    return _imported((name for name in IDIOMS if name not in OPTIONAL), source)


def every_idiom() -> tuple[ModuleType, ...]:
    """The idiom modules, with the optional ones."""
    return asked(OPTIONAL)


def asked(optional: Collection[str], source: str | None = None) -> tuple[ModuleType, ...]:
    """What `idioms` returns, with these of the optional ones."""
    return (*idioms(source), *_imported((name for name in OPTIONAL if name in optional), source))


def _imported(names: Iterable[str], source: str | None) -> tuple[ModuleType, ...]:
    modules = []
    for name in names:
        alternatives = [words.split() for words in IDIOMS[name].split("|")]
        if source is None or any(all(word in source for word in words) for words in alternatives):
            modules.append(import_module(f"veomni_hook.patches.idioms.{name}"))
    return tuple(modules)


def recognise(document: Document, *, optional: Collection[str] = ()) -> list[Site]:
    """Every site of a module, idiom by idiom, in source order.

    Args:
        document: the module.
        optional: the idioms to ask of those that apply only with a setting (`OPTIONAL`).

    Raises:
        IdiomError: an idiom fails on the module.
    """
    if not IDIOMS:
        what, fix = (
            "idioms cannot be read: the package has compiled files only",
            "install it with its sources",
        )
        raise IdiomError(what, where=document.module, fix=fix)
    view = ModuleView(document)
    sites: list[Site] = []
    for idiom in asked(optional, document.source):
        try:
            sites += settled(view, view.sites(idiom.find))
        except Exception as error:
            what = f"the idiom {idiom.__name__} fails on this module: {type(error).__name__}: {error}"
            fix = "report this as a defect of veomni-hook"
            raise IdiomError(what, where=document.module, fix=fix) from error
    forget_walks()
    return sites
