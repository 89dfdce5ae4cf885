"""`veomni-hook diff`: what the patches change, as a unified diff against the installed original."""

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

    found = prepared(target, config, device)
    text = unified_diff(found.original, found.patched, found.module) if found.patched is not None else ""
    if as_json:
        output.emit_json({**facts_of(found), **_counts(text), "diff": text})
    elif found.patched is None:
        output.note(f"{found.module}: {found.reason}; no difference")
    else:
        show(text, "diff", paged=pager)


def _counts(text: str) -> dict[str, int]:
    """How many lines a diff adds and removes, without the two lines that name the files."""
    first = [line[:1] for line in text.split("\n")[2:]]
    return {"added": first.count("+"), "removed": first.count("-")}
