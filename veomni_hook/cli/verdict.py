"""Whether each declared patch of some configs applies exactly once to the installed module: `check`'s core.

The engine stops at the first patch that does not apply. A report has to name them all, so after a failure
each config, and then each patch, is tried alone.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from veomni_hook.errors import PatchError, VeomniHookError

if TYPE_CHECKING:
    from veomni_hook.finders.pipeline import Upstream
    from veomni_hook.patches.engine import PatchedSource
    from veomni_hook.patches.spec import Patch, PatchConfig

APPLIES = "applies"
YIELDS = "yields"
ABSENT = "absent"
FAILS = "FAILS"


@dataclass(frozen=True)
class Verdict:
    """What became of one declared patch.

    Attributes:
        module: the module that it patches.
        device: `gpu`, `npu`, or `any` where no config of the module cares.
        config: the config's name.
        kind: the verb.
        target: what it patches in the module.
        verdict: `applies` (exactly once), `yields` (to a user's config), `absent` (this transformers has no
            such module) or `FAILS`.
        detail: lines in the stored file, or why it yields or fails.
        fix: what to do about a failure.
    """

    module: str
    device: str
    config: str
    kind: str
    target: str
    verdict: str
    detail: str = ""
    fix: str = ""

    def to_dict(self) -> dict[str, str]:
        """Return the fields as JSON-ready values."""
        return asdict(self)


def judge(upstream: Upstream, configs: Sequence[PatchConfig]) -> list[Verdict]:
    """Try configs of one module together, on each device that they distinguish.

    Args:
        upstream: the installed module.
        configs: all that an import of the module would apply.
    """
    devices = sorted({config.device for config in configs if config.device is not None})
    verdicts = []
    for device in devices or ["gpu"]:
        fitting = [config for config in configs if config.device in (None, device)]
        verdicts += _judge(upstream, fitting, device, device if devices else "any")
    return verdicts


def failure(module: str, config: str, error: VeomniHookError, *, device: str = "any") -> Verdict:
    """Return the verdict of an error that belongs to a config as a whole, or to the patch that it names."""
    target = getattr(error, "target", "") or "-"
    return Verdict(module, device, config, "-", target, FAILS, f"{error.what} ({error.where})", error.fix)


def _judge(upstream: Upstream, configs: Sequence[PatchConfig], device: str, shown: str) -> list[Verdict]:
    from veomni_hook.finders.build import patch

    try:
        patched = patch(upstream, configs, device)
    except PatchError as error:
        found = [verdict for config in configs for verdict in _probe(upstream, config, device, shown)]
        if all(verdict.verdict != FAILS for verdict in found):
            together = " + ".join(config.name for config in configs)
            found.append(failure(upstream.module, together, error, device=shown))
        return found
    return [verdict for config in configs for verdict in _declared(config, patched, shown)]


def _declared(config: PatchConfig, patched: PatchedSource | None, shown: str) -> list[Verdict]:
    """Hold what a config declares against what the engine says it applied."""
    if patched is None:
        return []
    from veomni_hook.finders.build import stored_form

    report = stored_form(patched).report
    applied = [one for one in report.applied if one.config == config.name]
    counts = Counter((one.kind, one.target) for one in applied)
    lines = {(one.kind, one.target): "lines {}-{}".format(*one.lines) for one in applied}
    yielded = {one.target: one.reason for one in report.yielded if one.config == config.name}
    verdicts = []
    for declared in config.patches:
        kind = declared.patch_type.value
        count = counts[kind, declared.target]
        wanted = sum(p.patch_type.value == kind and p.target == declared.target for p in config.patches)
        detail, verdict = lines.get((kind, declared.target), ""), APPLIES
        if declared.target in yielded and not count:
            detail, verdict = yielded[declared.target], YIELDS
        elif count != wanted:
            detail, verdict = f"declared {wanted} times, applied {count} times", FAILS
        verdicts.append(Verdict(report.module, shown, config.name, kind, declared.target, verdict, detail))
    return verdicts


def _probe(upstream: Upstream, config: PatchConfig, device: str, shown: str) -> list[Verdict]:
    from veomni_hook.finders.build import patch

    try:
        return _declared(config, patch(upstream, [config], device), shown)
    except PatchError as error:
        found = [_probe_patch(upstream, config, declared, device, shown) for declared in config.patches]
        if all(verdict.verdict != FAILS for verdict in found):
            found.append(failure(upstream.module, config.name, error, device=shown))
        return found


def _probe_patch(
    upstream: Upstream, config: PatchConfig, declared: Patch, device: str, shown: str
) -> Verdict:
    from veomni_hook.finders.build import patch

    # Dropped imports and excluded names hold only with every patch in place.
    alone = copy.copy(config)
    alone.patches, alone.exclude, alone.drop_imported_names = [declared], [], set()
    alone.label = config.name
    kind = declared.patch_type.value
    try:
        patch(upstream, [alone], device)
    except PatchError as error:
        detail = f"{error.what} ({error.where})"
        return Verdict(upstream.module, shown, config.name, kind, declared.target, FAILS, detail, error.fix)
    return Verdict(upstream.module, shown, config.name, kind, declared.target, APPLIES, "tried alone")
