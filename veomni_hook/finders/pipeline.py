"""What happens to a module that is imported: name → upstream spec → key → store → (build →) loader.

A hit touches neither `ast` nor a config; what a miss does is in `build`. An error in a patch leaves through
the import statement; an error in the cache never does.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import CodeType, ModuleType

from veomni_hook.cache import key
from veomni_hook.cache.store import Hit, Miss, Store, Unpatched, open_store
from veomni_hook.errors import VeomniHookError
from veomni_hook.finders.finder import REMOTE_LOADING, PatchFinder, is_remote, is_target
from veomni_hook.finders.handle import bind_slots, current_settings
from veomni_hook.finders.loader import PatchedLoader
from veomni_hook.finders.log import warn, warn_once
from veomni_hook.finders.nested import nested_import
from veomni_hook.finders.outcome import Outcome
from veomni_hook.finders.state import STATE
from veomni_hook.finders.upstream import Upstream, find_upstream, read_upstream
from veomni_hook.patches.models import spec_modules
from veomni_hook.plugins import PATCHES, give_up, in_force
from veomni_hook.settings import Settings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from veomni_hook.finders.configs import Loaded

__all__ = ["Upstream", "read_upstream"]

#: Why a module has no patched form, where nothing is wrong.
NOTHING = "no patch applies"


def find_patched(
    finder: PatchFinder, fullname: str, path: Sequence[str] | None, target: ModuleType | None
) -> ModuleSpec | None:
    """Answer `find_spec` for a target: the patched module's spec, or upstream's where nothing applies."""
    STATE.asked.add(fullname)
    if nested_import(fullname):
        return None
    spec = find_upstream(finder, fullname, path, target)
    if spec is None:
        return None
    if is_remote(fullname):
        from veomni_hook.finders.remote import patching

        return patching(fullname, spec)
    loader = patched_loader(fullname, spec)
    return spec if loader is None else loader.spec()


def patched_loader(fullname: str, spec: ModuleSpec) -> PatchedLoader | None:
    """Return the loader of a module's patched form, or None where nothing applies; notes the outcome."""
    settings = current_settings()
    if not _in_question(fullname, settings):
        return None
    upstream, reason = read_upstream(fullname, spec)
    if upstream is None:
        _left_alone(fullname, spec, reason, settings)
        return None
    if settings.dump_patched:
        from veomni_hook.finders.dump import dump

        dump(upstream, settings)
    found = lookup_or_build(upstream, settings)
    if isinstance(found, str):
        STATE.outcomes[fullname] = Outcome(fullname, patched=False, reason=found, origin=upstream.path)
        return None
    loader = _loader_of(upstream, spec, found)
    STATE.outcomes[fullname] = found[0]
    if settings.banner and (STATE.registered or settings.patches):
        from veomni_hook.finders import banner

        banner.module_is_patched(fullname)
    return loader


def patched_form(fullname: str, spec: ModuleSpec) -> tuple[PatchedLoader, Outcome] | str:
    """Return the loader of the patched form of a module that is loaded unpatched; nothing is noted.

    A string says why there is none; it is `NOTHING` where no patch applies.
    """
    settings = current_settings()
    if not _in_question(fullname, settings):
        return NOTHING
    upstream, reason = read_upstream(fullname, spec)
    if upstream is None:
        return reason
    if settings.dump_patched:
        from veomni_hook.finders.dump import dump

        dump(upstream, settings)
    found = lookup_or_build(upstream, settings)
    return found if isinstance(found, str) else (_loader_of(upstream, spec, found), found[0])


def _loader_of(
    upstream: Upstream, spec: ModuleSpec, found: tuple[Outcome, str | None, CodeType | None]
) -> PatchedLoader:
    import veomni_hook.kernels.state  # noqa: F401 - the first patched module brings the first slots

    bind_slots()
    outcome, text, code = found
    foreign = spec.loader if isinstance(spec.loader, SourceFileLoader) else None
    return PatchedLoader(
        upstream.module,
        outcome.stored or upstream.path,
        text=text,
        code=code,
        upstream=upstream.path,
        foreign=None if type(foreign) is SourceFileLoader else foreign,
    )


def would_patch(fullname: str, spec: ModuleSpec) -> bool:
    """Whether an import of this module, if there were one now, would execute patched source."""
    settings = current_settings()
    if not _in_question(fullname, settings):
        return False
    upstream, _ = read_upstream(fullname, spec)
    return upstream is not None and not isinstance(lookup_or_build(upstream, settings), str)


def config_names(fullname: str, settings: Settings) -> tuple[str, ...]:
    """Names of the config modules to ask about a target: built-in specs, settings, entry points."""
    builtin = () if fullname == REMOTE_LOADING and not settings.remote_code else spec_modules(fullname)
    return (*builtin, *settings.patches, *announced_configs(settings))


def load_configs(fullname: str, settings: Settings) -> tuple[tuple[str, ...], list[Loaded]]:
    """The config modules to ask about a target, loaded; plugins that fail are left out from now on.

    Raises:
        ConfigError: one that the settings name cannot be loaded; in strict mode a plugin, too.
    """
    from veomni_hook.finders import configs

    while True:
        names = config_names(fullname, settings)
        try:
            return names, configs.load(names, configs.points_in_force(settings.plugins, settings.patches))
        except configs.PluginError as error:
            give_up(error.point, error, strict=settings.strict)


def asks_idioms(upstream: Upstream, settings: Settings) -> bool:
    """Whether idioms are asked about a module: where models' code is, if it computes with tensors at all."""
    return _has_models_code(upstream.module, settings) and (
        upstream.uses_torch or upstream.module == "transformers.configuration_utils"
    )


def store() -> Store:
    """The cache of this process, opened at first use."""
    if STATE.store is None:
        STATE.store = open_store(current_settings().cache_dir, process=STATE.process)
        report_refusal(STATE.store)
    return STATE.store


def report_refusal(found: Store, *, temporary: bool = False) -> None:
    """Warn once a process that the cache cannot be used, with what happens now and what to do.

    Args:
        found: the cache; nothing is said if it has stored whatever it had to.
        temporary: whether what was refused went into a temporary folder.
    """
    if not found.refused:
        return
    now = "are patched in memory at each start"
    if temporary or found.mode == "temporary":
        now = "are kept in a temporary folder until this process ends, and patched anew at each start"
    warn_once(
        f"the cache of patched modules cannot be used: {found.refused}. Modules {now}, so imports are "
        "slower. Fix: free space there, make the folder writable for this user alone, or name another one in "
        "VEOMNI_CACHE_DIR",
        about="cache",
    )


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
    registered = [config for config in STATE.registered if config.applies_to(upstream.module)]
    if registered:
        from veomni_hook.finders.inputs import config_digest

        inprocess = [(config.source_module, config_digest(config)) for config in registered]
    idioms = "1" if asks_idioms(upstream, settings) else "0"
    return key.stage1_key(
        module=upstream.module,
        upstream=upstream.data,
        engine=key.engine_digest(),
        settings={"device": device_of(settings), "idioms": idioms},
        config_names=[_with_origin(name) for name in names],
        inprocess=inprocess,
        distribution=upstream.distribution,
        version=upstream.version,
    )


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


def announced_configs(settings: Settings) -> tuple[str, ...]:
    """Names of the config modules that installed distributions announce, as far as they are in force."""
    return tuple(point.value for point in in_force(PATCHES, settings.plugins))


def _in_question(fullname: str, settings: Settings) -> bool:
    """Whether a module can be patched at all, as far as its name tells."""
    if not settings.enabled:
        return False
    return (
        _has_models_code(fullname, settings)
        or bool(config_names(fullname, settings))
        or any(config.applies_to(fullname) for config in STATE.registered)
    )


def _has_models_code(fullname: str, settings: Settings) -> bool:
    known = (is_target(fullname) and fullname != REMOTE_LOADING) or is_remote(fullname)
    return settings.idioms and known


def lookup_or_build(
    upstream: Upstream, settings: Settings
) -> tuple[Outcome, str | None, CodeType | None] | str:
    """Return the outcome with text and code of the patched module, or why nothing applies."""
    names = config_names(upstream.module, settings)
    if not (
        asks_idioms(upstream, settings)
        or names
        or any(config.applies_to(upstream.module) for config in STATE.registered)
    ):
        return NOTHING
    stage = stage1(upstream, settings, names)
    found = store().lookup(stage, upstream.module)
    if not isinstance(found, Miss) and found.absent:
        from veomni_hook.finders.installed import report

        report(found.absent)
    if isinstance(found, Unpatched):
        return NOTHING
    if isinstance(found, Hit):
        return from_hit(found, upstream, "hit", ""), None, found.code
    from veomni_hook.finders.build import build

    return build(upstream, settings, names, stage, found.reason)


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
