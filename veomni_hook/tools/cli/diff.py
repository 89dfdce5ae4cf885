"""`veomni-hook diff`: what patches change in a module."""

from __future__ import annotations

from veomni_hook.tools.cli import output
from veomni_hook.tools.cli.inputs.options import (
    ConfigOption,
    DeviceOption,
    JsonOption,
    OutputOption,
    TargetArgument,
    facts_of,
    prepared,
)
from veomni_hook.tools.cli.pager import PagerOption, show


def diff(
    target: TargetArgument = None,
    config: ConfigOption = None,
    device: DeviceOption = None,
    file: OutputOption = None,
    *,
    pager: PagerOption = True,
    as_json: JsonOption = False,
) -> None:
    """Print the unified diff between the installed source of a module and its patched form.

    The diff shows what patches change. It leaves out the header, the markers and the rewritten imports of the
    stored file. Where no patch applies, it is empty, and a note on stderr says so.
    """
    from veomni_hook.patches.render import unified_diff

    module = prepared(target, config, device)
    text = "" if module.patched is None else unified_diff(module.original, module.patched, module.module)
    if as_json:
        changed = [line[:1] for line in text.split("\n")[2:]]  # without the two lines that name the files
        counts = {"added": changed.count("+"), "removed": changed.count("-")}
        output.emit_json({**facts_of(module), **counts, "diff": text})
        return
    if module.patched is None:
        output.note(f"{module.module}: {module.reason}; no difference")
    if text:
        show(text, "diff", paged=pager)
