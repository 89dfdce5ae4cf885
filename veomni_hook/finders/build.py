"""What happens on a cache miss: load the configs, patch, verify, publish.

If the cache holds what the loaded configs make of the module, nothing is patched. The command line and the
dump take the same way, so that they show what an import executes.
"""

from __future__ import annotations

import gc
import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import decode_source
from typing import Any

from veomni_hook.cache.store import Hit, NotStored, Unpatched
from veomni_hook.errors import IdiomError
from veomni_hook.finders import absent_modules, already_imported
from veomni_hook.finders.applicable import asks_idioms, is_builtin
from veomni_hook.finders.configs import load_for, with_registered
from veomni_hook.finders.log import note, warn
from veomni_hook.finders.outcome import NOTHING, Outcome
from veomni_hook.finders.process_cache import from_hit, lookup, outdated, report_refusal, stage2, store
from veomni_hook.finders.recording import record_replacements
from veomni_hook.finders.state import STATE
from veomni_hook.finders.upstream import Upstream
from veomni_hook.kernels.selection.process_choice import unchosen
from veomni_hook.layout import counted
from veomni_hook.patches.engine import Origin, PatchedSource, applicable, patch_source
from veomni_hook.patches.idioms.recognise import OPTIONAL
from veomni_hook.patches.render import with_header
from veomni_hook.patches.report import PatchReport
from veomni_hook.patches.site import Site, Status
from veomni_hook.patches.spec import PatchConfig
from veomni_hook.settings import Settings


@dataclass(frozen=True)
class Built:
    """What came of a module whose configs were loaded.

    Attributes:
        configs: the configs, in the order in which they apply.
        stored: what the cache has of it now; `NotStored` also if nothing may be stored.
        cached: whether the cache had it before.
        patched: the patched module; None if the cache had it, or if nothing applies.
        failed: why idioms were left out; empty if they were not.
    """

    configs: Sequence[PatchConfig]
    stored: Hit | Unpatched | NotStored
    cached: bool
    patched: PatchedSource | None
    failed: str


def build(
    upstream: Upstream, settings: Settings, names: Sequence[str], stage: str, miss: str
) -> Outcome | str | None:
    """Load the configs of a module, and patch and publish it if the cache does not hold what they make of it.

    Args:
        upstream: the module.
        settings: the settings in force.
        names: the config modules to load.
        stage: its first-stage key.
        miss: why the cache was missed with this key.

    Returns:
        The outcome, or the reason why nothing applies. None if a plugin failed: then other configs
        apply, and the module has another key.
    """
    built = load_and_build(upstream, settings, names, stage)
    if built is None:
        return None
    if isinstance(built.stored, Hit):
        cache = "hit" if built.cached else "miss"
        return from_hit(built.stored, upstream, cache, STATE.unrecorded or miss)
    if isinstance(built.stored, Unpatched) or built.patched is None:
        return built.failed or NOTHING
    stored = stored_form(built.patched)
    return Outcome(
        module=upstream.module,
        patched=True,
        reason=built.stored.reason,
        cache="memory",
        origin=upstream.path,
        patch_hash=stored.patch_hash,
        read_report=stored.report.to_dict,
        consult=bool(stored.report.remarks or stored.report.companions),
        text=stored.text,
    )


def load_and_build(
    upstream: Upstream, settings: Settings, names: Sequence[str], stage: str, *, store_it: bool = True
) -> Built | None:
    """Do what `build` does, also for the command line; ``store_it``: whether to publish what is patched."""
    with _without_collector():
        kept, loaded = load_for(upstream.module, settings)
        if kept != tuple(names):
            return None
        configs = with_registered(loaded)
        others = [name for name in already_imported.modules_of(configs) if name != upstream.module]
        already_imported.report(others)
        missing = absent_modules.absent(
            config for config_module in loaded for config in config_module.configs
        )
        absent_modules.report(missing)
        named = [config_module for config_module in loaded if not is_builtin(config_module.name)]
        told = [config for config_module in named for config in config_module.configs]
        record_replacements(told)
        key = stage2(stage, upstream.module, told) if named else stage
        stored = lookup(key, upstream.module)
        if isinstance(stored, Unpatched) or (isinstance(stored, Hit) and not outdated(stored)):
            built = Built(configs, stored, True, None, "")
        else:
            built = _patched(upstream, configs, settings, key, missing, store_it=store_it)
        if named and store_it and not (built.failed or STATE.unrecorded):
            store().repeat(stage, key, STATE.recorded, missing)
        return built


@contextmanager
def _without_collector() -> Iterator[None]:
    # Trees are large and have no cycles; with torch loaded, collections cost a tenth of a build.
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _patched(
    upstream: Upstream,
    configs: Sequence[PatchConfig],
    settings: Settings,
    key: str,
    missing: Sequence[absent_modules.Absent],
    *,
    store_it: bool,
) -> Built:
    patched, failed = patch_with_idioms(upstream, configs, settings)
    stored: Hit | Unpatched | NotStored = NotStored(failed or "not stored")
    if store_it and not failed:
        if patched is not None:
            stored = publish(upstream, stored_form(patched), key, missing)
        else:
            store().publish_unpatched(key, upstream.module, missing)
            report_refusal(store())
    if patched is not None:
        note(f"patched {upstream.module} ({counted(len(patched.report.applied), 'patch', 'patches')})")
    return Built(configs, stored, False, patched, failed)


def patch_with_idioms(
    upstream: Upstream, configs: Sequence[PatchConfig], settings: Settings
) -> tuple[PatchedSource | None, str]:
    """Patch as an import does: with configs, and with idioms if they apply to this module.

    Returns:
        The patched module (None when nothing applies), and why idioms were left out (empty if they were not).
        A result without its idioms must not be cached.

    Raises:
        IdiomError: an idiom fails in strict mode. Otherwise this is a warning, and only configs apply.
    """
    device = settings.device_kind()
    try:
        idioms, optional = asks_idioms(upstream, settings), optional_idioms(settings)
        left = partial(_left, kernels=settings.kernels)
        return patch(upstream, configs, device, idioms=idioms, optional=optional, left=left), ""
    except IdiomError as error:
        if settings.strict:
            raise
        failed = f"without idioms, because one failed: {error.what}"
        warn(f"{upstream.module} is patched {failed}\n{error}")
        return patch(upstream, configs, device), failed


def _left(site: Site, kernels: str) -> str:
    return unchosen(site.op, kernels) if site.slots and site.status is Status.ROUTED else ""


def optional_idioms(settings: Settings) -> tuple[str, ...]:
    """Return the idioms that apply only with a setting, and do with these."""
    now, usual = settings.of_text(), Settings().of_text()
    return tuple(name for name, setting in OPTIONAL.items() if now[setting] != usual[setting])


def patch(
    upstream: Upstream,
    configs: Iterable[PatchConfig],
    device: str,
    *,
    idioms: bool = False,
    **chosen: Any,
) -> PatchedSource | None:
    """Apply configs and, if enabled, idioms to an upstream module; None when nothing applies.

    ``chosen`` is what the settings say of idioms, as for `patch_source`.
    """
    fitting = applicable(list(configs), upstream.module, device)
    if not (fitting or idioms):
        return None
    source = decode_source(upstream.data)
    origin = Origin(upstream.module, upstream.path, upstream.distribution, upstream.version)
    patched = patch_source(source, fitting, origin, device=device, idioms=idioms, **chosen)
    return patched if patched.report.applied else None


@dataclass(frozen=True)
class Stored:
    """A patched module as it is stored: header and text, and a report with that file's line numbers."""

    patch_hash: str
    text: str
    report: PatchReport


def stored_form(patched: PatchedSource) -> Stored:
    """Return the stored form of a patched module."""
    state = hashlib.blake2b(patched.text.encode(), digest_size=8)
    report = patched.report.to_dict()
    for site in report["missed"]:
        del site["code"], site["line"]  # another name for the cause of a miss makes no other form
    for remark in report["remarks"]:
        del remark["where"]  # nor does another machine, whose paths this names
    state.update(json.dumps(report, sort_keys=True).encode())
    patch_hash = state.hexdigest()
    text = with_header(patched, patch_hash)
    return Stored(patch_hash, text, patched.report.moved(text.count("\n") - patched.text.count("\n")))


def publish(
    upstream: Upstream,
    stored: Stored,
    key: str,
    missing: Sequence[absent_modules.Absent] = (),
) -> Hit | NotStored:
    """Store a patched module; `NotStored` says why it could not be."""
    cache = store()
    published = cache.publish(
        key,
        module=upstream.module,
        distribution=upstream.distribution,
        version=upstream.version,
        patch_hash=stored.patch_hash,
        text=stored.text,
        report=stored.report.to_dict(),
        absent=missing,
    )
    report_refusal(cache, temporary=isinstance(published, Hit))
    return published
