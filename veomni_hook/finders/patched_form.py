"""The patched form of a module whose upstream spec is known: key → cache → (build →) loader.

A cache hit uses neither `ast` nor a config, so what only a miss needs is imported in functions. Errors in
patches reach the import statement, errors in the cache never do.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from importlib.machinery import ModuleSpec, SourceFileLoader
from typing import Any

from veomni_hook.cache.store import Hit, Miss, Unpatched
from veomni_hook.errors import ConfigError, VeomniHookError
from veomni_hook.finders.applicable import asks_idioms, config_names, may_be_patched, registered_for
from veomni_hook.finders.loader import PatchedLoader
from veomni_hook.finders.loading_guard import serving_upstream
from veomni_hook.finders.log import warn, warn_once
from veomni_hook.finders.outcome import NOTHING, Outcome
from veomni_hook.finders.process_cache import from_hit, lookup, outdated, stage1
from veomni_hook.finders.settings_in_force import current_settings
from veomni_hook.finders.state import STATE
from veomni_hook.finders.upstream import Upstream, read_upstream
from veomni_hook.settings import Settings

__all__ = ["patched_form", "patched_loader", "would_patch"]


def patched_loader(fullname: str, spec: ModuleSpec) -> PatchedLoader | None:
    """Return the loader of a module's patched form, or None if nothing applies; record the outcome.

    Args:
        fullname: the module.
        spec: its upstream spec.

    Raises:
        VeomniHookError: a patch does not apply; in strict mode also: the module has no source.
    """
    settings = current_settings()
    if not may_be_patched(fullname, settings):
        return None
    upstream, reason = read_upstream(fullname, spec)
    if upstream is None:
        STATE.outcomes[fullname] = Outcome(
            module=fullname, patched=False, reason=reason, origin=spec.origin or ""
        )
        if settings.strict:
            raise VeomniHookError(
                f"{fullname} cannot be patched: {reason}",
                where=spec.origin or fullname,
                fix="install transformers as source files, or unset VEOMNI_STRICT to run it unpatched",
            )
        warn(f"{fullname} is left unpatched: {reason}")
        return None
    form = _form_of(upstream, spec, settings)
    if isinstance(form, str):
        STATE.outcomes[fullname] = Outcome(module=fullname, patched=False, reason=form, origin=upstream.path)
        return None
    loader, STATE.outcomes[fullname] = form
    if settings.banner and (STATE.registered or settings.patches):
        from veomni_hook.finders.banner import module_is_patched  # loaded with the first patched module

        module_is_patched(fullname)
    return loader


def patched_form(fullname: str, spec: ModuleSpec) -> tuple[PatchedLoader, Outcome] | str:
    """Return the patched form's loader for a module that is loaded unpatched; the outcome is not recorded.

    A string says why there is none; it is `NOTHING` if no patch applies.
    """
    settings = current_settings()
    if not may_be_patched(fullname, settings):
        return NOTHING
    upstream, reason = read_upstream(fullname, spec)
    return reason if upstream is None else _form_of(upstream, spec, settings)


def would_patch(fullname: str) -> bool:
    """Whether importing this module, which is loaded, now would execute patched source."""
    spec = getattr(sys.modules.get(fullname), "__spec__", None)
    if spec is None or not may_be_patched(fullname, settings := current_settings()):
        return False
    upstream, _ = read_upstream(fullname, spec)
    return upstream is not None and not isinstance(_lookup_or_build(upstream, settings), str)


def _form_of(upstream: Upstream, spec: ModuleSpec, settings: Settings) -> tuple[PatchedLoader, Outcome] | str:
    outcome = _lookup_or_build(upstream, settings)
    if isinstance(outcome, str):
        return outcome
    if settings.dump_patched:
        from veomni_hook.finders.dump import dump  # loads what a miss needs

        dump(upstream, settings, outcome)
    from veomni_hook.finders.slots import bind_slots  # the first patched module brings the first slots

    bind_slots()
    if outcome.consult:
        _prepare_execution(outcome.report, settings)
    foreign = spec.loader if isinstance(spec.loader, SourceFileLoader) else None
    loader = PatchedLoader(
        upstream.module,
        outcome.stored or upstream.path,
        text=outcome.text,
        code=outcome.code,
        upstream=upstream.path,
        foreign=None if type(foreign) is SourceFileLoader else foreign,
    )
    return loader, outcome


def _lookup_or_build(upstream: Upstream, settings: Settings) -> Outcome | str:
    """Return the outcome of a module that is patched, or the reason why nothing applies."""
    names = config_names(upstream.module, settings)
    if not (asks_idioms(upstream, settings) or names or registered_for(upstream.module)):
        return NOTHING
    stage = stage1(upstream, settings, names)
    # Dumps are for debugging: what the configs say now, not what they said when they were recorded.
    stored = Miss("it is dumped") if settings.dump_patched else lookup(stage, upstream.module)
    if not isinstance(stored, Miss) and stored.manifest.absent:
        from veomni_hook.finders.absent_modules import report  # hits with such configs are rare

        report(stored.manifest.absent)
    if isinstance(stored, Unpatched):
        return NOTHING
    missed = stored.reason if isinstance(stored, Miss) else outdated(stored)
    if isinstance(stored, Hit) and not missed:
        return from_hit(stored, upstream, "hit", "")
    from veomni_hook.finders.build import build  # loads the engine: ast, configs and idioms

    built = build(upstream, settings, names, stage, missed)
    return _lookup_or_build(upstream, settings) if built is None else built


def _prepare_execution(report: Mapping[str, Any], settings: Settings) -> None:
    """Tell what remarks there are on configs, once per process, and import their companions.

    Companions are the modules that their code imports. VeOmni's runtime imports the modeling modules itself,
    to derive output classes from theirs: they are served unpatched and forgotten, as while configs are
    loaded. Imported in the middle of the patched module, they would be circular.

    Raises:
        ConfigError: a remark says what is wrong, in strict mode.
        ImportError: a companion cannot be imported; the module could not be either.
    """
    from veomni_hook.patches.report import Remark  # only modules with such configs have remarks

    for remark in (Remark(**fields) for fields in report["remarks"]):
        if settings.strict and not remark.harmless:
            raise ConfigError(remark.what, where=remark.where, fix=remark.fix)
        # One note for all modules and patches of a config.
        warn_once(str(remark), about=f"{remark.config}: {remark.what}" if remark.harmless else "")
    missing = [name for name in report["companions"] if name not in sys.modules]
    if missing:
        with serving_upstream():
            for name in missing:
                importlib.import_module(name)
