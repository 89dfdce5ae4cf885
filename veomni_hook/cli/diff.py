"""`veomni-hook diff`: what the patches change, as a unified diff against the installed original."""

from __future__ import annotations

from veomni_hook.cli import output
from veomni_hook.cli.target_options import ConfigOption, DeviceOption, TargetArgument, prepared


def diff(target: TargetArgument = None, config: ConfigOption = None, device: DeviceOption = None) -> None:
    """Print the unified diff between a module's installed source and its patched form.

    Every hunk belongs to a patch: header, markers and rewritten imports are left out. Nothing is printed, and
    a note goes to stderr, where no patch applies.
    """
    found = prepared(target, config, device)
    if found.patched is None:
        output.note(f"{found.module}: {found.reason}; no difference")
        return
    from veomni_hook.patches.render import unified_diff

    output.emit_code(unified_diff(found.original, found.patched, found.module), "diff")
