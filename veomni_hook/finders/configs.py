"""Where patch configs come from, and how they are loaded: built-in specs, settings, entry points, `register`.

Configs are Python modules that may import transformers, even the module that they patch. Target modules
imported while configs load are served unpatched and afterwards removed from `sys.modules`, so that the next
import finds the patched form.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType, MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any

from veomni_hook import plugins
from veomni_hook.errors import ConfigError, VeomniHookWarning
from veomni_hook.finders import tracebacks
from veomni_hook.finders.loading_guard import LOADING
from veomni_hook.finders.patchgen import MODULES, serving_patchgen
from veomni_hook.patches.adopt import adopt, is_patch_config
from veomni_hook.patches.spec import PatchConfig

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

#: For each module and name: the config that was bound there, and its adopted form.
_SNAPSHOTS: dict[tuple[str, str], tuple[object, PatchConfig]] = {}
_NO_POINTS: Mapping[str, EntryPoint] = MappingProxyType({})


class PluginError(ConfigError):
    """A config module that a distribution announces cannot be loaded; ``point`` is its entry point."""

    def __init__(self, what: str, *, point: EntryPoint) -> None:
        super().__init__(what, where=plugins.described(point), fix=plugins.remedy(point))
        self.point = point


@dataclass(frozen=True)
class Loaded:
    """The configs of one config module.

    Attributes:
        name: the module's name, with `:attribute` if one was given.
        module: the module.
        configs: its configs; patchgen configs are adopted.
    """

    name: str
    module: ModuleType
    configs: tuple[PatchConfig, ...]


def load(names: Iterable[str], points: Mapping[str, EntryPoint] = _NO_POINTS) -> list[Loaded]:
    """Import config modules by name (`package.module` or `package.module:attribute`).

    Args:
        names: the config modules.
        points: the entry points of those modules that installed distributions announce.

    Raises:
        ConfigError: a module cannot be imported, or holds no patch config; PluginError if it is announced.
    """
    with serving_upstream(), serving_patchgen():
        return [_load_announced(name, points[name]) if name in points else _load(name) for name in names]


def points_in_force(setting: str, named: Iterable[str] = ()) -> dict[str, EntryPoint]:
    """The entry points in force that announce config modules, by name, except those ``named`` by hand."""
    found = plugins.in_force(plugins.PATCHES, setting)
    return {point.value: point for point in found if point.value not in named}


def as_configs(found: Any, where: str) -> tuple[PatchConfig, ...]:
    """Return the config that an object is, or the configs that it holds.

    Args:
        found: a config (ours or patchgen's), a list of them, or a module with `config` or `configs`.
        where: what the error names.

    Raises:
        ConfigError: there is no config.
    """
    if isinstance(found, ModuleType):
        held = [
            _snapshot(found.__name__, name, getattr(found, name))
            for name in ("config", "configs")
            if hasattr(found, name)
        ]
        if not held:
            raise ConfigError(
                "the module has no patch config",
                where=where,
                fix="bind a PatchConfig to the name `config`, or name it: package.module:name",
            )
        return tuple(config for one in held for config in as_configs(one, where))
    if isinstance(found, list | tuple):
        return tuple(config for one in found for config in as_configs(one, where))
    if not is_patch_config(found):
        raise ConfigError(
            f"{type(found).__name__} object is not a patch config",
            where=where,
            fix="pass a veomni_hook.PatchConfig, or one made with the patchgen package",
        )
    return (adopt(found),)


def _snapshot(module: str, name: str, found: Any) -> Any:
    """A config made for patchgen as it is when its module has just been loaded; anything else as it is.

    The config of a module for another device may be the same object, which that module changes.
    """
    if not is_patch_config(found) or (isinstance(found, PatchConfig) and not found.lenient):
        return found
    taken = _SNAPSHOTS.get((module, name))
    if taken is None or taken[0] is not found:
        taken = _SNAPSHOTS[module, name] = found, adopt(found, f"{module}:{name}")
    return taken[1]


def _load(name: str) -> Loaded:
    module_name, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit too: a config must not decide whether the script runs
        raise ConfigError(
            f"the patch config {module_name} cannot be imported: {type(error).__name__}: {error}",
            where=", ".join(filter(None, (f"config module {module_name}", tracebacks.innermost(error)))),
            fix=_import_fix(module_name, error),
        ) from error
    found: Any = module
    if attribute:
        try:
            found = getattr(module, attribute)
        except AttributeError:
            raise ConfigError(
                f"{module_name} has no attribute {attribute!r}",
                where=f"config {name}",
                fix="name an attribute of that module that holds a PatchConfig",
            ) from None
    return Loaded(name, module, as_configs(found, where=f"config {name}"))


def _import_fix(module_name: str, error: BaseException) -> str:
    """What to do about a config module that cannot be imported; names a missing package."""
    missing = error
    while missing.__cause__ is not None and not isinstance(missing, ModuleNotFoundError):
        missing = missing.__cause__
    package = (missing.name or "").partition(".")[0] if isinstance(missing, ModuleNotFoundError) else ""
    if package and package != module_name.partition(".")[0]:
        return f"install the package that provides {package}, which the config imports"
    if isinstance(error, ImportError) and error.name in MODULES:
        return "install patchgen from VeOmni's repository: veomni-hook serves only what declares patches"
    return "correct the module, or remove it from VEOMNI_PATCHES / the settings file"


def _load_announced(name: str, point: EntryPoint) -> Loaded:
    """Load a config module that a distribution announces; messages about it name the distribution."""
    try:
        loaded = _load(name)
    except ConfigError as error:
        raise PluginError(error.what, point=point) from error
    said = f", {plugins.described(point)}, which VEOMNI_PLUGINS=0 leaves out"
    for config in loaded.configs:
        config.origin = config.origin.removesuffix(said) + said
    return loaded


@contextmanager
def serving_upstream() -> Iterator[None]:
    """Serve targets unpatched within the block, and remove them from `sys.modules` after it."""
    if LOADING.nested is not None:  # a config that loads configs
        yield
        return
    LOADING.nested = []
    before = set(sys.modules)
    try:
        yield
    finally:
        nested, LOADING.nested = LOADING.nested, None
        if nested:
            forget(dict.fromkeys(nested), set(sys.modules) - before)


def forget(names: Iterable[str], fresh: Collection[str] = ()) -> None:
    """Remove unpatched targets from `sys.modules` and from the places that cached a reference to them.

    transformers' lazy packages keep every resolved class as an attribute; those must be resolved again. An
    ordinary module that imported such a class keeps the unpatched one; a warning names it if it is one of
    transformers' own and ``fresh``, that is imported since.
    """
    gone = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    holders = []
    for holder_name, holder in list(sys.modules.items()):
        if not isinstance(holder, ModuleType):
            continue
        taken = [key for key, value in list(vars(holder).items()) if _comes_from(value, gone)]
        if not taken:
            continue
        lazy = hasattr(holder, "_class_to_module")  # transformers' lazy module resolves a name again
        for key in list(taken):
            if lazy or f"{holder_name}.{key}" in gone:
                delattr(holder, key)
                taken.remove(key)
        if taken and holder_name.startswith("transformers.") and holder_name in fresh:
            holders.append(f"{holder_name} ({', '.join(taken)})")
    if holders:
        warnings.warn(
            "imported by a patch config before its targets were patched, so they contain unpatched code: "
            + "; ".join(holders)
            + ". Import them in the config inside the functions that need them.",
            VeomniHookWarning,
            stacklevel=2,
        )


def _comes_from(value: object, modules: dict[str, ModuleType]) -> bool:
    # By type alone: reading an attribute of some objects warns (torch.distributed.reduce_op).
    if issubclass(type(value), ModuleType):
        return any(value is module for module in modules.values())
    if not issubclass(type(value), type | FunctionType):
        return False
    home = modules.get(getattr(value, "__module__", None) or "")
    return home is not None and vars(home).get(getattr(value, "__name__", "")) is value


def for_module(loaded: Sequence[Loaded], registered: Sequence[PatchConfig]) -> list[PatchConfig]:
    """All configs in the order in which they apply: built-in and named ones first, then registered ones."""
    return [config for one in loaded for config in one.configs] + list(registered)
