"""The way of a module through the house: name → upstream spec → key → store → (build →) loader.

A hit touches neither `ast` nor a config; what a miss does is in `build`. An error in a patch leaves through
the import statement; an error in the cache never does.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import CodeType, ModuleType

from veomni_hook.cache import key
from veomni_hook.cache.store import Hit, Store, Unpatched, open_store
from veomni_hook.errors import VeomniHookError
from veomni_hook.finders.finder import PatchFinder
from veomni_hook.finders.handle import bind_slots, current_settings
from veomni_hook.finders.loader import PatchedLoader
from veomni_hook.finders.log import warn
from veomni_hook.finders.nested import nested_import
from veomni_hook.finders.outcome import Outcome
from veomni_hook.finders.state import STATE
from veomni_hook.patches.models import spec_modules
from veomni_hook.settings import Settings

ENTRY_POINT_GROUP = "veomni_hook.patches"


@dataclass(frozen=True)
class Upstream:
    """The installed source of a target module, read but not decoded."""

    module: str
    path: str
    data: bytes
    distribution: str
    version: str


def find_patched(
    finder: PatchFinder, fullname: str, path: Sequence[str] | None, target: ModuleType | None
) -> ModuleSpec | None:
    """Answer `find_spec` for a target: the patched module's spec, or upstream's where nothing applies."""
    if nested_import(fullname):
        return None
    STATE.asked.add(fullname)
    spec = _find_upstream(finder, fullname, path, target)
    if spec is None:
        return None
    settings = current_settings()
    names = config_names(fullname, settings)
    registered = [config for config in STATE.registered if config.source_module == fullname]
    if not settings.enabled or not (names or registered):
        return spec
    upstream, reason = read_upstream(fullname, spec)
    if upstream is None:
        _left_alone(fullname, spec, reason, settings)
        return spec
    if settings.dump_patched:
        from veomni_hook.finders.dump import dump

        dump(upstream, settings)
    found = _lookup_or_build(upstream, settings, names)
    if isinstance(found, str):
        STATE.outcomes[fullname] = Outcome(fullname, patched=False, reason=found, origin=upstream.path)
        return spec
    import veomni_hook.kernels.state  # noqa: F401 - the first patched module brings the first slots

    bind_slots()
    outcome, text, code = found
    STATE.outcomes[fullname] = outcome
    foreign = spec.loader if isinstance(spec.loader, SourceFileLoader) else None
    return PatchedLoader(
        fullname,
        outcome.stored or upstream.path,
        text=text,
        code=code,
        upstream=upstream.path,
        foreign=None if type(foreign) is SourceFileLoader else foreign,
    ).spec()


def config_names(fullname: str, settings: Settings) -> tuple[str, ...]:
    """Names of the config modules to ask about a target: built-in specs, settings, entry points."""
    return (*spec_modules(fullname), *settings.patches, *announced())


def read_upstream(fullname: str, spec: ModuleSpec) -> tuple[Upstream | None, str]:
    """Read the source behind a spec; None with the reason where there is none to patch."""
    loader = spec.loader
    if not isinstance(loader, SourceFileLoader):
        return None, f"no source file: loaded by {type(loader).__name__} from {spec.origin}"
    try:
        data = loader.get_data(loader.path)
    except OSError as error:
        return None, f"the source cannot be read: {error}"
    distribution = fullname.partition(".")[0]
    root = os.path.join(loader.path, *[os.pardir] * fullname.count("."))
    return Upstream(fullname, loader.path, data, distribution, _version(distribution, root)), ""


def store() -> Store:
    """The cache of this process, opened at first use."""
    if STATE.store is None:
        STATE.store = open_store(current_settings().cache_dir)
        if STATE.store.reason:
            warn(STATE.store.reason)
    return STATE.store


def device_of(settings: Settings) -> str:
    """Which of a GPU/NPU pair of configs applies: the setting, or `npu` where torch_npu is installed."""
    if settings.device != "auto":
        return settings.device
    if "torch_npu" in sys.modules:
        return "npu"
    from importlib.util import find_spec

    return "npu" if find_spec("torch_npu") else "gpu"


def stage1(upstream: Upstream, settings: Settings, names: Sequence[str]) -> str:
    """The first-stage key: everything that shapes the output and can be known without loading a config."""
    inprocess: list[tuple[str, str]] = []
    registered = [config for config in STATE.registered if config.source_module == upstream.module]
    if registered:
        from veomni_hook.finders.inputs import config_digest

        inprocess = [(config.source_module, config_digest(config)) for config in registered]
    return key.stage1_key(
        module=upstream.module,
        upstream=upstream.data,
        engine=key.engine_digest(),
        settings={"device": device_of(settings)},
        config_names=[_with_origin(name) for name in names],
        inprocess=inprocess,
        distribution=upstream.distribution,
        version=upstream.version,
        astor_version=_installed("astor"),
    )


def _find_upstream(
    finder: PatchFinder, fullname: str, path: Sequence[str] | None, target: ModuleType | None
) -> ModuleSpec | None:
    # Every finder but ours in turn, not PathFinder alone: editable installs and other hooks have their own.
    for other in list(sys.meta_path):
        if other is finder or isinstance(other, PatchFinder):
            continue
        spec = other.find_spec(fullname, path, target)
        if spec is not None:
            return spec
    return None


def _lookup_or_build(
    upstream: Upstream, settings: Settings, names: Sequence[str]
) -> tuple[Outcome, str | None, CodeType | None] | str:
    """Return the outcome with text and code of the patched module, or why nothing applies."""
    stage = stage1(upstream, settings, names)
    found = store().lookup(stage, upstream.module)
    if isinstance(found, Unpatched):
        return "no patch applies"
    if isinstance(found, Hit):
        return from_hit(found, upstream, "hit", ""), None, found.code
    from veomni_hook.finders.build import build

    return build(upstream, settings, names, stage, found.reason)


def from_hit(hit: Hit, upstream: Upstream, cache: str, reason: str) -> Outcome:
    """Return the outcome of a module that is in the cache."""
    return Outcome(
        upstream.module,
        patched=True,
        reason=reason,
        cache=cache,
        origin=upstream.path,
        stored=hit.path,
        patch_hash=hit.patch_hash,
        report=lambda: hit.report,
    )


def _left_alone(fullname: str, spec: ModuleSpec, reason: str, settings: Settings) -> None:
    STATE.outcomes[fullname] = Outcome(fullname, patched=False, reason=reason, origin=spec.origin or "")
    if settings.strict:
        raise VeomniHookError(
            f"{fullname} cannot be patched: {reason}",
            where=spec.origin or fullname,
            fix="install transformers as source files, or unset VEOMNI_STRICT to run it unpatched",
        )
    warn(f"{fullname} is left unpatched: {reason}")


def _with_origin(name: str) -> str:
    """A config's name with its file: two projects may both have a `my_patches`."""
    module = name.partition(":")[0]
    if module.startswith("veomni_hook."):
        return name  # the engine digest covers the built-in specs
    loaded = sys.modules.get(module)
    return f"{name} {getattr(loaded, '__file__', None) if loaded else _origin(module, tuple(sys.path))}"


@cache
def _origin(module: str, path: tuple[str, ...]) -> str | None:
    from veomni_hook.finders.locate import locate

    spec = locate(module)
    return None if spec is None else spec.origin


@cache
def announced() -> tuple[str, ...]:
    """Names of the config modules that installed distributions announce by entry point."""
    # Reading every distribution's entry points costs milliseconds; they cannot change under a process.
    from importlib.metadata import entry_points

    return tuple(sorted(point.value for point in entry_points(group=ENTRY_POINT_GROUP)))


def _version(distribution: str, root: str = "") -> str:
    """The version of what is imported: a checkout on PYTHONPATH may shadow the installed distribution."""
    module = sys.modules.get(distribution)
    version = getattr(module, "__version__", None)
    if isinstance(version, str):
        return version
    if root:
        try:
            with open(os.path.normpath(os.path.join(root, "__init__.py")), encoding="utf-8") as file:
                found = re.search(r"^__version__\s*=\s*[\"']([^\"']+)[\"']", file.read(), re.MULTILINE)
        except OSError:
            found = None
        if found:
            return found[1]
    return _installed(distribution)


@cache
def _installed(distribution: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(distribution)
    except PackageNotFoundError:
        return "unknown"
