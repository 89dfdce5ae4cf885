"""`veomni-hook dump`: the self-contained patched source, with the line numbers that tracebacks show."""

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


def dump(
    target: TargetArgument = None,
    config: ConfigOption = None,
    device: DeviceOption = None,
    file: OutputOption = None,
    *,
    pager: PagerOption = True,
    as_json: JsonOption = False,
) -> None:
    """Print the patched source of a module, with relative imports made absolute.

    Line numbers are those of tracebacks and breakpoints. Neither the module nor torch is imported. A module
    without patches is printed as it is installed.
    """
    from veomni_hook.patches.render import dump_text

    found = prepared(target, config, device)
    text = dump_text(found.stored_text, found.module)
    if as_json:
        output.emit_json({**facts_of(found), "text": text})
        return
    if found.patched is None:
        output.note(f"{found.module}: {found.reason}; this is the installed source")
    show(text, "python", paged=pager)
