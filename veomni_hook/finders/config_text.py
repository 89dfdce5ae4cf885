"""What a config module is for and what it imports, read from its text: nothing is imported.

Loading a config can import half of transformers (VeOmni's configs do), in the middle of an import of the part
that it needs. So a config is loaded only for the modules that it may be for.
"""

from __future__ import annotations

import re
import sys
from fnmatch import fnmatchcase
from functools import cache

from veomni_hook.finders.settings_in_force import current_settings
from veomni_hook.finders.state import STATE
from veomni_hook.finders.targets import is_target, is_target_if_named
from veomni_hook.locate import locate
from veomni_hook.plugins import PATCHES, in_force

__all__ = ["half_imported", "is_being_imported", "is_named", "may_be_for", "named_by"]

_MADE = re.compile(r"\bPatchConfig\(")
_SOURCE = re.compile(r"""\bPatchConfig\(\s*(?:source_module\s*=\s*)?(["'])([\w.]+)\1""")
_TAKEN = re.compile(r"^from[ \t]+([\w.]+)[ \t]+import[ \t]+(\([^)]*\)|[^\n]*)", re.MULTILINE)
_COMMENT = re.compile(r"#[^\n]*")
_CONFIG = re.compile(r"\bconfigs?\b")
#: What makes the text alone useless: configs that are put together, or changed, by other code.
_UNKNOWN = re.compile(
    r"^configs?[ \t]*(?::[^=\n]+)?[+|]?=(?![ \t]*PatchConfig\()"
    r"|\.source_module[ \t]*=|\bglobals\(\)|\bimport[ \t]+\*",
    re.MULTILINE,
)
#: A module or pattern that may be, or match, one that is a target only where a config names it.
_NAMED = re.compile(r"""(["'])((?:transformers|trl|verl)\.[\w.*?!\[\]-]+)\1""")
_WILD = re.compile(r"[*?\[]")
_PATCHGEN = "patchgen"
_IMPORTED = re.compile(r"^(?:from[ \t]+([\w.]+)[ \t]+import\b|import[ \t]+([\w.]+))", re.MULTILINE)

#: An import that a config adds to the patched module.
_ADDED = re.compile(r"""\.add_import\(\s*["']([\w.]+)["']""")
_OTHERS = ("transformers", "torch", "veomni_hook")


def is_named(fullname: str) -> bool:
    """Whether the text of a config that the settings want names this module, or a pattern that matches it.

    It is asked for processing and configuration modules, which are targets only where a config names them:
    idioms do not look at them, so importing one costs a look at a set of names, which is usually empty.

    Registered configs are not asked: `State.is_registered` knows their modules.
    """
    if STATE.named is None:
        settings = current_settings()
        announced = (point.value for point in in_force(PATCHES, settings.plugins))
        STATE.named = frozenset().union(*map(named_by, (*settings.patches, *announced)))
    return any(fnmatchcase(fullname, name) for name in STATE.named)


def may_be_for(name: str, target: str) -> bool:
    """Whether a config module may hold a config for a target; true if its text does not tell.

    Args:
        name: the config module, with `:attribute` if one is chosen.
        target: the module that is imported.
    """
    if is_target_if_named(target):
        return any(fnmatchcase(target, pattern) for pattern in named_by(name))
    module, _, attribute = name.partition(":")
    sources = None if attribute else _sources(module, tuple(sys.path))
    return sources is None or target in sources


def named_by(name: str) -> frozenset[str]:
    """The processing and configuration modules, and the patterns of modules, that a config's text names.

    For these modules, a config is loaded only if its text, or that of a module that it takes configs from,
    has the name or pattern as one string.
    """
    return _named(name.partition(":")[0], tuple(sys.path))


def half_imported(name: str) -> str:
    """The first module that a config made for patchgen imports and that is being imported now; usually empty.

    Other configs are loaded in any case, unless their code or the patched module imports it: what imports the
    target may keep its classes and would never see the patched ones.
    """
    for imported in _imports(name.partition(":")[0], tuple(sys.path)):
        if is_being_imported(imported):
            return imported
    return ""


def is_being_imported(module: str) -> bool:
    """Whether a module is in `sys.modules` but not complete."""
    spec = getattr(sys.modules.get(module), "__spec__", None)
    return bool(getattr(spec, "_initializing", False))


@cache
def _sources(module: str, path: tuple[str, ...]) -> frozenset[str] | None:
    """The modules that the configs of a config module are for; None if its text does not tell."""
    patched: set[str] = set()
    seen: set[str] = set()
    pending = [module]
    while pending:  # configs may be taken from other modules, also in a circle, which loading them reports
        here = pending.pop()
        seen.add(here)
        told = _told(_text(here, path))
        if told is None:
            return None
        patched |= told[0]
        pending += told[1] - seen
    # A config for a module that is not installed is loaded, so that a warning can say so.
    known = all(
        (is_target(name) or is_target_if_named(name)) and locate(name) is not None for name in patched
    )
    return frozenset(patched) if known else None


@cache
def _named(module: str, path: tuple[str, ...]) -> frozenset[str]:
    names: set[str] = set()
    pending = [module]
    for here in pending:  # the list grows during the loop
        text = _text(here, path) or ""
        names.update(name for _, name in _NAMED.findall(text))
        pending += sorted(_taken_from(text) - {*pending})
    patterns = {name for name in names if _WILD.search(name)}
    others = {name for name in patterns if not name.rpartition(".")[2].startswith("modeling_")}
    return frozenset(others.union(filter(is_target_if_named, names)))


def _taken_from(text: str) -> set[str]:
    """The modules that a text takes configs from."""
    return {
        other
        for other, names in _TAKEN.findall(text)
        if _CONFIG.search(_COMMENT.sub("", names)) and not other.startswith(("transformers.", "."))
    }


def _told(text: str | None) -> tuple[set[str], set[str]] | None:
    """The modules a text makes configs for, and those it takes configs from; None if it is unknown."""
    if text is None or _UNKNOWN.search(text):
        return None
    sources = _SOURCE.findall(text)
    taken = _taken_from(text)
    if len(sources) != len(_MADE.findall(text)) or not (sources or taken):
        return None
    return {name for _, name in sources}, taken


@cache
def _imports(module: str, path: tuple[str, ...]) -> tuple[str, ...]:
    """What a config made for patchgen imports; for another config, what its patched module imports.

    And, for a config that takes code from one made for patchgen, what that imports.
    """
    text = _text(module, path) or ""
    names = dict.fromkeys(taken_from or imported for taken_from, imported in _IMPORTED.findall(text))
    needed = dict.fromkeys(_ADDED.findall(text))
    for name in names:
        if _PATCHGEN in text:
            needed[name] = None
        elif not name.startswith(_OTHERS) and _PATCHGEN in (_text(name, path) or ""):
            needed |= dict.fromkeys(_imports(name, path))
    return tuple(name for name in needed if not name.startswith(_OTHERS))


@cache
def _text(module: str, path: tuple[str, ...]) -> str | None:
    spec = locate(module)
    if spec is None or not spec.origin or not spec.origin.endswith(".py"):
        return None
    try:
        with open(spec.origin, encoding="utf-8") as file:
            return file.read()
    except (OSError, ValueError):
        return None
