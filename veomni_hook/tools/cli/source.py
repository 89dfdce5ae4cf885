"""`veomni-hook dump` and `veomni-hook diff`: the patched source of a module, whole or against upstream's."""

from __future__ import annotations

from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    from veomni_hook.finders.prepare import Prepared


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

    module = prepared(target, config, device)
    text = dump_text(module.stored_text, module.module)
    if as_json:
        output.emit_json({**facts_of(module), "text": text})
    else:
        _tell(module, text, "python", "this is the installed source", paged=pager)


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
    else:
        _tell(module, text, "diff", "no difference", paged=pager)


def _tell(module: Prepared, text: str, lexer: str, unpatched: str, *, paged: bool) -> None:
    if module.patched is None:
        output.note(f"{module.module}: {module.reason}; {unpatched}")
    if text:
        show(text, lexer, paged=paged)
