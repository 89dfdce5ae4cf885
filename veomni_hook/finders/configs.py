"""How patch configs are loaded: built-in specs, and what settings, entry points and `register` name."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING

from veomni_hook import plugins
from veomni_hook.errors import ConfigError
from veomni_hook.finders import tracebacks
from veomni_hook.finders.applicable import config_names, is_builtin
from veomni_hook.finders.config_text import is_being_imported
from veomni_hook.finders.loading_guard import serving_upstream
from veomni_hook.finders.patchgen import MODULES, serving_patchgen
from veomni_hook.finders.recording import record
from veomni_hook.finders.state import STATE
from veomni_hook.patches.adopt import adopt, is_patch_config
from veomni_hook.patches.spec import PatchConfig
from veomni_hook.settings import Settings

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
    names = tuple(names)
    watched = [name for name in names if not is_builtin(name)]
    with serving_upstream(), serving_patchgen(), record(watched):
        return [_load_announced(name, points[name]) if name in points else _load(name) for name in names]


def load_for(fullname: str, settings: Settings) -> tuple[tuple[str, ...], list[Loaded]]:
    """Load the config modules for a module; plugins that fail are left out from then on.

    Returns:
        The names of the config modules, and what they hold.

    Raises:
        ConfigError: one that the settings name cannot be loaded; in strict mode also a plugin.
    """
    while True:
        names = config_names(fullname, settings)
        try:
            return names, load(names, points_in_force(settings.plugins, settings.patches))
        except PluginError as error:
            plugins.give_up(error.point, error, strict=settings.strict)


def points_in_force(setting: str, named: Iterable[str] = ()) -> dict[str, EntryPoint]:
    """The entry points in force that announce config modules, by name, except those ``named`` by hand."""
    points = plugins.in_force(plugins.PATCHES, setting)
    return {point.value: point for point in points if point.value not in named}


def as_configs(holder: object, where: str) -> tuple[PatchConfig, ...]:
    """Return the config that an object is, or the configs that it holds.

    Args:
        holder: a config (ours or patchgen's), a list of them, or a module with `config` or `configs`.
        where: what the error names.

    Raises:
        ConfigError: there is no config.
    """
    if isinstance(holder, ModuleType):
        bound = [
            _snapshot(holder.__name__, name, getattr(holder, name))
            for name in ("config", "configs")
            if hasattr(holder, name)
        ]
        if not bound:
            raise ConfigError(
                "the module has no patch config",
                where=where,
                fix="bind a PatchConfig to the name `config`, or name it: package.module:name",
            )
        return tuple(config for value in bound for config in as_configs(value, where))
    if isinstance(holder, list | tuple):
        return tuple(config for value in holder for config in as_configs(value, where))
    if not is_patch_config(holder):
        raise ConfigError(
            f"{type(holder).__name__} object is not a patch config",
            where=where,
            fix="pass a veomni_hook.PatchConfig, or one made with the patchgen package",
        )
    return (adopt(holder),)


def _snapshot(module: str, name: str, value: object) -> object:
    """A config made for patchgen as it is when its module has just been loaded; anything else as it is.

    The config of a module for another device may be the same object, which that module changes.
    """
    if not is_patch_config(value) or (isinstance(value, PatchConfig) and not value.lenient):
        return value
    snapshot = _SNAPSHOTS.get((module, name))
    if snapshot is None or snapshot[0] is not value:
        snapshot = _SNAPSHOTS[module, name] = value, adopt(value, f"{module}:{name}")
    return snapshot[1]


def _load(name: str) -> Loaded:
    module_name, _, attribute = name.partition(":")
    if module_name.endswith(".py"):
        there = os.path.isfile(module_name)
        meant = os.path.relpath(module_name).removesuffix(".py").replace(os.sep, ".")
        raise ConfigError(
            f"{module_name} is a file, not a module" if there else f"there is no file {module_name}",
            where=f"config {name}",
            fix=f"name the module: {meant}" if there else "name a module that Python can import",
        )
    try:
        module = importlib.import_module(module_name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit too: a config must not decide whether the script runs
        failed = ConfigError(
            f"the patch config {module_name} cannot be imported: {type(error).__name__}: {error}",
            where=", ".join(filter(None, (f"config module {module_name}", tracebacks.innermost(error)))),
            fix=_import_fix(module_name, error),
        )
        lacking = getattr(error, "obj", error)  # a module without an attribute, or an ImportError
        failed.waits_for = _of_the_script(getattr(lacking, "__name__", getattr(lacking, "name", None)))
        raise failed from error
    try:
        if attribute and not hasattr(module, attribute):
            raise ConfigError(
                f"{module.__name__} has no attribute {attribute!r}",
                where=f"config {name}",
                fix="name an attribute of that module that holds a PatchConfig",
            )
        holder = getattr(module, attribute) if attribute else module
        return Loaded(name, module, as_configs(holder, where=f"config {name}"))
    except ConfigError as error:
        error.waits_for = _of_the_script(module_name)
        raise


def _of_the_script(module: str | None) -> str:
    """The module, if it is being imported, and not because configs load; otherwise empty."""
    return module if module and is_being_imported(module) and module not in STATE.executed else ""


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
        if error.waits_for:
            raise
        raise PluginError(error.what, point=point) from error
    said = f", {plugins.described(point)}, which VEOMNI_PLUGINS=0 leaves out"
    for config in loaded.configs:
        config.origin = config.origin.removesuffix(said) + said
    return loaded


def with_registered(loaded: Sequence[Loaded]) -> list[PatchConfig]:
    """All configs in the order in which they apply: built-in and named ones first, then registered ones."""
    return [config for config_module in loaded for config in config_module.configs] + STATE.registered
