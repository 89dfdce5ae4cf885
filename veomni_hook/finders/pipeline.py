"""What happens when a module is imported: name → upstream spec → key → store → (build →) loader.

A cache hit uses neither `ast` nor a config; `build` handles a miss. The import statement raises errors in
patches, but never errors in the cache.
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
from veomni_hook.finders.nested import LOADING
from veomni_hook.finders.outcome import Outcome
from veomni_hook.finders.peek import half_made, may_be_for
from veomni_hook.finders.state import STATE
from veomni_hook.finders.upstream import Upstream, find_upstream, read_upstream
from veomni_hook.patches.models import spec_modules
from veomni_hook.plugins import PATCHES, give_up, in_force
from veomni_hook.settings import Settings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from veomni_hook.finders.configs import Loaded

__all__ = ["Upstream", "read_upstream"]

#: Reason why a module has no patched form although nothing is wrong.
NOTHING = "no patch applies"


def find_patched(
    finder: PatchFinder, fullname: str, path: Sequence[str] | None, target: ModuleType | None
) -> ModuleSpec | None:
    """Return the spec for a target: the patched module's, or upstream's if nothing applies."""
    STATE.asked.add(fullname)
    if LOADING.nested is not None and not _only_built_in(fullname):
        LOADING.nested.append(fullname)
        return None
    if waits_for := _half_made(fullname):
        finder.unsettled[fullname] = waits_for
        return None
    spec = find_upstream(finder, fullname, path, target)
    if spec is None:
        return None
    if is_remote(fullname):
        from veomni_hook.finders.remote import patching

        return patching(fullname, spec)
    loader = patched_loader(fullname, spec)
    return spec if loader is None else loader.spec()


def _only_built_in(fullname: str) -> bool:
    """Whether no config but ours may be for a target.

    Then configs that import it while they load get it patched, and it stays. Other modules keep its classes:
    a second `PreTrainedConfig`, or a second `AutoModel`, would not be the first one.
    """
    if any(config.applies_to(fullname) for config in STATE.registered):
        return False
    return all(name.startswith("veomni_hook.") for name in config_names(fullname, current_settings()))


def _half_made(fullname: str) -> str:
    """The module that a target's configs import and that is importing the target right now; usually empty.

    Neither the configs nor their code in the patched module could be imported now.
    """
    settings = current_settings()
    if not settings.patches:
        return ""
    return next(filter(None, map(half_made, config_names(fullname, settings))), "")


def settle(finder: PatchFinder) -> None:
    """Forget the targets that were served unpatched for a module that was half made and is complete now."""
    ready = [
        name
        for name, waits_for in finder.unsettled.items()
        if not getattr(getattr(sys.modules.get(waits_for), "__spec__", None), "_initializing", False)
    ]
    for name in ready:  # first of all: what follows imports, too
        del finder.unsettled[name]
    if ready:
        from veomni_hook.finders.configs import forget

        forget(ready)


def patched_loader(fullname: str, spec: ModuleSpec) -> PatchedLoader | None:
    """Return the loader of a module's patched form, or None if nothing applies; record the outcome."""
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
    loader = _loader_of(upstream, spec, found, settings)
    STATE.outcomes[fullname] = found[0]
    if settings.banner and (STATE.registered or settings.patches):
        from veomni_hook.finders import banner

        banner.module_is_patched(fullname)
    return loader


def patched_form(fullname: str, spec: ModuleSpec) -> tuple[PatchedLoader, Outcome] | str:
    """Return the patched form's loader for a module that is loaded unpatched; the outcome is not recorded.

    A string says why there is none; it is `NOTHING` if no patch applies.
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
    return found if isinstance(found, str) else (_loader_of(upstream, spec, found, settings), found[0])


def _loader_of(
    upstream: Upstream,
    spec: ModuleSpec,
    found: tuple[Outcome, str | None, CodeType | None],
    settings: Settings,
) -> PatchedLoader:
    import veomni_hook.kernels.selection.process_choice  # noqa: F401 - the first patched module brings the first slots

    bind_slots()
    outcome, text, code = found
    if outcome.consult:
        from veomni_hook.finders.companions import prepare_execution

        prepare_execution(outcome.report, settings)
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
    """Whether importing this module now would execute patched source."""
    settings = current_settings()
    if not _in_question(fullname, settings):
        return False
    upstream, _ = read_upstream(fullname, spec)
    return upstream is not None and not isinstance(lookup_or_build(upstream, settings), str)


def config_names(fullname: str, settings: Settings) -> tuple[str, ...]:
    """Names of the config modules to load for a target: built-in specs, settings, entry points."""
    builtin = () if fullname == REMOTE_LOADING and not settings.remote_code else spec_modules(fullname)
    given = (*settings.patches, *announced_configs(settings))
    return (*builtin, *(name for name in given if may_be_for(name, fullname)))


def load_configs(fullname: str, settings: Settings) -> tuple[tuple[str, ...], list[Loaded]]:
    """Load the config modules for a target; plugins that fail are skipped from then on.

    Raises:
        ConfigError: one that the settings name cannot be loaded; in strict mode also a plugin.
    """
    from veomni_hook.finders import configs

    while True:
        names = config_names(fullname, settings)
        try:
            return names, configs.load(names, configs.points_in_force(settings.plugins, settings.patches))
        except configs.PluginError as error:
            give_up(error.point, error, strict=settings.strict)


def asks_idioms(upstream: Upstream, settings: Settings) -> bool:
    """Whether idioms run on a module: it must hold model code that computes with tensors."""
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
    """Warn once per process that the cache cannot be used, with the consequence and the remedy.

    Args:
        found: the cache; no warning if it stored everything it had to.
        temporary: whether a temporary folder is used instead.
    """
    if not found.refused:
        return
    now = "are patched in memory at each start"
    if temporary or found.mode == "temporary":
        now = "are kept in a temporary folder until this process ends, and every start patches them again"
    warn_once(
        f"the cache of patched modules cannot be used: {found.refused}. Modules {now}, so imports are "
        "slower. Fix: free space there, make the folder writable only for this user, or name another one in "
        "VEOMNI_CACHE_DIR",
        about="cache",
    )


def device_of(settings: Settings) -> str:
    """Which of a GPU/NPU pair of configs applies: the setting, or `npu` if torch_npu is installed."""
    if settings.device != "auto":
        return settings.device
    if "torch_npu" in sys.modules:
        return "npu"
    from importlib.util import find_spec

    return "npu" if find_spec("torch_npu") else "gpu"


def stage1(upstream: Upstream, settings: Settings, names: Sequence[str]) -> str:
    """The first-stage key: everything that affects the output and is known without loading a config."""
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
        consult=hit.consult,
    )


def announced_configs(settings: Settings) -> tuple[str, ...]:
    """Names of the config modules that installed distributions announce and that are in force."""
    return tuple(point.value for point in in_force(PATCHES, settings.plugins))


def _in_question(fullname: str, settings: Settings) -> bool:
    """Whether a module can be patched at all, judging by its name."""
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
    """Return the outcome with text and code of the patched module, or the reason why nothing applies."""
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
    missed = found.reason if isinstance(found, Miss) else _outdated(found)
    if isinstance(found, Hit) and not missed:
        return from_hit(found, upstream, "hit", ""), None, found.code
    from veomni_hook.finders.build import build

    return build(upstream, settings, names, stage, missed)


def _outdated(found: Hit) -> str:
    """Why an entry is no longer right although its inputs are: a package that it wanted is installed now."""
    if not found.consult:
        return ""
    from veomni_hook.finders.locate import locate

    installed = [name for name in found.report["wanting"] if locate(name) is not None]
    return f"{', '.join(installed)} is installed now" if installed else ""


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
