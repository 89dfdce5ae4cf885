"""What a miss does: load the configs, patch, verify, publish.

The command line and the dump patch with the same functions.
"""

from __future__ import annotations

import gc
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import decode_source
from types import CodeType

from veomni_hook.cache.store import Hit, NotStored
from veomni_hook.finders import configs, early
from veomni_hook.finders.inputs import input_files
from veomni_hook.finders.log import note
from veomni_hook.finders.outcome import Outcome
from veomni_hook.finders.pipeline import Upstream, device_of, from_hit, store
from veomni_hook.finders.state import STATE
from veomni_hook.patches.engine import Origin, PatchedSource, applicable, patch_source
from veomni_hook.patches.render import with_header
from veomni_hook.patches.report import PatchReport
from veomni_hook.patches.spec import PatchConfig
from veomni_hook.settings import Settings


def build(
    upstream: Upstream, settings: Settings, names: Sequence[str], stage: str, miss: str
) -> tuple[Outcome, str | None, CodeType | None] | str:
    """Patch and publish a module that the cache does not hold.

    Args:
        upstream: the module.
        settings: the settings in force.
        names: the config modules to ask.
        stage: its first-stage key.
        miss: why the cache was missed.

    Returns:
        The outcome, with the text where it could not be stored and the code where it could; or why nothing
        applies.
    """
    with _without_collector():
        return _build(upstream, settings, names, stage, miss)


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


def _build(
    upstream: Upstream, settings: Settings, names: Sequence[str], stage: str, miss: str
) -> tuple[Outcome, str | None, CodeType | None] | str:
    loaded = configs.load(names)
    every = configs.for_module(loaded, STATE.registered)
    early.report([c.source_module for c in every if c.source_module != upstream.module])
    patched = patch(upstream, every, device_of(settings))
    inputs = input_files(loaded)
    if patched is None:
        store().publish_unpatched(stage, upstream.module, inputs)
        return "no patch applies"
    stored = stored_form(patched)
    published = publish(upstream, stored, stage, inputs)
    note(f"patched {upstream.module} ({len(patched.report.applied)} patches)")
    if isinstance(published, Hit):
        return from_hit(published, upstream, "miss", miss), None, published.code
    outcome = Outcome(
        upstream.module,
        patched=True,
        reason=published.reason,
        cache="memory",
        origin=upstream.path,
        patch_hash=stored.patch_hash,
        report=stored.report.to_dict,
    )
    return outcome, stored.text, None


def patch(upstream: Upstream, found: Iterable[PatchConfig], device: str) -> PatchedSource | None:
    """Apply configs to an upstream module; None when none applies to it."""
    fitting = applicable(list(found), upstream.module, device)
    if not fitting:
        return None
    return patch_source(decode_source(upstream.data), fitting, _origin_of(upstream), device=device)


def _origin_of(upstream: Upstream) -> Origin:
    return Origin(upstream.module, upstream.path, upstream.distribution, upstream.version)


@dataclass(frozen=True)
class Stored:
    """The form in which a patched module is stored: header and text, and a report with that file's lines."""

    patch_hash: str
    text: str
    report: PatchReport


def stored_form(patched: PatchedSource) -> Stored:
    """Return the stored form of a patched module."""
    state = hashlib.blake2b(patched.text.encode(), digest_size=8)
    state.update(json.dumps(patched.report.to_dict(), sort_keys=True).encode())
    patch_hash = state.hexdigest()
    text = with_header(patched, patch_hash)
    return Stored(patch_hash, text, patched.report.moved(text.count("\n") - patched.text.count("\n")))


def publish(upstream: Upstream, stored: Stored, stage: str, inputs: Mapping[str, str]) -> Hit | NotStored:
    """Store a patched module; `NotStored` says why it could not be."""
    return store().publish(
        stage,
        module=upstream.module,
        distribution=upstream.distribution,
        version=upstream.version,
        patch_hash=stored.patch_hash,
        text=stored.text,
        code_factory=lambda path: compile(stored.text, path, "exec", dont_inherit=True),
        inputs=inputs,
        report=stored.report.to_dict(),
    )
