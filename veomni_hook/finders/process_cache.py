"""The cache of this process, and the keys of modules in it."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Sequence
from functools import cache
from typing import TYPE_CHECKING

from veomni_hook.cache import key
from veomni_hook.cache.store import Hit, Miss, Store, Unpatched, open_store
from veomni_hook.finders.applicable import is_builtin, registered_for
from veomni_hook.finders.log import warn_once
from veomni_hook.finders.outcome import Outcome
from veomni_hook.finders.settings_in_force import current_settings
from veomni_hook.finders.state import STATE
from veomni_hook.finders.upstream import Upstream
from veomni_hook.locate import locate
from veomni_hook.settings import Settings

if TYPE_CHECKING:
    from veomni_hook.patches.spec import PatchConfig

__all__ = ["from_hit", "lookup", "outdated", "report_refusal", "stage1", "stage2", "store"]


def store() -> Store:
    """The cache of this process, opened at first use."""
    if STATE.store is None:
        STATE.store = open_store(current_settings().cache_dir, process=STATE.process)
        report_refusal(STATE.store)
    return STATE.store


def lookup(key: str, module: str) -> Hit | Unpatched | Miss:
    """Look a module up; a result from recorded configs holds if this process has seen nothing else."""
    process = {} if STATE.unrecorded else STATE.recorded
    return store().lookup(key, module, process)


def outdated(hit: Hit) -> str:
    """Why an entry is no longer right although its inputs are: a package that it wanted is installed now."""
    if not hit.manifest.consult:
        return ""
    installed = [name for name in hit.report["wanting"] if locate(name) is not None]
    return f"{', '.join(installed)} is installed now" if installed else ""


def report_refusal(store: Store, *, temporary: bool = False) -> None:
    """Warn once per process that the cache cannot be used, with the consequence and the remedy.

    Args:
        store: the cache; no warning if it stored everything it had to.
        temporary: whether a temporary folder is used instead.
    """
    if not store.refused:
        return
    now = "are patched in memory at each start"
    if temporary or store.mode == "temporary":
        now = "are kept in a temporary folder until this process ends, and every start patches them again"
    warn_once(
        f"the cache of patched modules cannot be used: {store.refused}. Modules {now}, so imports are "
        "slower. Fix: free space there, make the folder writable only for this user, or name another one in "
        "VEOMNI_CACHE_DIR",
        about="cache",
    )


def stage1(upstream: Upstream, settings: Settings, names: Sequence[str]) -> str:
    """The first-stage key: everything that affects the output and is known without loading a config."""
    from veomni_hook.kernels.selection import process_choice as kernels  # the first key loads the registry

    kernels.STATE.named = _notice  # here, because modules that are not edited tell slots nothing
    inprocess: list[tuple[str, str]] = []
    if registered := registered_for(upstream.module):
        from veomni_hook.finders.config_digest import config_digest  # loads ast; most processes register none

        inprocess = [(config.source_module, config_digest(config)) for config in registered]
    return key.stage1_key(
        module=upstream.module,
        upstream=upstream.data,
        engine=key.engine_digest(),
        settings={**settings.of_text(), "kernels": ",".join(kernels.asked_for(settings.kernels))},
        config_names=[_with_origin(name) for name in names],
        inprocess=inprocess,
        distribution=upstream.distribution,
        version=upstream.version,
    )


def _notice(ops: Collection[str]) -> None:
    """Kernels are chosen; what modules were imported without is part of their keys."""
    from veomni_hook.finders.late_choices import warn_of_late

    warn_of_late(ops)


def stage2(stage: str, module: str, configs: Iterable[PatchConfig]) -> str:
    """The second-stage key: with what loaded configs say about the module."""
    from veomni_hook.finders.config_digest import config_digest  # as above

    digests = [config_digest(config) for config in configs if config.applies_to(module)]
    return key.stage2_key(stage, digests)


def from_hit(hit: Hit, upstream: Upstream, cache: str, reason: str) -> Outcome:
    """Return the outcome of a module that is in the cache."""
    return Outcome(
        module=upstream.module,
        patched=True,
        reason=reason,
        cache=cache,
        origin=upstream.path,
        stored=hit.path,
        patch_hash=hit.manifest.patch_hash,
        read_report=lambda: hit.report,
        consult=hit.manifest.consult,
        code=hit.code,
    )


def _with_origin(name: str) -> str:
    """A config's name with its file: two projects may both have a `my_patches`."""
    module = name.partition(":")[0]
    if is_builtin(module):
        return name
    loaded = sys.modules.get(module)
    return f"{name} {getattr(loaded, '__file__', None) if loaded else _origin(module, tuple(sys.path))}"


@cache
def _origin(module: str, path: tuple[str, ...]) -> str | None:
    spec = locate(module)
    return None if spec is None else spec.origin
