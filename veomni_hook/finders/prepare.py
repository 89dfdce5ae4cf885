"""A target module's patched form without importing it, for the command line.

Neither torch nor transformers is imported, unless a user's config does so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.util import decode_source
from typing import TYPE_CHECKING

from veomni_hook.cache.store import Hit, Unpatched
from veomni_hook.errors import ConfigError
from veomni_hook.finders import build
from veomni_hook.finders.applicable import asks_idioms, config_names
from veomni_hook.finders.configs import load_for, with_registered
from veomni_hook.finders.outcome import NOTHING
from veomni_hook.finders.process_cache import stage1
from veomni_hook.finders.upstream import Upstream, read_upstream
from veomni_hook.locate import locate
from veomni_hook.settings import Settings

if TYPE_CHECKING:
    from veomni_hook.patches.engine import PatchedSource
    from veomni_hook.patches.report import PatchReport
    from veomni_hook.patches.site import Site
    from veomni_hook.patches.spec import PatchConfig


@dataclass(frozen=True)
class Prepared:
    """One module, patched but not imported.

    Attributes:
        module: its name.
        original: the installed source.
        original_path: the path of the installed source.
        patched: the engine's `PatchedSource`; None when no patch applies.
        report: the engine's `PatchReport`, with the stored text's line numbers; None when no patch applies.
        stored_text: the stored file's text, header included; the original when nothing applies.
        stored_path: the file that the import hook would execute; None when it is not in the cache.
        patch_hash: identifies the patched form; empty when nothing applies.
        reason: why nothing applies, or why nothing is stored.
        cache: `hit`, `miss` (now published), `memory`, or `` when nothing applies.
    """

    module: str
    original: str
    original_path: str
    patched: PatchedSource | None
    report: PatchReport | None
    stored_text: str
    stored_path: str | None
    patch_hash: str
    reason: str
    cache: str


def prepare(
    module: str,
    settings: Settings,
    *,
    configs: Sequence[PatchConfig] | None = None,
    device: str | None = None,
    publish: bool = True,
    left: Callable[[Site], str] | None = None,
) -> Prepared:
    """Patch a module as the import hook would.

    Args:
        module: the module's full name.
        settings: the settings in force.
        configs: apply only these and do not use the cache; by default apply what an import would.
        device: `gpu` or `npu` instead of the settings' device.
        publish: whether to store the result of a cache miss.
        left: which sites of idioms stay as they are upstream, as for `patch_source`; not what an import does,
            so the cache is not used.

    Raises:
        ConfigError: the module does not exist or has no source file.
        PatchError: a patch does not apply.
    """
    spec = locate(module)
    upstream, reason = (None, "it is not installed") if spec is None else read_upstream(module, spec)
    if upstream is None:
        raise ConfigError(
            f"{module} cannot be read: {reason}",
            where=(spec.origin if spec is not None else None) or module,
            fix="name an installed modeling module; `veomni-hook list --all --by module` shows them",
        )
    if device is not None:
        settings = replace(settings, device=device)
    if configs is not None:
        patched = build.patch(upstream, configs, settings.device_kind())
        reason = "the cache is not used if configs are given" if patched else "none of the configs applies"
        return _prepared(upstream, patched, None, reason, "memory")
    if left is not None:
        named = with_registered(load_for(module, settings)[1])
        idioms = asks_idioms(upstream, settings)
        patched = build.patch(upstream, named, settings.device_kind(), idioms=idioms, left=left)
        return _prepared(upstream, patched, None, "it is made for a file" if patched else NOTHING, "memory")
    names = config_names(module, settings)
    stage = stage1(upstream, settings, names)
    built = build.load_and_build(upstream, settings, names, stage, store_it=publish)
    if built is None:  # a plugin failed, and is left out
        return prepare(module, settings, publish=publish)
    if isinstance(built.stored, Unpatched):
        return _prepared(upstream, None, None, NOTHING, "")
    patched = built.patched or build.patch_with_idioms(upstream, built.configs, settings)[0]
    if isinstance(built.stored, Hit):
        return _prepared(upstream, patched, built.stored, "", "hit" if built.cached else "miss")
    return _prepared(
        upstream, patched, None, built.stored.reason if patched else built.failed or NOTHING, "memory"
    )


def _prepared(
    upstream: Upstream, patched: PatchedSource | None, hit: Hit | None, reason: str, cache: str
) -> Prepared:
    original = decode_source(upstream.data)
    if patched is None:
        return Prepared(upstream.module, original, upstream.path, None, None, original, None, "", reason, "")
    stored = build.stored_form(patched)
    return Prepared(
        upstream.module,
        original,
        upstream.path,
        patched,
        stored.report,
        hit.source() if hit else stored.text,
        hit.path if hit else None,
        hit.manifest.patch_hash if hit else stored.patch_hash,
        reason,
        cache,
    )
